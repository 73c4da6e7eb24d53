"""What every FP8 module shares: FP8 data and FP32 scales that stay so."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..kernels import E4M3
from ..kernels.common.checks import FLOATS, check_shape, check_tensor
from .saving import check_saver

_WAY_OUT = "quantize with moefp8.convert, or unfreeze() the module first, which takes it as it is"


class FixedDtypeModule(nn.Module):
    """A module whose `fp8_names` (E4M3 codes) and `fp32_names` keep their dtype in casts."""

    fp8_names: ClassVar[tuple[str, ...]] = ()
    fp32_names: ClassVar[tuple[str, ...]] = ()
    is_converted = False  # whether `convert` put it in another module's place

    def _look_up(self, name: str) -> Any:
        """`getattr(self, name)` in a third of the time: `nn.Module` looks for parameters last."""
        parameters = self._parameters
        if name in parameters:
            return parameters[name]
        if name in self.fp8_names and name in getattr(self, "parametrizations", ()):
            raise ValueError(
                f"{type(self).__name__}: {name} is parametrized (by torch.nn.utils.parametrize, or "
                "PEFT's target_parameters), which would change FP8 codes and not what they stand "
                "for; add adapters with moefp8.adapters.add_lora, or dequantize the module first: "
                "moefp8.dequantize(model)"
            )
        return getattr(self, name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Let `fn`, as `.to` or `.half` passes it, move the fixed tensors but not cast them."""
        fixed = {id(getattr(self, name, None)) for name in self.fp8_names + self.fp32_names}

        def keeping_dtype(x: torch.Tensor) -> torch.Tensor:
            if id(x) not in fixed:
                return fn(x)
            probe = fn(x.new_empty(0))
            return fn(x) if probe.dtype == x.dtype else x.to(probe.device)

        return super()._apply(keeping_dtype, recurse)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.fp8_names:
            check_saver(self.is_converted)
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take data and scales together or not at all; upcast scales, which is exact."""
        if problems := self._problems(state_dict, prefix):
            error_msgs: list[str] = args[-1]
            error_msgs += problems
            return
        for name in self.fp32_names:
            if prefix + name in state_dict:
                state_dict[prefix + name] = state_dict[prefix + name].float()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _problems(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """What forbids loading the fixed tensors; only exact casts are allowed."""
        names = [n for n in self.fp8_names + self.fp32_names if getattr(self, n) is not None]
        came = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        layer, problems = type(self).__name__, []
        for name, tensor in came.items():
            allowed = (E4M3,) if name in self.fp8_names else (*FLOATS, torch.float8_e8m0fnu)
            shape = list(getattr(self, name).shape)
            try:
                check_tensor(layer, prefix + name, tensor, allowed)
                check_shape(layer, prefix + name, tensor, shape, "the model's")
            except (TypeError, ValueError) as error:
                way_out = f"; {_WAY_OUT}" if tensor.dtype in FLOATS else ""
                problems.append(f"{error}{way_out if name in self.fp8_names else ''}")
        missing = [prefix + name for name in names if name not in came]
        if came and missing and self.fp8_names:
            problems.append(f"{layer}: {', '.join(missing)} must come with {', '.join(came)}")
        return problems

    def __deepcopy__(self, memo: dict[int, Any]) -> "FixedDtypeModule":
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Give pickle (bytes, requires_grad) for FP8 data, since FP8 storages do not unpickle."""
        data = {name: self.get_parameter(name) for name in self.fp8_names}
        codes = {name: (x.detach().view(torch.uint8), x.requires_grad) for name, x in data.items()}
        parameters = {**self._parameters, **dict.fromkeys(codes)}
        return {**self.__dict__, "_parameters": parameters, "_fp8_bytes": codes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fp8_bytes = state.pop("_fp8_bytes")
        super().__setstate__(state)
        for name, (data, requires_grad) in fp8_bytes.items():
            self._parameters[name] = nn.Parameter(data.view(E4M3), requires_grad)


def is_wrapped(module: nn.Module) -> bool:
    """Whether a call does more than the forward of the module's class: a swap would lose that.

    That may be hooks, a `forward` that was set on the module, as accelerate does, or a `__call__`
    of its class.
    """
    forward = module.__dict__.get("forward", type(module).forward)
    return (
        getattr(forward, "__func__", forward) is not type(module).forward
        or type(module).__call__ is not nn.Module.__call__
        or bool(module._forward_hooks or module._forward_pre_hooks)
        or bool(module._backward_hooks or module._backward_pre_hooks)
    )


def check_dtype(op: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless dequantized weights can have `dtype`."""
    if dtype not in FLOATS:
        allowed = ", ".join(map(str, FLOATS))
        raise TypeError(f"{op}: dtype must be one of {allowed}, got {dtype!r}")


def frozen_parameter(
    shape: Sequence[int], device: Any, dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    """An uninitialised parameter that asks for no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def draw_as_linear(x: torch.Tensor, in_features: int) -> torch.Tensor:
    """Fill a weight or bias as `nn.Linear` does."""
    bound = 1 / math.sqrt(in_features) if in_features > 0 else 0.0
    return x.uniform_(-bound, bound)


def attributes_repr(module: object, *names: str) -> str:
    return ", ".join(f"{name}={getattr(module, name)!r}" for name in names)
