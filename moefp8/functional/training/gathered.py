"""A stand-in for a master weight, of which FSDP2 gathered only the codes from the shards.

A module gets this tensor instead of a gathered master weight: 1 byte a weight, and scales. It has
the shape and dtype of the master weight, and so has its gradient. The ops of trained layers read
its codes; it has no values for other operations to read.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from ...kernels.registry import Op, register
from ..transposed import transposed

_aten = torch.ops.aten
_VIEWS = {_aten.detach.default, _aten.alias.default, _aten.as_strided.default}
_NEW_TENSORS = {
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
}
_SCHEMA = re.compile(r"moefp8::(\w+)\((.*)\) -> (.*)")
_ops_with_codes: dict[Any, Any] = {}  # overload -> the same op, with codes in place of weights


class GatheredWeight(torch.Tensor):
    """Codes of a weight, with the shape and dtype of its master weight.

    Attributes:
        codes, scale_inv: as in `WeightCodes`; FSDP frees and fills their memory.
        parts: as in `codes_of`.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    parts: int

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale_inv: torch.Tensor, parts: int, dtype: torch.dtype
    ) -> "GatheredWeight":
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )

    def __init__(
        self, codes: torch.Tensor, scale_inv: torch.Tensor, parts: int, dtype: torch.dtype
    ) -> None:
        self.codes, self.scale_inv, self.parts = codes, scale_inv, parts

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ops_with_codes:
            return _ops_with_codes[func](*args)
        if func in _VIEWS:
            self = args[0]
            if func is _aten.as_strided.default and list(args[1]) != list(self.shape):
                raise ValueError(
                    f"a gathered weight of shape {list(self.shape)} cannot be viewed as {args[1]}"
                )
            return cls(self.codes, self.scale_inv, self.parts, self.dtype)
        if func in _NEW_TENSORS:
            options = dict(kwargs or {})
            options["dtype"] = options.get("dtype") or args[0].dtype
            return func(args[0].codes, *args[1:], **options)
        raise TypeError(
            f"{func}: FSDP gathered FP8 codes of this weight, which only GEMMs of moefp8 can read; "
            "for its values use the sharded parameter, or leave out prepare_fsdp"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale_inv"], (self.parts, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, *_: Any
    ) -> "GatheredWeight":
        return cls(inner["codes"], inner["scale_inv"], *context)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({list(self.shape)}, dtype={self.dtype}, parts={self.parts})"


class GatheredCodes:
    """The result of `codes_of` for a gathered weight: `WeightCodes` that make W^T on first use.

    On a GPU, W^T is kept until FSDP frees the codes.
    """

    def __init__(self, weight: GatheredWeight, parts: int) -> None:
        if weight.parts != parts:
            raise ValueError(
                f"codes_of: parts must be {weight.parts}, with which the codes of this weight were "
                f"gathered, got {parts}"
            )
        self.data, self.scale_inv, self._parts = weight.codes, weight.scale_inv, parts

    @property
    def transposed(self) -> torch.Tensor:
        return transposed(self.data, True, self._parts)


def takes_gathered(op: Op, *names: str) -> None:
    """Let an op take a `GatheredWeight` for each of the arguments `names`.

    The op is registered a second time, with codes and scales in place of such weights, so that
    tracers see all tensors that it reads.
    """
    overload = op.overload
    name, schema, returns = _SCHEMA.fullmatch(str(overload._schema)).groups()  # type: ignore[union-attr]
    arguments = schema.split(", ")
    are_weights = [x.split()[1] in names for x in arguments]
    with_codes = ", ".join(
        f"{x}, Tensor? {x.split()[1]}_scale_inv, int {x.split()[1]}_parts, str {x.split()[1]}_dtype"
        if is_weight
        else x
        for x, is_weight in zip(arguments, are_weights, strict=True)
    )

    def with_weights(make: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> list[Any]:
        left, joined = iter(args), []
        for is_weight in are_weights:
            x = next(left)
            if is_weight:
                scale_inv, parts, dtype = next(left), next(left), next(left)
                x = x if scale_inv is None else make(x, scale_inv, parts, getattr(torch, dtype))
            joined.append(x)
        return joined

    def body(*args: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return overload(*with_weights(GatheredWeight, args))

    def fake(*args: Any) -> Any:
        weights = with_weights(lambda x, _, __, dtype: torch.empty_like(x, dtype=dtype), args)
        return overload(*weights)

    twin = register(
        f"{name}_of_gathered({with_codes}) -> {returns}", reference=body, fake=fake, cuda=body
    )

    def call(*args: Any) -> Any:
        split: list[Any] = []
        for x, is_weight in zip(args, are_weights, strict=True):
            if isinstance(x, GatheredWeight):
                split += [x.codes, x.scale_inv, x.parts, str(x.dtype).removeprefix("torch.")]
            else:
                split += [x, None, 1, ""] if is_weight else [x]
        return twin(*split)

    _ops_with_codes[overload] = call
