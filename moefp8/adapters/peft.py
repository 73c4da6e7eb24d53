"""PEFT's LoRA beside FP8 layers. It needs PEFT (`pip install peft`).

`FP8LoraModel` chooses and checks what gets adapters, before the model changes; `PeftFP8Linear` and
`ParamWrapper` are the layers. Their tensors have PEFT's names, which are those of our files.
"""

import copy
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftType
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional

from ..layers import FP8Linear, GroupedExperts
from ..layers.adapter import check_no_adapters
from ..layers.module import is_wrapped
from ..layers.parts import parts_of
from .config import names_for
from .layout import stacked
from .modules import Factors, compute_adapted
from .register import check_variant
from .targets import STACKS, Target, all_linear, is_all_linear, join

_OP = "peft"


class _BesideCodes(lora.LoraLayer):
    """What is the same for all layers of PEFT whose base is FP8, until `dequantize` swaps that."""

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        """PEFT would cast adapters to the dtype of the base, whose codes are FP8."""
        place = next(self.get_base_layer().parameters()).device if device is None else device
        for name in self.adapter_layer_names:
            adapters = getattr(self, name, None)
            if not isinstance(adapters, nn.ModuleDict) or adapter_name not in adapters:
                continue
            if not any(x.is_meta for x in adapters[adapter_name].parameters()):
                adapters[adapter_name].to(place)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        self._check_base("merged into")
        super().merge(*args, **kwargs)

    def unmerge(self) -> None:
        self._check_base("taken out of")
        super().unmerge()

    def _check_base(self, what: str) -> None:
        if isinstance(self.get_base_layer(), FP8Linear | GroupedExperts):
            _refuse(f"adapters cannot be {what} FP8 codes")


class PeftFP8Linear(_BesideCodes, lora.Linear):
    """PEFT's `lora.Linear`, whose base is an `FP8Linear` until `moefp8.dequantize` swaps that."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # type: ignore[return-value]


class ParamWrapper(_BesideCodes, lora.ParamWrapper):
    """PEFT's wrapper of a weight that `target_parameters` names, without a sum of weights.

    PEFT finds wrappers by this name of the class, and nests them where both weights of experts
    have adapters: the outermost is called, and computes with all of them.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base: Any = self.get_base_layer()
        is_plain = not isinstance(base, FP8Linear | GroupedExperts) or base.trainable
        if is_plain or self.disable_adapters:
            y: torch.Tensor = super().forward(x, *args, **kwargs)
            return y
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        if isinstance(base, FP8Linear):
            return self._beside_linear(base(x), x)
        adapters = {wrapper.parameter_name: wrapper._combined() for wrapper in self._chain()}
        y = compute_adapted(base, adapters, x.reshape(-1, x.shape[-1]), *args, **kwargs)
        return y.view(x.shape)

    def _chain(self) -> Iterator["ParamWrapper"]:
        wrapper: Any = self
        while isinstance(wrapper, ParamWrapper):
            yield wrapper
            wrapper = wrapper.base_layer

    def _active(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.lora_A]

    def _matrices(self, name: str) -> tuple[Any, Any]:
        return self.lora_A[name].weight, self.lora_B[name].weight

    def _beside_linear(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y + scaling * B (A x) of each active adapter, in its dtype, as PEFT's `lora.Linear`."""
        total = y
        for name in self._active():
            a, b = self._matrices(name)
            low = functional.linear(x.to(a.dtype), a)
            total = total + self.scaling[name] * functional.linear(low, b)
        return total.to(y.dtype)

    def _combined(self) -> Factors | None:
        """(A [E, r, K], B [E, N, r], scaling) of all active adapters, r being the sum of ranks."""
        names = self._active()
        pairs = [stacked(*self._matrices(name), self.r[name]) for name in names]
        if len(names) < 2:
            return (*pairs[0], self.scaling[names[0]]) if names else None
        scaled = [self.scaling[name] * b for name, (_, b) in zip(names, pairs, strict=True)]
        return torch.cat([a for a, _ in pairs], 1), torch.cat(scaled, 2), 1.0


def _layer_for(
    target: nn.Module, adapter_name: str, *, parameter_name: str | None = None, **options: Any
) -> nn.Module:
    """The layer that PEFT puts around `target`, an FP8 layer or a wrapper of one."""
    if parameter_name is None:
        return PeftFP8Linear(target, adapter_name, **options)
    return ParamWrapper(target, adapter_name, parameter_name=parameter_name, **options)


def register(config: Any) -> None:
    config._register_custom_module({FP8Linear: _layer_for, GroupedExperts: _layer_for})


def put_tuner() -> None:
    """Let `get_peft_model` and others make an `FP8LoraModel` for configs of LoRA."""
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = FP8LoraModel


class FP8LoraModel(lora.LoraModel):
    """PEFT's `LoraModel`, which knows FP8 layers; of other models it is the same.

    `target_modules="all-linear"` stands for what it does in `add_lora`.
    """

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        if any(isinstance(x, FP8Linear | GroupedExperts) for x in model.modules()):
            config: Any = self.peft_config[adapter_name]
            if is_all_linear(config.target_modules):
                modules, parameters = names_for(model, self._all_linear(config, model))
                config.target_modules = modules if isinstance(modules, str) else set(modules)
                config.target_parameters = [*(config.target_parameters or ()), *parameters]
            register(config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _all_linear(self, config: Any, model: nn.Module) -> list[Target]:
        """What "all-linear" stands for, under names without layers of PEFT that are there."""
        layers = [f"{name}." for name, x in model.named_modules() if isinstance(x, BaseTunerLayer)]
        targets = []
        for target in all_linear(model):
            within = [target.path.removeprefix(x) for x in layers if target.path.startswith(x)]
            if all(set(rest.split(".")) == {"base_layer"} for rest in within):
                targets.append(target._replace(path=_bare(target.path)))
        chosen = copy.copy(config)  # of its settings, some leave out modules
        chosen.target_modules = {target.path for target in targets}
        return [x for x in targets if self._check_target_module_exists(chosen, x.path)]

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """PEFT calls this when targets have their final names, and nothing has changed yet."""
        check_no_adapters(_OP, model, "of which PEFT knows nothing")
        if targets := list(self._targets(peft_config, model)):
            _check(peft_config, targets)
        super()._prepare_model(peft_config, model)

    def _targets(self, config: Any, model: nn.Module) -> Iterator[Target]:
        """The FP8 weights that the config names; parameter "": a module as a whole."""
        parameters = tuple(config.target_parameters or ())
        ends = tuple(f".{x}" for x in parameters)
        for name, module in model.named_modules():
            if not isinstance(module, FP8Linear | GroupedExperts):
                continue
            path = _bare(name)
            if self._check_target_module_exists(config, path):
                yield Target(path, module, "")
            for parameter in module.master_names:
                key = join(path, parameter)
                if key in parameters or key.endswith(ends):
                    yield Target(path, module, parameter)


def _bare(name: str) -> str:
    return name.replace(".base_layer", "")


def _check(config: Any, targets: list[Target]) -> None:
    """Raise ValueError unless PEFT's layers around the FP8 weights would compute what they say."""
    check_variant(_OP, config)
    for path, module, parameter in targets:
        if isinstance(module, FP8Linear):
            continue
        if not parameter:
            raise ValueError(
                f"{_OP}: target_modules must be linears, but {path} is a GroupedExperts, whose "
                f"weights target_parameters names: {[join(path, stack) for stack in STACKS]}"
            )
        if parts_of(module) or module.parallel is not None:
            raise ValueError(
                f"{_OP}: {path} (GroupedExperts) must be whole, but ranks share its experts; "
                "moefp8.adapters.add_lora(model) puts adapters beside each rank's"
            )
        if is_wrapped(module):
            raise ValueError(
                f"{_OP}: {path} (GroupedExperts) must have no hooks and no forward of its own (as "
                "accelerate sets it, where a device_map names several devices), which would be "
                "passed by; load the model to one device, or leave experts out"
            )
    by_weight = [target.name for target in targets if target.parameter]
    for name in "lora_dropout", "lora_bias", "fan_in_fan_out":
        if by_weight and (value := getattr(config, name, None)):
            raise ValueError(
                f"{_OP}: {name} must be {type(value)()} where target_parameters names weights, as "
                f"of experts (here {by_weight[0]}), got {value}; set it so, or let target_modules "
                "name linears of attention alone"
            )


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"{_OP}: {why}; moefp8.dequantize(model) gives BF16 weights first")
