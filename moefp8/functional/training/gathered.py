"""A weight of which only the codes were gathered from its shards, in the master weight's place.

FSDP2 hands a module such a tensor instead of a gathered master weight: 1 byte a weight, and scales.
It has the shape and dtype of the master weight, so that its gradient has them, too. The ops of
trained layers read its codes; it has no values that other operations could read.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from ...kernels.common.registry import Op, register
from ..transposed import transposed

_aten = torch.ops.aten
_KEEPING = {_aten.detach.default, _aten.alias.default, _aten.as_strided.default}
_OF_ITS_SHAPE = {
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
}
_SCHEMA = re.compile(r"moefp8::(\w+)\((.*)\) -> (.*)")
_of_codes: dict[Any, Any] = {}  # overload -> the same op, which takes codes for weights


class GatheredWeight(torch.Tensor):
    """Codes of a weight, with the shape and dtype of its master weight.

    Attributes:
        codes, scale_inv: as in `WeightCodes`; whoever gathered them frees and fills their memory.
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
        if func in _of_codes:
            return _of_codes[func](*args)
        if func in _KEEPING:
            self = args[0]
            if func is _aten.as_strided.default and list(args[1]) != list(self.shape):
                raise ValueError(
                    f"a gathered weight of shape {list(self.shape)} cannot be viewed as {args[1]}"
                )
            return cls(self.codes, self.scale_inv, self.parts, self.dtype)
        if func in _OF_ITS_SHAPE:
            given = dict(kwargs or {})
            given["dtype"] = given.get("dtype") or args[0].dtype
            return func(args[0].codes, *args[1:], **given)
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
    """What `codes_of` gives of a gathered weight, as `WeightCodes`, with W^T made when asked for.

    On a GPU, W^T is kept until whoever gathered the codes frees them.
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

    For that, the same op is registered once more, with codes and scales in place of such weights:
    so tracers see all that is read.
    """
    overload = op.overload
    name, told, returns = _SCHEMA.fullmatch(str(overload._schema)).groups()  # type: ignore[union-attr]
    arguments = told.split(", ")
    are_weights = [x.split()[1] in names for x in arguments]
    with_codes = ", ".join(
        f"{x}, Tensor? {x.split()[1]}_scale_inv, int {x.split()[1]}_parts, str {x.split()[1]}_dtype"
        if is_weight
        else x
        for x, is_weight in zip(arguments, are_weights, strict=True)
    )

    def taking(make: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> list[Any]:
        left, given = iter(args), []
        for is_weight in are_weights:
            x = next(left)
            if is_weight:
                scale_inv, parts, dtype = next(left), next(left), next(left)
                x = x if scale_inv is None else make(x, scale_inv, parts, getattr(torch, dtype))
            given.append(x)
        return given

    def body(*args: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return overload(*taking(GatheredWeight, args))

    def fake(*args: Any) -> Any:
        return overload(*taking(lambda x, _, __, dtype: torch.empty_like(x, dtype=dtype), args))

    twin = register(
        f"{name}_of_gathered({with_codes}) -> {returns}", cpu=body, fake=fake, cuda=body
    )

    def call(*args: Any) -> Any:
        given: list[Any] = []
        for x, is_weight in zip(args, are_weights, strict=True):
            if isinstance(x, GatheredWeight):
                given += [x.codes, x.scale_inv, x.parts, str(x.dtype).removeprefix("torch.")]
            else:
                given += [x, None, 1, ""] if is_weight else [x]
        return twin(*given)

    _of_codes[overload] = call
