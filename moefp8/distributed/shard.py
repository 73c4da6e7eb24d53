"""`shard`: keep one rank's part of linears and experts, for tensor and expert parallelism.

E experts, H hidden, I intermediate. Rank r of R holds [r * N // R, (r + 1) * N // R) of an axis
of length N.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..kernels.common.checks import check_choices
from ..layers.adapter import check_no_adapters
from ..layers.conversion.plain import PlainExperts
from ..layers.experts import GroupedExperts
from ..layers.linear import FP8Linear
from ..layers.parts import (
    Part,
    Parts,
    boxes,
    is_stacked,
    local_shape,
    note_parts,
    parts_of,
)
from ..quant.weight_format import WeightFormat

Kind = Literal["rows", "columns", "experts", "intermediate"]

_AXES = {
    "rows": "out_features of an nn.Linear or FP8Linear",
    "columns": "in_features of an nn.Linear or FP8Linear",
    "experts": "experts of a GroupedExperts, PlainExperts, or stacks without scales and biases",
    "intermediate": "the intermediate size of experts, or of gate_proj, up_proj and down_proj",
}
_PROJECTIONS: dict[str, Kind] = {"gate_proj": "rows", "up_proj": "rows", "down_proj": "columns"}
_SCALE = "_scale_inv"


class _Cut(NamedTuple):
    """A cut of one module: the part of its size, and of each parameter, that stays."""

    name: str
    module: Any
    kind: Kind
    part: Part
    parts: Mapping[str, Parts]


@torch.no_grad()
def shard(model: nn.Module, plan: Mapping[str, Kind], rank: int, num_ranks: int) -> nn.Module:
    """Keep of every module that `plan` names the part of this rank, in place.

    Call it after `convert`, on the meta device to load what is kept and nothing else
    (`load_checkpoint` reads a rank's own bytes), or on a model that is filled. Nothing here
    communicates, so each axis leaves something to the caller:

    - "rows": `out_features`; each rank gives its own columns of the output.
    - "columns": `in_features`; takes [..., end - begin] of the input, and the outputs of all ranks
      sum up to the whole. A bias is on rank 0 alone.
    - "intermediate": I of experts, or of gate_proj, up_proj and down_proj; the outputs sum up. A
      bias of down is on rank 0 alone.
    - "experts": E; the outputs sum up. The module takes the ids of the whole model, and counts
      those of other ranks with score 0. `expert_offset` is the id of its first expert, and
      `num_global_experts` how many the whole model has.

    Boundaries may be within a block of 128: see `moefp8.layers.parts`. A second call may cut
    the same modules along another axis. Hooks and modules stay. Returns `model`.

    Master weights become new parameters: make the optimizer after the cut. Blocks of their codes
    start again at the part's first row and column.

    Args:
        plan: pattern (fnmatch) of dotted names -> kind. Every module that matches must have the
            axis, and every pattern must match.
        rank, num_ranks: this rank, and how many divide the axis among them, as evenly as goes.

    Raises:
        ValueError: a plan, rank or module does not fit, or a rank would hold nothing. The model is
            then unchanged.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"shard: rank must be in [0, num_ranks = {num_ranks}), got {rank}")
    check_no_adapters("shard", model, "which would stay whole")
    cuts: dict[tuple[int, Kind], _Cut] = {}  # a module under two names is cut once
    for name, module, kind in _chosen(model, plan):
        for cut in _cuts(name, module, kind, rank, num_ranks):
            cuts.setdefault((id(cut.module), cut.kind), cut)
    _check(model, list(cuts.values()))
    if num_ranks > 1:
        for cut in cuts.values():
            _apply(cut)
    return model


def _chosen(model: nn.Module, plan: Mapping[str, Kind]) -> Iterator[tuple[str, nn.Module, Kind]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for pattern, kind in plan.items():
        if kind not in _AXES:
            raise ValueError(f"shard: kind must be one of {list(_AXES)}, got {kind!r}")
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"shard: every pattern must match a module, but {pattern!r} does not")
        yield from ((name, modules[name], kind) for name in names)


def _cuts(name: str, module: nn.Module, kind: Kind, rank: int, num_ranks: int) -> Iterator[_Cut]:
    linears: dict[str, Any] = {child: getattr(module, child, None) for child in _PROJECTIONS}
    if kind == "intermediate" and all(_is_linear(linear) for linear in linears.values()):
        for child, linear in linears.items():
            inner = f"{name}.{child}".lstrip(".")
            yield from _cuts(inner, linear, _PROJECTIONS[child], rank, num_ranks)
        return
    if not (_is_linear(module) if kind in ("rows", "columns") else _is_experts(module)):
        raise ValueError(
            f"shard: {kind!r} cuts {_AXES[kind]}, but {name or 'the model'} is a "
            f"{type(module).__name__}"
        )
    total, axes = _axes(module, kind)
    begin, end = rank * total // num_ranks, (rank + 1) * total // num_ranks
    if begin == end:
        raise ValueError(
            f"shard: rank {rank} of {num_ranks} would hold nothing of {name}, whose {kind} are "
            f"{total}; use at most {total} ranks"
        )
    weight_format = None
    if isinstance(module, FP8Linear | GroupedExperts) and not module.trainable:
        weight_format = None if kind == "experts" else module.weight_format
    padding = 0 if weight_format is None else begin % weight_format.alignment
    part = Part(begin, end, total, padding)
    parts: dict[str, Parts] = {}
    for leaf, axis in axes.items():
        if (parameter := module._parameters.get(leaf)) is not None:
            kept = _part_of(leaf, axis - parameter.ndim, kind, part, weight_format)
            if kept is not None:
                parts[leaf] = {axis: kept}
    yield _Cut(name, module, kind, part, parts)


def _is_linear(module: Any) -> bool:
    """Whether it can be cut: other subclasses may have any scales, and compute anything."""
    return type(module) is nn.Linear or isinstance(module, FP8Linear)


def _is_experts(module: nn.Module) -> bool:
    """Whether it is ours, or has stacked weights and neither scales nor biases."""
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    is_ours = isinstance(module, GroupedExperts | PlainExperts)
    is_known = is_ours or names == {"gate_up_proj", "down_proj"}
    return is_known and is_stacked(module)


def _axes(module: Any, kind: Kind) -> tuple[int, dict[str, int]]:
    """The length of the axis that `kind` cuts, and its number in each parameter."""
    if kind == "rows":
        return module.out_features, {"weight": 0, f"weight{_SCALE}": 0, "bias": 0}
    if kind == "columns":
        return module.in_features, {"weight": 1, f"weight{_SCALE}": 1}
    gate_up, down = (0, 0) if kind == "experts" else (1, 2)
    axes = {"gate_up_proj": gate_up, "down_proj": down}
    axes |= {f"{stack}{_SCALE}": axis for stack, axis in axes.items()}
    axes["gate_up_proj_bias"] = gate_up
    if kind == "experts":
        axes["down_proj_bias"] = 0
    return module.down_proj.shape[down], axes


def _check(model: nn.Module, cuts: list[_Cut]) -> None:
    """Raise ValueError unless each parameter is of one module, and cut once along an axis."""
    num_homes = Counter(x for module in model.modules() for x in {*module._parameters.values()})
    cut_axes: set[tuple[int, str, int]] = set()
    for cut in cuts:
        for name, parts in cut.parts.items():
            if num_homes[cut.module._parameters[name]] > 1:
                raise ValueError(
                    f"shard: {cut.name}.{name} is tied to a parameter of another module; untie "
                    "them, or leave both whole"
                )
            (axis,) = parts
            place = id(cut.module), name, axis
            if place in cut_axes or axis in parts_of(cut.module).get(name, {}):
                raise ValueError(f"shard: {cut.name}.{name} is cut along axis {axis} already")
            cut_axes.add(place)


def _apply(cut: _Cut) -> None:
    module = cut.module
    for name, parts in cut.parts.items():
        parameter = module._parameters[name]
        local = _local(parameter.detach(), parts)
        module._parameters[name] = nn.Parameter(local, parameter.requires_grad)
    note_parts(module, cut.parts)
    summed = {"columns": "bias", "intermediate": "down_proj_bias"}.get(cut.kind)
    if summed and cut.part.begin > 0 and module._parameters.get(summed) is not None:
        setattr(module, summed, None)
        note_parts(module, {summed: {}})
    _tell(module, cut.kind, cut.part)


def _part_of(
    name: str, axis: int, kind: Kind, part: Part, weight_format: WeightFormat | None
) -> Part | None:
    """The part of the parameter that stays along the axis that is cut; None: all of it.

    axis: -2 or -1 where `weight_format` is given, which is that of codes whose matrices are cut.
    """
    if kind == "intermediate" and name.startswith("gate_up_proj"):
        part = replace(part, num_halves=2)
    if weight_format is None or not name.endswith(_SCALE):
        return part
    block = weight_format.rows if axis == -2 else weight_format.columns
    return None if block is None else part.in_blocks(block)


def _local(whole: torch.Tensor, parts: Parts) -> torch.Tensor:
    local = whole.new_zeros(local_shape(whole.shape, parts))
    for box in boxes(whole.shape, parts):
        there, here = zip(*box, strict=True)
        local[here] = whole[there]
    return local


def _tell(module: Any, kind: Kind, part: Part) -> None:
    """Set the attributes that forward reads."""
    width = part.end - part.begin
    if kind == "rows":
        module.out_features, module.rows_before = width, part.padding
    elif kind == "columns":
        module.in_features, module.columns_before = width, part.padding
    elif kind == "intermediate":
        for name in ("intermediate_size", "intermediate_dim"):  # ours, and transformers'
            if hasattr(module, name):
                setattr(module, name, part.padding + width)
    else:
        module.num_experts = width
        module.expert_offset, module.num_global_experts = part.begin, part.total
        if not isinstance(module, GroupedExperts | PlainExperts):  # these take ids as they are
            module._is_expert_parallel = True  # transformers then expects ids of experts elsewhere
            module.register_forward_pre_hook(_to_own_ids, with_kwargs=True)


def _to_own_ids(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A pre-hook for transformers: ids of the whole model become ids here, or E with score 0."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if chosen == "moefp8" and hasattr(module, "has_gate"):  # only such classes ask the config
        return None  # it takes the ids as they are
    names = "hidden_states", "top_k_index", "top_k_weights"
    inputs = dict(zip(names, args, strict=False)) | kwargs
    index, weights = inputs["top_k_index"], inputs["top_k_weights"]
    if index.device.type == "cpu" and not torch.compiler.is_compiling():
        check_choices(type(module).__name__, index, module.num_global_experts)
    inputs["top_k_index"], inputs["top_k_weights"] = own_choices(module, index, weights)
    in_order = [inputs.pop(name) for name in names[: len(args)]]
    return (*in_order, *args[len(names) :]), inputs


def own_choices(
    module: Any, index: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices [T, k] of the whole model's experts with ids of this rank, or E with score 0."""
    own = index - module.expert_offset
    is_here = (own >= 0) & (own < module.num_experts)
    return own.where(is_here, module.num_experts), weights.where(is_here, 0)
