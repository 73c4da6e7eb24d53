"""What modules share whose weights may be trained: master weights in place of FP8 codes."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..functional.training.wgrad import Wgrad, check_wgrad
from ..kernels import E4M3
from ..kernels.common.checks import FLOATS
from ..quant.weight_format import BLOCKS, WeightFormat
from .adapter import check_no_adapters
from .conversion.conversion import Conversion
from .module import FixedDtypeModule, check_dtype
from .parts import parts_of
from .saving import adopt, release


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
    halved_names: ClassVar[tuple[str, ...]] = ()  # those of two halves, each in blocks of its own
    weight_format: WeightFormat = BLOCKS  # of the codes
    _wgrad: Wgrad = "128x1"

    @property
    def wgrad(self) -> Wgrad:
        return self._wgrad

    @wgrad.setter
    def wgrad(self, wgrad: Wgrad) -> None:
        check_wgrad(type(self).__name__, wgrad)
        self._wgrad = wgrad

    @property
    def trainable(self) -> bool:
        """Whether the weights are master weights."""
        return bool(self.master_names) and not self.fp8_names

    def _hold_master_weights(self, weights: dict[str, nn.Parameter], wgrad: Wgrad) -> None:
        """Hold these in place of codes and scales."""
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

    def sharing_plain(self) -> nn.Module:
        """A trainable module's twin in plain PyTorch, which holds the same parameters."""
        raise NotImplementedError

    def freeze(self) -> Any:
        """Quantize the master weights in place: from then on they are frozen codes. Returns self.

        A frozen module stays as it is. Raises ValueError for a part that `shard` left.
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


_seen_optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()


def _warn_of_codes(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Warn, in an optimizer's first step, that FP8 codes which it holds do not train.

    Autograd would say nothing as long as anything else of the model trains.
    """
    if torch.compiler.is_compiling() or optimizer in _seen_optimizers:
        return
    _seen_optimizers.add(optimizer)
    params = (x for group in optimizer.param_groups for x in group["params"])
    if num_codes := sum(x.dtype == E4M3 for x in params):
        warnings.warn(
            f"{type(optimizer).__name__} holds {num_codes} FP8 weights, whose codes are frozen and "
            "do not train. Make the optimizer after moefp8.unfreeze(model), or after "
            "moefp8.convert(model, trainable=True) of plain modules; or pass it only parameters "
            "that require a gradient, such as adapters",
            stacklevel=3,
        )


register_optimizer_step_pre_hook(_warn_of_codes)


def check_whole(op: str, module: nn.Module, name: str = "the module") -> None:
    """Raise ValueError if a module is a part that `shard` left.

    Codes of a part may have padding, so that blocks begin where they did; master weights have none.
    """
    if parts_of(module):
        raise ValueError(
            f"{op}: {name} is one rank's part of a layer that shard has cut; {op} the whole model "
            "first, then shard it"
        )


def check_own_weights(op: str, module: nn.Module, name: str = "the module") -> None:
    """Raise ValueError if weights are made of others by `torch.nn.utils.parametrize`."""
    if made := getattr(module, "parametrizations", ()):
        raise ValueError(
            f"{op}: {', '.join(made)} of {name} must be parameters, and are parametrized; call "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )


def has_finite_scales(module: FixedDtypeModule) -> bool:
    """Whether a module's scales, and so the weights that were quantized, are finite."""
    scales = (module.get_parameter(name) for name in module.fp32_names)
    return all(x.is_meta or bool(x.isfinite().all()) for x in scales)


def master_parameter(shape: Any, device: Any, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised master weight."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def freeze(model: nn.Module) -> nn.Module:
    """Quantize all trained weights of a model, in place, for inference. Returns `model`.

    Each `FP8Linear` and `GroupedExperts` that is trainable becomes frozen: codes and scales in
    place of master weights, biases that ask for no gradient. What was tied stays tied. A warning
    names weights that are NaN or infinite. A model of transformers is then saved in FP8, as
    after `convert`.

    Parameters are new ones, so an optimizer that knew the old ones trains nothing any more; nor
    does `unfreeze` bring these back: it makes master weights of the codes.

    Raises:
        TypeError: `model` is no module.
        ValueError: a part that `shard` left, or a parametrized weight; nothing is changed.
    """
    modules = _trainable_modules("freeze", model)
    changed = {name: x for name, x in modules.items() if x.trainable}
    for name, module in changed.items():
        check_whole("freeze", module, name or "the model")
        check_own_weights("freeze", module, name or "the model")
    _change(changed.values(), lambda module: module.freeze())
    if broken := [name or "the model" for name, x in changed.items() if not has_finite_scales(x)]:
        more = f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        warnings.warn(
            f"freeze: weights of {', '.join(broken[:5])}{more} hold NaN or Inf, so whole blocks of "
            "128x128 became NaN",
            stacklevel=2,
        )
    adopt(model, Conversion(dict.fromkeys(changed, "")))
    return model


def unfreeze(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, wgrad: Wgrad | None = None
) -> nn.Module:
    """Make master weights of all FP8 weights of a model, in place, to be trained. Returns `model`.

    What was tied stays tied. Parameters are new ones: make an optimizer of them. Master weights
    that are there stay as they are, whatever their dtype.

    Args:
        dtype: of the master weights, and of biases: bf16, fp16 or fp32.
        wgrad: as in `FP8Linear`, also for modules that are trainable; None leaves what each has.

    Raises TypeError, ValueError as `FP8Linear.unfreeze` does, and ValueError for adapters of
    `moefp8.adapters`, before anything is changed.
    """
    check_dtype("unfreeze", dtype)
    if wgrad is not None:
        check_wgrad("unfreeze", wgrad)
    modules = _trainable_modules("unfreeze", model)
    check_no_adapters("unfreeze", model, "which train beside frozen weights")
    for name, module in modules.items():
        if not module.trainable:
            check_whole("unfreeze", module, name or "the model")
    _change(modules.values(), lambda module: module.unfreeze(dtype, wgrad=wgrad))
    for each in model.modules():
        release(each)
    return model


def _trainable_modules(op: str, model: nn.Module) -> dict[str, TrainableModule]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be an nn.Module, got {type(model).__name__}")
    layers = {name: x for name, x in model.named_modules() if isinstance(x, TrainableModule)}
    if not layers:
        warnings.warn(
            f"{op}: the model has no FP8 modules, so nothing was changed; moefp8.convert(model) "
            "makes some",
            stacklevel=3,
        )
    return layers


Held = tuple[nn.Parameter | None, nn.Parameter | None]  # a weight and its scales


def _names(module: TrainableModule) -> tuple[str, ...]:
    """The parameters that a change of form may replace; several modules may share one."""
    return *module.master_names, "bias", "gate_up_proj_bias", "down_proj_bias"


def _held(module: nn.Module, name: str) -> Held:
    return module._parameters.get(name), module._parameters.get(f"{name}_scale_inv")


def _change(
    modules: Collection[TrainableModule], change: Callable[[TrainableModule], object]
) -> None:
    """Change the form of each; what several share becomes something that they share."""
    weights = [_held(module, name)[0] for module in modules for name in _names(module)]
    num_homes = Counter(id(x) for x in weights if x is not None)
    tied = {id(x): x for x in weights if num_homes[id(x)] > 1}  # held, so that ids stay theirs
    del weights
    made: dict[int, Held] = {}
    for module in modules:
        before = {name: id(_held(module, name)[0]) for name in _names(module)}
        is_trainable = module.trainable
        change(module)
        for name, weight in before.items():
            if weight in tied and module.trainable != is_trainable:
                pair = made.setdefault(weight, _held(module, name))
                for leaf, x in zip((name, f"{name}_scale_inv"), pair, strict=True):
                    if leaf in module._parameters:
                        module._parameters[leaf] = x
