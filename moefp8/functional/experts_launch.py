"""Launch an expert layer on a Hopper GPU: kernels in a row, none of which the host waits for.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.

1. `routing/dispatch.cu` plans the routing, quantizes every token once, unless it comes as codes,
   and copies it to its rows: one kernel, or two for many choices.
2. `gemm.cu`: gate and up, SwiGLU, quantization (`config.gate_up`).
3. `gemm.cu`: down.
4. `routing/combine.cu`: the weighted sum of every token's rows, to which `addend` is added.

Each is launched before the one before it ends, and waits where it needs its results: the code of
the next kernel and its first weights are on their way meanwhile. What lies between the kernels is
in one workspace. Its size grows with T; a large T is split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from ..kernels.common.blocks import ceil_div, round_up
from ..kernels.common.prepared import Launches, layout_of
from ..kernels.gemm.config import GemmConfig, GroupLayout
from ..kernels.gemm.launch import (
    GateUp,
    GemmSources,
    GroupsOfTokens,
    Sms,
    has_more_tiles_than_clusters,
    prepare_gemm,
)
from ..kernels.gemm.operands import Operands
from ..kernels.gemm.tuned import Pair, config_source_of
from ..kernels.jit import Launch, Source, current_driver
from ..routing.combine_launch import CombineSources, prepare_combine
from ..routing.dispatch_launch import DispatchSources, prepare_dispatch
from ..routing.plan_launch import RoutingSources
from .expert_configs import Sizes, experts_configs, matrix_of, mean_load, saving_config
from .workspace import (
    Projections,
    Weights,
    Workspace,
    fitting_weights,
    num_parts_of,
    operands_of,
    scale_pitch,
    split_weights,
)

_OP = "experts"
# Timed at 1 to 32 tokens of whole layers and ranks of five models on an H200. First weights are
# fetched by guess if there is a choice for every eighth expert. Where experts have one token each,
# taking tiles of gate and up from a counter paid with K = 7168, and did not with 4096.
_MAX_EXPERTS_PER_CHOICE, _LONG_K = 8, 7168
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden states, choices, their scores
# The limit, infinite if there is none; then masked, expert_offset and num_global_experts.
Options = tuple[float, bool, int, int | None]

# The addresses of a call, in order: the tokens, the six of `Weights`, the result, the addend or 0,
# what a backward needs or 0, the scales of the tokens or 0, the word of a `Combine`, the workspace.
_X, _IDS, _SCORES, *_OF_WEIGHTS, _Y, _ADDEND, _SAVED, _X_SCALES, _WORD, _MEMORY = map(
    Source, range(15)
)
_GATE, _GATE_SCALES, _UP, _UP_SCALES, _DOWN, _DOWN_SCALES = _OF_WEIGHTS


class Combine(Protocol):
    """What sums the rows of each token: a hashable that holds all which that depends on."""

    @property
    def prepare(self) -> Callable[..., Launch]:
        """Called as `prepare_combine`."""


@dataclass(frozen=True)
class _Prepared:
    """What is kept for one layout of a layer and its tokens.

    num_parts: in how many parts the tokens are computed; 0: there is nothing to compute.
    up, up_scales: bytes from gate to up, and from the scales of gate to those of up.
    fits: whether TMA can address the weights; if not, every call copies them.
    launches: the prepared launches; None if the tokens are split or copied first.
    """

    num_parts: int
    up: int = 0
    up_scales: int = 0
    fits: bool = True
    launches: Launches | None = None


def launch_experts(
    check: Callable[[], object],
    tokens: Tokens,
    projections: Projections,
    options: Options,
    addend: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    gate_up: torch.Tensor | None = None,
    x_scale_inv: torch.Tensor | None = None,
    combine: Combine | None = None,
    word: int = 0,
) -> torch.Tensor:
    """`experts` on the current stream, bf16 [T, H]; nothing waits for it.

    Weights that TMA cannot address (16 does not divide H, or I) are copied first, in every call.

    check: raises if the arguments are wrong; called for layouts that are new.
    y: contiguous memory for the result; None: it is allocated.
    gate_up: memory for what `experts_saving` gives beside the result; the layout is contiguous.
    x_scale_inv: the scales of tokens that come as codes.
    combine: stands for `prepare_combine`; `y` is then what it needs, and neither tokens nor weights
        may be such that they are split or copied.
    word: a number for the kernel of `combine`, which may differ from call to call.
    """
    x, tensors, driver = tokens[0], (*tokens, *projections), current_driver()
    addresses = tuple([z.data_ptr() for z in tensors])
    x_address, _, _, gate, gate_scales, down, _ = addresses
    y_alignment = 0 if y is None else y.data_ptr() % 16
    added, of_addend = (0, None) if addend is None else (addend.data_ptr(), layout_of(addend))
    scales, of_scales = 0, None
    if x_scale_inv is not None:
        scales, of_scales = x_scale_inv.data_ptr(), layout_of(x_scale_inv)
    alignment = x_address % 16, gate % 16, down % 16, y_alignment, added % 16
    layouts = tuple([layout_of(z) for z in tensors])
    saves, of_others = gate_up is not None, (of_addend, of_scales, combine)
    key = (_OP, layouts, of_others, alignment, options, saves, driver.max_sms)
    found = driver.prepared().get(key)
    if found is None:
        check()
        is_aligned = y_alignment == 0 and added % 16 == 0
        given = tokens, projections, options, addend, x_scale_inv
        found = driver.keep(key, _prepare(*given, is_aligned, saves, combine))
    if y is None:
        y = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    if found.launches is None:
        parts = tokens, addend, y, gate_up, x_scale_inv
        _launch_parts(found.num_parts, check, projections, options, *parts)
        return y
    if found.fits:
        up, up_scales = gate + found.up, gate_scales + found.up_scales
        weights: tuple[int, ...] = (gate, gate_scales, up, up_scales, *addresses[5:])
    else:
        copies = fitting_weights(split_weights(projections))
        weights = tuple([z.data_ptr() for z in copies])
    saved = 0 if gate_up is None else gate_up.data_ptr()
    others = y.data_ptr(), added, saved, scales, word
    found.launches(x.get_device(), (*addresses[:3], *weights, *others))
    return y


def _launch_parts(
    num_parts: int,
    check: Callable[[], object],
    projections: Projections,
    options: Options,
    tokens: Tokens,
    addend: torch.Tensor | None,
    y: torch.Tensor,
    gate_up: torch.Tensor | None,
    x_scale_inv: torch.Tensor | None,
) -> None:
    """Launch part by part, or as a whole with hidden states and addend made contiguous."""
    x, ids, scores = tokens
    if num_parts == 0:
        y.zero_()
        if addend is not None:
            y.add_(addend.detach())
    elif num_parts == 1:
        addend = None if addend is None else addend.contiguous()
        whole = x.contiguous(), ids, scores
        launch_experts(check, whole, projections, options, addend, y, gate_up, x_scale_inv)
    else:
        split = ceil_div(x.shape[0], num_parts)
        parts = list(zip(*(z.split(split) for z in tokens), strict=True))
        none = [None] * len(parts)
        addends = none if addend is None else addend.split(split)
        saved = none if gate_up is None else gate_up.split(split * ids.shape[1])
        scales = none if x_scale_inv is None else x_scale_inv.split(split)
        others = addends, y.split(split), saved, scales
        for part, *rest in zip(parts, *others, strict=True):
            launch_experts(check, cast(Tokens, part), projections, options, *rest)


def _prepare(
    tokens: Tokens,
    projections: Projections,
    options: Options,
    addend: torch.Tensor | None,
    x_scale_inv: torch.Tensor | None,
    is_aligned: bool,
    saves: bool,
    combine: Combine | None,
) -> _Prepared:
    x, ids, _ = tokens
    (num_tokens, top_k), (num_experts, h, i) = ids.shape, projections[2].shape
    limit, masked, expert_offset, num_global_experts = options
    layer = num_tokens, top_k, num_experts, h, i
    sizes = Sizes(*layer, masked, num_global_experts)
    if 0 in layer:
        return _Prepared(0)
    num_parts = num_parts_of(sizes, has_backward=saves)
    is_copied = (x.stride(1) != 1 and h > 1) or (addend is not None and not addend.is_contiguous())
    if num_parts > 1 or is_copied:
        if combine is not None:
            raise ValueError(f"{_OP}: what combine brings elsewhere must be computed in one part")
        return _Prepared(num_parts)
    split = split_weights(projections)
    fitting = fitting_weights(split)
    configs = config_source_of(x.get_device())
    return _Prepared(
        1,
        up=split.up.data_ptr() - split.gate.data_ptr(),
        up_scales=split.up_scale_inv.data_ptr() - split.gate_scale_inv.data_ptr(),
        fits=all(a is b for a, b in zip(fitting, split, strict=True)),
        launches=prepare_experts(
            sizes,
            tokens,
            fitting,
            limit,
            experts_configs(configs, sizes),
            configs.sms,
            expert_offset=expert_offset,
            has_addend=addend is not None,
            is_aligned=is_aligned,
            saves=saves,
            x_scale_inv=x_scale_inv,
            combine=combine,
        ),
    )


def prepare_experts(
    sizes: Sizes,
    tokens: Tokens,
    weights: Weights,
    limit: float,
    configs: Pair,
    sms: Sms,
    *,
    expert_offset: int = 0,
    has_addend: bool = False,
    is_aligned: bool = True,
    saves: bool = False,
    x_scale_inv: torch.Tensor | None = None,
    combine: Combine | None = None,
) -> Launches:
    """The prepared launches of all kernels of a layer. They take a call's addresses in this order:
    the tokens, `Weights`, y [T, H], the addend [T, H] or 0, memory for gate and up [T k, 2, I] or
    0, the scales of the tokens or 0, the word of `combine`, the workspace.

    weights: TMA must be able to address them.
    is_aligned: whether y, and the addend if there is one, lie at multiples of 16 bytes.
    saves: whether gate and up are saved for a backward.
    x_scale_inv: the scales of tokens that come as codes, whose layout counts.
    combine: stands for `prepare_combine`.
    """
    at, (x, ids, scores), (_, rows) = Workspace.of(sizes), tokens, matrix_of(sizes)
    h, max_m = sizes.hidden_size, sizes.num_tokens if sizes.masked else None
    dispatch = prepare_dispatch(
        x,
        ids,
        sizes.num_experts,
        max_m,
        row_pitch=round_up(h, 16),
        scale_pitch=scale_pitch(rows),
        sources=DispatchSources(
            x=_X,
            rows=_in_memory(at.tokens),
            row_scales=_in_memory(at.token_scales),
            counts=_in_memory(at.activated),  # it is not yet in use
            zeros=_in_memory(at.tile_counters),
            routing=RoutingSources(
                ids=_IDS,
                tokens_per_expert=_in_memory(at.counts),
                expert_offsets=_in_memory(at.offsets),
                token_to_row=_in_memory(at.token_to_row),
            ),
            x_scales=None if x_scale_inv is None else _X_SCALES,
        ),
        expert_offset=expert_offset,
        x_scale_inv=x_scale_inv,
    )
    if saves:
        configs = saving_config(configs[0], sizes, sms.busy), configs[1]
    gemms = _prepare_gemms(sizes, weights, limit, configs, sms)
    prepare = prepare_combine if combine is None else combine.prepare
    last = prepare(
        scores,
        h,
        y_row_pitch=round_up(h, 8),
        is_aligned=is_aligned,
        sources=CombineSources(
            y=_in_memory(at.results),
            token_to_row=_in_memory(at.token_to_row),
            weights=_SCORES,
            out=_Y,
            addend=_ADDEND if has_addend else None,
            word=_WORD,
        ),
        programmatic=True,
    )
    return Launches((*dispatch, *gemms, last), at.size)


def _in_memory(offset: int) -> Source:
    return _MEMORY._replace(plus=offset)


def _prepare_gemms(
    sizes: Sizes, weights: Weights, limit: float, configs: Pair, sms: Sms
) -> tuple[Launch, Launch]:
    at, (_, rows) = Workspace.of(sizes), matrix_of(sizes)
    gate_up, down = operands_of(sizes, weights)
    bounds = _in_memory(at.counts if sizes.masked else at.offsets)
    layout = GroupLayout.MASKED if sizes.masked else GroupLayout.OFFSETS
    _, load = mean_load(sizes)

    def prepare(
        config: GemmConfig,
        operands: Operands,
        sources: GemmSources,
        groups: GroupsOfTokens,
        counter: int,
        gate_up: GateUp | None = None,
    ) -> Launch:
        takes = takes_tiles(config, sizes, operands, groups, sms)
        tile_counter = _in_memory(at.tile_counters + counter) if takes else None
        sources = sources._replace(bounds=bounds, tile_counter=tile_counter)
        return prepare_gemm(config, operands, sources, sms, load, groups=groups, gate_up=gate_up)

    activated, activated_scales = _in_memory(at.activated), _in_memory(at.activated_scales)
    tokens, token_scales = _in_memory(at.tokens), _in_memory(at.token_scales)
    first = prepare(
        configs[0],
        gate_up,
        GemmSources(
            a=tokens,
            a_scale_inv=token_scales,
            b=_GATE,
            b_scale_inv=_GATE_SCALES,
            d=activated,
            up=_UP,
            up_scale_inv=_UP_SCALES,
            d_scale_inv=activated_scales,
            saved=_SAVED if configs[0].saves_gate_up else None,
        ),
        GroupsOfTokens(layout, sizes.num_experts, expected_tiles(configs[0], sizes)),
        counter=0,
        gate_up=GateUp(limit, scale_pitch(rows)),
    )
    results = _in_memory(at.results)
    second = prepare(
        configs[1],
        down,
        GemmSources(activated, activated_scales, _DOWN, _DOWN_SCALES, results),
        GroupsOfTokens(layout, sizes.num_experts, bounds_ready=True),
        counter=4,
    )
    return first, second


def expected_tiles(config: GemmConfig, sizes: Sizes) -> int:
    """How many tiles an expert is guessed to have; 0: so few are chosen that a guess is wrong."""
    num_choices = sizes.num_tokens * sizes.top_k
    if num_choices * _MAX_EXPERTS_PER_CHOICE < sizes.num_to_choose_from:
        return 0
    return config.token_tiles(mean_load(sizes)[1])


def takes_tiles(
    config: GemmConfig, sizes: Sizes, operands: Operands, groups: GroupsOfTokens, sms: Sms
) -> bool:
    """Whether clusters take tiles from a counter.

    They do where there are more tiles than clusters, and unequal or long ones; else a counter costs
    time.
    """
    active, load = mean_load(sizes)
    is_worth_it = load > 1 or (config.gate_up and sizes.hidden_size >= _LONG_K)
    return is_worth_it and has_more_tiles_than_clusters(config, active, load, operands, groups, sms)
