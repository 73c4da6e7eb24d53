"""What `convert` will swap of a model: arguments first, then defaults; checked before a change."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...kernels.common.checks import FLOATS, check_tensor
from ..experts import GroupedExperts
from ..linear import FP8Linear
from ..module import is_wrapped
from ..parts import parts_of
from .conversion import LEFT_OUT, NOT_IN_ONLY, SKIPPED, Conversion, pattern_of
from .probe import Probe
from .selection import DEFAULT_SKIP, HEADS, can_swap, is_conv1d, is_linear, matches, reasons
from .stacks import flags_problem, shapes_problem, stacks_of

Patterns = str | Iterable[str]
FilterFn = Callable[[nn.Module, str], bool]
Overrides = Mapping[str, bool | Mapping[str, Any]]

_SETTINGS = {"layout", "swiglu_limit"}
_TAKEN = "taken"
_WRAPPED = (
    "must have no hooks and no forward of its own (as patches are, and accelerate's where a "
    "device_map names several devices: pass quantization_config=FP8Config() to from_pretrained "
    "instead), which would be lost"
)
OFFLOADED = (
    "must not be offloaded to the CPU or the disk, where FP8 modules cannot be; name a device_map "
    "of GPUs alone, or of the CPU alone"
)


@dataclass
class Chosen:
    """modules: to swap; settings: of those that are experts. nothing_left: all is FP8 already."""

    modules: dict[str, nn.Module]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    conversion: Conversion = field(default_factory=Conversion)
    nothing_left: bool = False


def choose(
    model: nn.Module,
    skip: Patterns | None,
    only: Patterns | None,
    filter_fn: FilterFn | None,
    overrides: Overrides | None,
) -> Chosen:
    """Arguments, errors: as of `convert`; model is not changed."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"convert: model must be an nn.Module that is not scripted, got {type(model).__name__}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    skipped = patterns_of("convert", "skip", skip)
    wanted = None if only is None else patterns_of("convert", "only", only)
    overridden = dict(overrides or {})
    _check_overrides(overridden)
    for argument, patterns in (
        ("skip", skipped),
        ("only", wanted or ()),
        ("overrides", overridden),
    ):
        _check_patterns(argument, patterns, modules)
    candidates = {name: module for name, module in modules.items() if can_swap(module)}
    is_exact = wanted is not None and all(name in candidates for name in wanted)
    kept = {} if is_exact and filter_fn is None else reasons(modules)
    whys = {
        name: _override_why(name, overridden, skipped)
        or _only_why(name, wanted, candidates)
        or (_filter_why(name, module, filter_fn) if filter_fn else kept.get(name, ""))
        for name, module in candidates.items()
    }
    told = {name: why for name, why in kept.items() if name not in candidates}
    told |= {name: why for name, why in whys.items() if why and why != _TAKEN}
    chosen = {name: module for name, module in candidates.items() if name not in told}
    settings = _checked(chosen, overridden)
    kinds = {name: kind_of(module) for name, module in chosen.items()}
    _check_settings(overridden, [name for name, kind in kinds.items() if kind == "experts"])
    fp8 = any(isinstance(m, FP8Linear | GroupedExperts) for m in modules.values())
    experts = frozenset(name for name in told if kind_of(modules[name]) == "experts")
    return Chosen(chosen, settings, Conversion(kinds, told, experts), fp8 and not chosen)


def patterns_of(caller: str, argument: str, patterns: Patterns | None) -> tuple[str, ...]:
    """None means none. Raises TypeError for what are no names; "" is the model itself."""
    found = (patterns,) if isinstance(patterns, str) else patterns or ()
    found = tuple(found) if isinstance(found, Iterable) else (found,)
    if not all(isinstance(part, str) and (part or argument == "only") for part in found):
        raise TypeError(
            f"{caller}: {argument} must be a name, or names, of modules, got {patterns!r}"
        )
    return found


def _check_overrides(overrides: Mapping[Any, Any]) -> None:
    for part, setting in overrides.items():
        if not isinstance(part, str) or not isinstance(setting, bool | Mapping):
            raise TypeError(
                "convert: overrides must be names of modules -> True, False or settings, got "
                f"{part!r}: {setting!r}"
            )
        if isinstance(setting, bool):
            continue
        if unknown := setting.keys() - _SETTINGS:
            raise ValueError(
                f"convert: overrides of {part!r} must be of {sorted(_SETTINGS)}, got "
                f"{sorted(unknown)}"
            )
        GroupedExperts(1, 1, 1, device="meta", **setting)  # which refuses what cannot be meant


def _check_settings(overrides: Overrides, experts: Collection[str]) -> None:
    for part, setting in overrides.items():
        if isinstance(setting, Mapping) and not any(matches(name, part) for name in experts):
            raise ValueError(
                f"convert: overrides of {part!r} are settings of experts, but no experts of that "
                "name become FP8"
            )


def _override_why(name: str, overrides: Overrides, skipped: tuple[str, ...]) -> str:
    """Why name stays, _TAKEN if it does not, "" if neither overrides nor skip decide."""
    setting = _override(name, overrides)
    if setting is False or any(matches(name, part) for part in skipped):
        return SKIPPED
    return _TAKEN if setting is True else ""


def _only_why(name: str, wanted: tuple[str, ...] | None, candidates: Mapping[str, Any]) -> str:
    """Likewise; a full name of a candidate is that one alone."""
    if wanted is None or name in wanted:
        return "" if wanted is None else _TAKEN
    parts = (part for part in wanted if part not in candidates)
    return "" if any(matches(name, part) for part in parts) else NOT_IN_ONLY


def _filter_why(name: str, module: nn.Module, filter_fn: FilterFn) -> str:
    return _TAKEN if filter_fn(module, name) else LEFT_OUT


def _override(name: str, overrides: Overrides) -> bool | Mapping[str, Any] | None:
    return next((value for part, value in overrides.items() if matches(name, part)), None)


def _check_patterns(
    argument: str, patterns: Iterable[str], modules: Mapping[str, nn.Module]
) -> None:
    known = () if argument == "overrides" else (*DEFAULT_SKIP, *HEADS)
    wrong = [
        part
        for part in patterns
        if part not in known and not any(matches(name, part) for name in modules)
    ]
    if wrong:
        raise ValueError(
            f"convert: every name in {argument} must be in the model, got "
            f"{', '.join(map(repr, wrong[:5]))}"
        )
    swappable = [name for name, m in modules.items() if can_swap(m) or _is_fp8(m)]
    wrong = [
        part
        for part in (patterns if argument == "only" else ())
        if not any(matches(name, part) for name in swappable)
    ]
    if wrong:
        raise ValueError(
            "convert: every name in only must be an nn.Linear or an experts module of the model, "
            f"or have some below it, got {', '.join(wrong[:5])}"
        )


def _is_fp8(module: nn.Module) -> bool:
    return isinstance(module, FP8Linear | GroupedExperts)


def kind_of(module: nn.Module) -> str:
    if is_conv1d(module):
        return "Conv1D"
    return "linear" if isinstance(module, nn.Linear) else "experts"


def _checked(chosen: Mapping[str, nn.Module], overrides: Overrides) -> dict[str, dict[str, Any]]:
    """Settings of all experts; raises unless everything can be swapped, with all that cannot."""
    settings: dict[str, dict[str, Any]] = {}
    refused: dict[tuple[str, str], list[tuple[str, nn.Module]]] = {}
    probe = Probe()
    for name, module in chosen.items():
        for parameter_name, parameter in module.named_parameters():
            label = f"{name}.{parameter_name}".lstrip(".")
            _check_dtype(name, label, parameter)
        found, problem = _check(module, probe)
        given = _override(name, overrides)
        if problem is None:
            settings[name] = {**found, **(given if isinstance(given, Mapping) else {})}
        else:
            key = pattern_of(name), f"({type(module).__name__}) {problem}"
            refused.setdefault(key, []).append((name, module))
    if refused:
        raise ValueError("\n".join(_refusal(*key, group) for key, group in refused.items()))
    return settings


def _check_dtype(name: str, label: str, parameter: torch.Tensor) -> None:
    try:
        check_tensor("convert", label, parameter, FLOATS)
    except TypeError as error:
        raise TypeError(f"{error}; pass skip={pattern_of(name)!r} to leave it as it is") from None


def _check(module: nn.Module, probe: Probe) -> tuple[dict[str, Any], str | None]:
    """(settings, what forbids to swap module)."""
    if parts_of(module):
        return {}, "is one rank's part of a layer; convert before shard"
    if any(map(is_wrapped, module.modules())):
        return {}, OFFLOADED if any(x.is_meta for x in module.parameters()) else _WRAPPED
    stacks = stacks_of(module)
    if stacks is None:
        names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        extra = sorted(names - {"weight", "bias"})
        return {}, f"must have no tensors but weight and bias, got {extra}" if extra else None
    problem = flags_problem(module) or shapes_problem(module, stacks)
    if problem is not None:
        return {}, problem
    limit, problem = probe(module)
    return {"swiglu_limit": limit}, problem


def _refusal(pattern: str, what: str, group: list[tuple[str, nn.Module]]) -> str:
    """One sentence for the same module of all layers, and the ways out."""
    name, module = group[0]
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    ways = [f"pass skip={pattern!r} to leave it as it is"]
    if not is_linear(module):
        ways.append(
            "if GroupedExperts computes the same of other weights, put "
            "GroupedExperts.from_weights(gate_up_proj, down_proj) in its place"
        )
    if hasattr(module, "_apply_gate") and hasattr(module, "has_gate"):
        ways.append('import moefp8.hf and pass experts_implementation="moefp8" to from_pretrained')
    return f"convert: {name or 'the model'}{more} {what}; {'; or '.join(ways)}"
