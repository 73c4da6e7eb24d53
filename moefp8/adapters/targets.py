"""Which weights of a model get adapters, named as PEFT's targets are."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..layers import FP8Linear, GroupedExperts
from ..layers.adapter import Adapter
from ..layers.parts import parts_of
from ..layers.trainable import TrainableModule
from .modules import STACKS, LoRAFP8Linear, LoRAGroupedExperts, LoRALinear

KINDS: dict[type, type] = {
    FP8Linear: LoRAFP8Linear,
    GroupedExperts: LoRAGroupedExperts,
    nn.Linear: LoRALinear,
}
_ALL_LINEAR = "all-linear"  # PEFT's word
_WRAPPED = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"


class Target(NamedTuple):
    """A weight: of which module, which has which name in the model; parameter: its name there."""

    path: str
    module: Any
    parameter: str

    @property
    def name(self) -> str:
        """The name that targets match: that of a linear, or of one weight of experts."""
        return self.path if self.parameter == "weight" else join(self.path, self.parameter)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.module, self.parameter).shape)


def join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by the names that they have without wrappers: `torch.compile`, DDP and others."""
    while (inner := model._modules.get(_inner_of(model))) is not None:
        model = inner
    return {bare(name): module for name, module in model.named_modules()}


def bare(name: str) -> str:
    """A name without those that wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def _inner_of(model: nn.Module) -> str:
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        return "module"
    return next((name for name in _WRAPPED if name in model._modules), "")


def is_all_linear(targets: Any) -> bool:
    """Whether `targets` is the word that PEFT has for all linears."""
    return isinstance(targets, str) and targets.lower() == _ALL_LINEAR


def all_linear(model: nn.Module) -> list[Target]:
    """Each linear but the head, as PEFT's "all-linear", and both weights of experts."""
    modules = {name: x for name, x in modules_of(model).items() if not isinstance(x, Adapter)}
    head = getattr(modules[""], "get_output_embeddings", lambda: None)()
    return [target for target in _known(modules) if target.module is not head]


def find_targets(op: str, model: nn.Module, targets: str | Iterable[str] | None) -> list[Target]:
    """The weights that `targets` name, as `add_lora` says, each checked, in the model's order."""
    modules = {name: x for name, x in modules_of(model).items() if not isinstance(x, Adapter)}
    known = {target.name: target for target in _known(modules)}
    if is_all_linear(targets):
        chosen = all_linear(model)
        if not chosen:
            raise ValueError(f"{op}: the model must have linears or experts, but has none")
    elif targets is None:
        chosen = [x for x in known.values() if not isinstance(x.module, nn.Linear)]
        if not chosen:
            raise ValueError(
                f"{op}: the model has no FP8Linear and no GroupedExperts, which targets=None "
                "stands for; convert it first (moefp8.convert(model)), or name nn.Linear modules"
            )
    else:
        chosen = _named(op, targets, modules, known)
    for target in chosen:
        _check(op, target, modules.get(target.path.rpartition(".")[0]))
    return chosen


def _known(modules: Mapping[str, nn.Module]) -> Iterable[Target]:
    for path, module in modules.items():
        if isinstance(module, FP8Linear | nn.Linear):
            yield Target(path, module, "weight")
        elif isinstance(module, GroupedExperts):
            yield from (Target(path, module, stack) for stack in STACKS)


def _named(
    op: str,
    targets: str | Iterable[str],
    modules: Mapping[str, nn.Module],
    known: Mapping[str, Target],
) -> list[Target]:
    patterns = _patterns_of(op, targets)
    chosen: dict[str, Target] = {}
    unsupported: dict[str, nn.Module] = {}
    for text, pattern in patterns.items():
        names = [name for name in {**modules, **known} if pattern.fullmatch(name)]
        if not names:
            raise ValueError(
                f"{op}: each of targets must match a module, but {text!r} does not; a string is a "
                "regular expression for whole names, a list has names or their ends"
            )
        for name in names:
            stacks = [join(name, stack) for stack in STACKS if join(name, stack) in known]
            matches = [name] if name in known else stacks if _is_experts(modules[name]) else []
            chosen |= {name: known[name] for name in matches}
            unsupported |= {} if matches else {name: modules[name]}
    if unsupported:
        name, module = next(iter(unsupported.items()))
        more = f" (and {len(unsupported) - 1} more)" if len(unsupported) > 1 else ""
        raise ValueError(
            f"{op}: targets must be FP8Linear, nn.Linear, GroupedExperts or a weight of the "
            f"latter, but {name or 'the model'}{more} is a {type(module).__name__}; "
            "moefp8.convert(model) makes linears and experts FP8"
        )
    return [target for name, target in known.items() if name in chosen]


def _is_experts(module: nn.Module) -> bool:
    return isinstance(module, GroupedExperts)


def _patterns_of(op: str, targets: str | Iterable[str]) -> dict[str, re.Pattern[str]]:
    """A string is a pattern of whole names; of a list, each is a name or the end of one."""
    if isinstance(targets, str):
        try:
            return {targets: re.compile(targets)}
        except re.error as error:
            raise ValueError(
                f"{op}: targets {targets!r} is no regular expression ({error}); a list has names "
                "or their ends"
            ) from None
    names = list(targets)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{op}: targets must be names, a regular expression, or None, got {targets!r}"
        )
    return {name: re.compile(rf"(.*\.)?{re.escape(name)}", re.DOTALL) for name in names}


def _check(op: str, target: Target, parent: nn.Module | None) -> None:
    """Raise ValueError unless an adapter can be put beside the weight; parent: of its module."""
    path, module, parameter = target
    where = f"{op}: {path or 'the model'} ({type(module).__name__})"
    if type(module) not in KINDS:
        raise ValueError(
            f"{where} must be of the very class FP8Linear, nn.Linear or GroupedExperts; add "
            "adapters before fully_shard, parametrizations and others that change the class"
        )
    if isinstance(module, TrainableModule) and module.trainable:
        raise ValueError(
            f"{where} must be frozen, but trains its own weights, which an adapter beside them "
            "would replace; call moefp8.freeze(model) first, or train without adapters"
        )
    if isinstance(parent, nn.TransformerEncoderLayer):
        raise ValueError(
            f"{where} must be called, but nn.TransformerEncoderLayer reads its weight in eval(), "
            "which would pass the adapter by; leave it out of targets"
        )
    if "forward" in module.__dict__:
        raise ValueError(
            f"{where} must have no forward of its own (as accelerate sets it, where a device_map "
            "names several devices), which would pass the adapter by"
        )
    if getattr(module, parameter).is_meta:
        raise ValueError(f"{where} must not be on the meta device; load the model first")
    if any(set(parts) - {0} for parts in parts_of(module).values()) or (
        parts_of(module) and parameter == "weight"
    ):
        raise ValueError(
            f'{where} must not be cut by moefp8.shard but for "experts", since each rank would '
            "train an adapter of its own; use FSDP"
        )
