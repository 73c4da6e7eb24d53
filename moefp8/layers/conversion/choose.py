"""Choose and check the modules that `convert` will swap, by its arguments, then by defaults."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...functional.training.wgrad import Wgrad, check_wgrad
from ...kernels.common.activation import Activation
from ...kernels.common.checks import FLOATS, check_tensor
from ..experts import GroupedExperts
from ..linear import FP8Linear
from ..module import is_wrapped
from ..parts import parts_of
from .conversion import LEFT_OUT, NOT_IN_ONLY, SKIPPED, Conversion, pattern_of
from .loose import Loose, loose_matrices
from .masters import master_problem
from .probe import Probed, probe
from .selection import DEFAULT_SKIP, HEADS, can_swap, is_conv1d, is_linear, matches, reasons
from .stacking import Stacked, stack_lists
from .stacks import form_problem, stacks_of, tensor_problem

Patterns = str | Iterable[str]
FilterFn = Callable[[nn.Module, str], bool]
Overrides = Mapping[str, bool | Mapping[str, Any]]

_OF_EXPERTS, _OF_BOTH = {"layout", "activation", "swiglu_limit"}, {"trainable", "wgrad"}
_WRAPPED = (
    "must have no hooks and no forward of its own (as patches are, and accelerate's where a "
    "device_map names several devices: pass quantization_config=FP8Config() to from_pretrained "
    "instead), which would be lost"
)
OFFLOADED = (
    "must not be offloaded to the CPU or the disk, where FP8 modules cannot be; name a device_map "
    "of GPUs alone, or of the CPU alone"
)


class Chosen(NamedTuple):
    """The modules to swap, and their settings.

    stacked: block -> how its experts are stacked, of each in modules that calls them one by one.
    nothing_left: whether there is nothing to swap since all is FP8 already.
    other_form: how many of these modules have another form than was asked for.
    other_wgrad: how many that are trainable, as was asked for, have another `wgrad`.
    """

    modules: dict[str, nn.Module]
    settings: dict[str, dict[str, Any]]
    stacked: dict[str, Stacked]
    conversion: Conversion
    nothing_left: bool
    other_form: int
    other_wgrad: int


def choose(
    model: nn.Module,
    skip: Patterns | None,
    only: Patterns | None,
    filter_fn: FilterFn | None,
    overrides: Overrides | None,
    trainable: bool = False,
    wgrad: Wgrad = "128x1",
) -> Chosen:
    """Arguments and errors are those of `convert`; `model` is not changed."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"convert: model must be an nn.Module that is not scripted, got {type(model).__name__}"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_form(trainable, wgrad)
    skipped = patterns_of("convert", "skip", skip)
    wanted = None if only is None else patterns_of("convert", "only", only)
    overridden = dict(overrides or {})
    _check_overrides(overridden)
    candidates = {name: module for name, module in modules.items() if can_swap(module)}
    fp8 = [name for name, m in modules.items() if isinstance(m, FP8Linear | GroupedExperts)]
    for argument, patterns in ("skip", skipped), ("only", wanted or ()), ("overrides", overridden):
        _check_patterns(argument, patterns, modules, [*candidates, *fp8])
    # The full name of a candidate stands for that one alone.
    parts = [part for part in wanted or () if part not in candidates]
    kept = {} if wanted is not None and not parts and filter_fn is None else reasons(modules)

    def asked(name: str, module: nn.Module) -> str | None:
        """Why a module stays by the arguments; "" if it does not, None if they do not say."""
        setting = _override(name, overridden)
        if setting is False or any(matches(name, part) for part in skipped):
            return SKIPPED
        if setting is True or (wanted is not None and name in wanted):
            return ""
        if wanted is not None and not any(matches(name, part) for part in parts):
            return NOT_IN_ONLY
        if filter_fn is not None:
            return "" if filter_fn(module, name) else LEFT_OUT
        return None

    answers = {name: asked(name, module) for name, module in candidates.items()}
    staying = {name: why for name, why in kept.items() if name not in candidates}
    whys = ((x, kept.get(x, "") if why is None else why) for x, why in answers.items())
    staying |= {name: why for name, why in whys if why}
    form = {"trainable": trainable, "wgrad": wgrad}
    stacked, one_by_one = stack_lists(
        modules,
        lambda name: not answers[name],
        candidates.keys() - staying.keys(),
        lambda name: _settings(name, overridden, form),
    )
    in_stacks = {name for stack in stacked.values() for name in stack.experts.linears()}
    staying = {name: why for name, why in staying.items() if name not in in_stacks}
    chosen = {name: m for name, m in candidates.items() if name not in {*staying, *in_stacks}}
    settings = _checked(chosen, overridden, form)
    kinds = {name: kind_of(module) for name, module in chosen.items()}
    kinds |= {stack.experts.place: "experts" for stack in stacked.values()}
    by_default = {name: why for name, why in staying.items() if why == kept.get(name)}
    _check_settings(overridden, kinds, {x: by_default[x] for x in by_default if x in candidates})
    experts = frozenset(name for name in staying if kind_of(modules[name]) == "experts")
    masters = frozenset(name for name, options in settings.items() if options["trainable"])
    loose = Loose({}, 0.0)
    if wanted is None and filter_fn is None:  # these name linears and experts
        stays = [*skipped, *(part for part, setting in overridden.items() if setting is False)]
        loose = loose_matrices(modules, lambda name: any(matches(name, part) for part in stays))
    conversion = Conversion(kinds, staying, experts, masters, one_by_one, *loose)
    there: list[Any] = [modules[name] for name in fp8]
    other_form = sum(module.trainable != trainable for module in there)
    other_wgrad = sum(module.trainable and module.wgrad != wgrad for module in there)
    chosen = {**{block: modules[block] for block in stacked}, **chosen}
    settings |= {block: stack.settings for block, stack in stacked.items()}
    nothing_left = bool(fp8) and not chosen
    return Chosen(chosen, settings, stacked, conversion, nothing_left, other_form, other_wgrad)


def patterns_of(caller: str, argument: str, patterns: Patterns | None) -> tuple[str, ...]:
    """`patterns` as a tuple. Raises TypeError unless they are names; "" names the model itself."""
    parts = (patterns,) if isinstance(patterns, str) else patterns or ()
    parts = tuple(parts) if isinstance(parts, Iterable) else (parts,)
    if not all(isinstance(part, str) and (part or argument == "only") for part in parts):
        raise TypeError(
            f"{caller}: {argument} must be a name, or names, of modules, got {patterns!r}"
        )
    return parts


def _check_overrides(overrides: Mapping[Any, Any]) -> None:
    for part, setting in overrides.items():
        if not isinstance(part, str) or not isinstance(setting, bool | Mapping):
            raise TypeError(
                "convert: overrides must be names of modules -> True, False or settings, got "
                f"{part!r}: {setting!r}"
            )
        if isinstance(setting, bool):
            continue
        if unknown := setting.keys() - (_OF_EXPERTS | _OF_BOTH):
            raise ValueError(
                f"convert: overrides of {part!r} must be of {sorted(_OF_EXPERTS | _OF_BOTH)}, got "
                f"{sorted(unknown)}"
            )
        _check_form(setting.get("trainable", False), setting.get("wgrad", "128x1"))
        GroupedExperts(1, 1, 1, device="meta", **setting)  # it refuses wrong values


def _check_form(trainable: Any, wgrad: Any) -> None:
    if not isinstance(trainable, bool):
        raise TypeError(f"convert: trainable must be True or False, got {trainable!r}")
    check_wgrad("convert", wgrad)


def _check_settings(
    overrides: Overrides, kinds: Mapping[str, str], by_default: Mapping[str, str]
) -> None:
    """by_default: why each of the others stays that could be swapped, and is not by default."""
    experts = [name for name, kind in kinds.items() if kind == "experts"]
    for part, setting in overrides.items():
        if not isinstance(setting, Mapping):
            continue
        if setting.keys() <= _OF_BOTH:
            if not _names_one_of(part, kinds):
                stay = [name for name in by_default if matches(name, part)]
                why = "".join(
                    f"; {name} stays: {by_default[name]}, unless only= names it"
                    for name in stay[:1]
                )
                raise ValueError(
                    f"convert: overrides of {part!r} are settings, but no module of that name "
                    f"becomes FP8{why}"
                )
        elif not _names_one_of(part, experts):
            raise ValueError(
                f"convert: overrides of {part!r} are settings of experts, but no experts of that "
                "name become FP8"
            )


def _settings(name: str, overrides: Overrides, form: Mapping[str, Any]) -> dict[str, Any]:
    override = _override(name, overrides)
    return {**form, **(override if isinstance(override, Mapping) else {})}


def _override(name: str, overrides: Overrides) -> bool | Mapping[str, Any] | None:
    return next((value for part, value in overrides.items() if matches(name, part)), None)


def _check_patterns(
    argument: str, patterns: Iterable[str], modules: Collection[str], swappable: Collection[str]
) -> None:
    known = () if argument == "overrides" else (*DEFAULT_SKIP, *HEADS)
    if wrong := [x for x in patterns if x not in known and not _names_one_of(x, modules)]:
        raise ValueError(
            f"convert: every name in {argument} must be in the model, got "
            f"{', '.join(map(repr, wrong[:5]))}"
        )
    if argument != "only":
        return
    if wrong := [x for x in patterns if not _names_one_of(x, swappable)]:
        raise ValueError(
            "convert: every name in only must be an nn.Linear or an experts module of the model, "
            f"or have some below it, got {', '.join(wrong[:5])}"
        )


def _names_one_of(part: str, names: Iterable[str]) -> bool:
    return any(matches(name, part) for name in names)


def kind_of(module: nn.Module) -> str:
    if is_conv1d(module):
        return "Conv1D"
    return "linear" if isinstance(module, nn.Linear) else "experts"


def _checked(
    chosen: Mapping[str, nn.Module], overrides: Overrides, form: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The settings of all modules; raises an error that lists everything that cannot be swapped."""
    settings: dict[str, dict[str, Any]] = {}
    refused: dict[tuple[str, str, bool], list[tuple[str, nn.Module]]] = {}
    probed: dict[Any, Probed] = {}
    for name, module in chosen.items():
        for parameter_name, parameter in module.named_parameters():
            try:
                check_tensor("convert", f"{name}.{parameter_name}".lstrip("."), parameter, FLOATS)
            except TypeError as error:
                way_out = f"pass skip={pattern_of(name)!r} to leave it as it is"
                raise TypeError(f"{error}; {way_out}") from None
        made = _settings(name, overrides, form)
        stated, problem = _check(module, probed, made["trainable"])
        made = {**stated, **made}
        may_freeze = problem is None and made["trainable"]
        if may_freeze:
            problem = master_problem(module)
        if problem is None:
            settings[name] = made
        else:
            key = pattern_of(name), f"({type(module).__name__}) {problem}", may_freeze
            refused.setdefault(key, []).append((name, module))
    if refused:
        raise ValueError("\n".join(_refusal(*key, group) for key, group in refused.items()))
    return settings


def _check(
    module: nn.Module, probed: dict[Any, Probed], trainable: bool
) -> tuple[dict[str, Any], str | None]:
    """(settings, what forbids swapping the module or None)."""
    if parts_of(module):
        return {}, "is one rank's part of a layer; convert before shard"
    if any(map(is_wrapped, module.modules())):
        return {}, OFFLOADED if any(x.is_meta for x in module.parameters()) else _WRAPPED
    stacks = stacks_of(module)
    if stacks is None:
        names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        if extra := sorted(names - {"weight", "bias"}):
            return {}, f"must have no tensors but weight and bias, got {extra}"
        return {}, tensor_problem(module, ("weight",))
    if problem := form_problem(module, stacks) or tensor_problem(module, stacks.names):
        return {}, problem
    activation, problem = probe(module, probed, trainable)
    kind, limit = activation._replace(limit=None), activation.limit
    named = kind.kind if kind == Activation(kind.kind) else kind
    return {"activation": named, "swiglu_limit": limit}, problem


def _refusal(pattern: str, what: str, may_freeze: bool, group: list[tuple[str, nn.Module]]) -> str:
    """One sentence about the same module of all layers, with the ways out."""
    name, module = group[0]
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    ways = [f"pass skip={pattern!r} to leave it as it is"]
    if may_freeze:
        ways.append(f"overrides={{{pattern!r}: {{'trainable': False}}}} to freeze it")
    elif not is_linear(module):
        ways.append(
            "if GroupedExperts computes the same of other weights, put "
            "GroupedExperts.from_weights(gate_up_proj, down_proj) in its place"
        )
    if hasattr(module, "_apply_gate") and hasattr(module, "has_gate"):
        ways.append('import moefp8.hf and pass experts_implementation="moefp8" to from_pretrained')
    return f"convert: {name or 'the model'}{more} {what}; {'; or '.join(ways)}"
