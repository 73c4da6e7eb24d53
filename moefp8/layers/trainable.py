"""What modules share whose weights may be trained: master weights in place of FP8 codes."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from ..functional.training.linear import Wgrad, check_wgrad
from ..kernels.common.checks import FLOATS
from .module import FixedDtypeModule, check_dtype
from .parts import parts_of


class TrainableModule(FixedDtypeModule):
    """An FP8 module in one of two forms.

    Frozen, its weights are E4M3 codes with scales, which never ask for a gradient. Trainable, they
    are master weights in BF16, FP16 or FP32 under the same names, without scales, and codes are
    made of them for each value that they have: see `moefp8.functional.training.weights`.

    Attributes:
        wgrad: how a gradient in weights is computed: in FP8 with inputs in blocks of "128x1" or of
            "128x128" (tokens x features), or in "bf16". Gradients of outputs are in 128x1.
    """

    master_names: ClassVar[tuple[str, ...]] = ()  # weights, in either form
    wgrad: Wgrad = "128x1"

    @property
    def trainable(self) -> bool:
        """Whether the weights are master weights."""
        return bool(self.master_names) and not self.fp8_names

    def _hold_master_weights(self, weights: dict[str, nn.Parameter], wgrad: Wgrad) -> None:
        """Hold these in place of codes and scales."""
        check_wgrad(type(self).__name__, wgrad)
        self.wgrad = wgrad
        for name, weight in weights.items():
            setattr(self, name, weight)
        for name in type(self).fp32_names:
            self.register_parameter(name, None)
        self.__dict__.update(fp8_names=(), fp32_names=())

    def _hold_codes(self, tensors: dict[str, torch.Tensor]) -> None:
        """Hold these codes and scales in place of master weights."""
        for name in ("fp8_names", "fp32_names"):
            self.__dict__.pop(name, None)
        for name, x in tensors.items():
            setattr(self, name, nn.Parameter(x, requires_grad=False))

    def _problems(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        if not self.trainable:
            return super()._problems(state_dict, prefix)
        came = {name: state_dict.get(prefix + name) for name in self.master_names}
        return [
            f"{type(self).__name__}: {prefix + name} must be bfloat16 or float16 or float32, since "
            f"the module is trainable, got {str(x.dtype).removeprefix('torch.')}; freeze() the "
            "module first, or load with moefp8.load_checkpoint"
            for name, x in came.items()
            if x is not None and x.dtype not in FLOATS
        ]

    def freeze(self) -> Any:
        """Quantize the master weights in place: from then on they are frozen codes. Returns self.

        A frozen module stays as it is.
        """
        raise NotImplementedError

    def unfreeze(self, dtype: torch.dtype = torch.bfloat16, *, wgrad: Wgrad | None = None) -> Any:
        """Make master weights of the codes, in place, which then ask for gradients. Returns self.

        A trainable module stays as it is.

        Raises:
            TypeError: dtype is not bf16, fp16 or fp32.
            ValueError: it is a part that `shard` left, or wgrad is unknown.
        """
        raise NotImplementedError


def check_whole(op: str, module: nn.Module) -> None:
    """Raise ValueError if a module is a part that `shard` left, whose codes have padding."""
    if parts_of(module):
        raise ValueError(
            f"{op}: the module is one rank's part of a layer that shard has cut; unfreeze the "
            "model first, and cut it by torch's own means, such as FSDP"
        )


def master_parameter(shape: Any, device: Any, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised master weight."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def freeze(model: nn.Module) -> nn.Module:
    """Quantize all trained weights of a model, in place, for inference. Returns `model`.

    Each `FP8Linear` and `GroupedExperts` that is trainable becomes frozen: codes and scales in
    place of master weights, biases that ask for no gradient.
    """
    return _each(model, lambda module: module.freeze())


def unfreeze(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, wgrad: Wgrad | None = None
) -> nn.Module:
    """Make master weights of all FP8 weights of a model, in place, to be trained. Returns `model`.

    Args:
        dtype: of the master weights: bf16, fp16 or fp32.
        wgrad: as in `FP8Linear`; None leaves what each module has.

    Raises TypeError, ValueError as `FP8Linear.unfreeze` does, before anything is changed.
    """
    check_dtype("unfreeze", dtype)
    if wgrad is not None:
        check_wgrad("unfreeze", wgrad)
    return _each(model, lambda module: module.unfreeze(dtype, wgrad=wgrad))


def _each(model: nn.Module, change: Callable[[TrainableModule], object]) -> nn.Module:
    for module in model.modules():
        if isinstance(module, TrainableModule):
            change(module)
    return model
