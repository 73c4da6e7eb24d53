"""Launch the gradients of experts on a Hopper GPU: kernels in a row, as in experts_launch.py.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.

1. `routing/dispatch.cu` plans the routing as the forward did, quantizes the gradient of every token
   once, unless it comes as codes, and copies it to its rows.
2. `gemm.cu` with W_down^T.
3. `swiglu_backward.cu`: the activation again, the gradients of weights, of gate and of up.
4. `gemm.cu` with W_gate_up^T.
5. `routing/combine.cu`: the sum of every token's rows, in a fixed order.

Before them, a weight whose transpose is not kept is transposed.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..kernels.common.blocks import MIN_GRADIENT_AMAX, ceil_div, round_up
from ..kernels.common.prepared import Launches, layout_of
from ..kernels.gemm.config import GemmConfig, GroupLayout
from ..kernels.gemm.launch import GemmSources, GroupsOfTokens, prepare_gemm
from ..kernels.gemm.operands import Operands
from ..kernels.gemm.tuned import ConfigSource, config_source_of
from ..kernels.jit import Launch, Source, current_driver
from ..routing.combine_launch import CombineSources, prepare_combine
from ..routing.dispatch_launch import DispatchSources, prepare_dispatch
from ..routing.plan_launch import RoutingSources
from .expert_configs import Sizes, backward_configs, mean_load
from .experts_launch import Combine, expected_tiles, takes_tiles
from .swiglu import lies_as_read, saved_as_read
from .swiglu_backward_launch import SwigluBackwardSources, prepare_swiglu_backward
from .transposed import transposed
from .workspace import (
    BackwardWorkspace,
    backward_operands_of,
    has_one_part,
    num_parts_of,
    scale_pitch,
)

if TYPE_CHECKING:
    from .experts_backward import ExpertsBackwardInputs

_OP = "experts_backward"
# The addresses of a call, in order: the tokens' gradients, choices and their weights, what the
# forward saved and its scales or 0, both transposed weights and their scales, both results, the
# scales of the tokens' gradients or 0, the word of a `Combine`, the workspace.
_GRAD, _IDS, _WEIGHTS, _SAVED, _SAVED_SCALES, *_REST = map(Source, range(14))
_DOWN, _DOWN_SCALES, _GATE_UP, _GATE_UP_SCALES, _DX, _OF_WEIGHTS, *_REST = _REST
_GRAD_SCALES, _WORD, _MEMORY = _REST


def launch_experts_backward(
    check: Callable[[], object],
    inputs: "ExpertsBackwardInputs",
    dx: torch.Tensor,
    of_weights: torch.Tensor,
    combine: Combine | None = None,
    word: int = 0,
) -> None:
    """`experts_backward` on the current stream; nothing waits for it.

    check: raises if the arguments are wrong; called for layouts that are new.
    combine: stands for `prepare_combine`; `dx` is then what it needs, and `runs_as_a_whole` holds.
    word: a number for the kernel of `combine`, which may differ from call to call.
    """
    if 0 in (*inputs.top_k_index.shape, *inputs.down_proj.shape):
        check()
        dx.zero_()
        of_weights.zero_()
        return
    weights = (
        transposed(inputs.down_proj, inputs.keeps),
        inputs.down_proj_scale_inv.mT,
        transposed(inputs.gate_up_proj, inputs.keeps, parts=2),
        inputs.gate_up_proj_scale_inv.mT,
    )
    grad = inputs.grad
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    gate_up, scales = inputs.gate_up, inputs.gate_up_scale_inv
    if not lies_as_read(gate_up, scales):
        check()
        gate_up, scales = saved_as_read(gate_up, scales)
    inputs = inputs._replace(grad=grad, gate_up=gate_up, gate_up_scale_inv=scales)
    if combine is not None:
        _launch(check, inputs, weights, dx, of_weights, combine, word)
    else:
        _launch_parts(check, inputs, weights, dx, of_weights)


def runs_as_a_whole(inputs: "ExpertsBackwardInputs") -> bool:
    """Whether all tokens are computed in one part, and there is something to compute."""
    return has_one_part(_sizes_of(inputs), has_backward=True)


def _launch_parts(
    check: Callable[[], object],
    inputs: "ExpertsBackwardInputs",
    weights: tuple[torch.Tensor, ...],
    dx: torch.Tensor,
    of_weights: torch.Tensor,
) -> None:
    """Launch the parts that the forward had: one that was too large for it was split again."""
    sizes = _sizes_of(inputs)
    num_parts = num_parts_of(sizes, has_backward=True)
    if num_parts == 1:
        _launch(check, inputs, weights, dx, of_weights)
        return
    split = ceil_div(sizes.num_tokens, num_parts)
    by_token = (inputs.grad, inputs.top_k_index, inputs.top_k_weights, dx, of_weights)
    rows, scales = split * sizes.top_k, inputs.gate_up_scale_inv
    saved = inputs.gate_up.split(rows if scales is None else 2 * rows)
    none, grad_scales = [None] * len(saved), inputs.grad_scale_inv
    of_saved = none if scales is None else scales.split(2 * rows)
    of_grad = none if grad_scales is None else grad_scales.split(split)
    parts = zip(*(x.split(split) for x in by_token), saved, of_saved, of_grad, strict=True)
    for *tokens, part_dx, part_of_weights, gate_up, gate_up_scales, grad_scale_inv in parts:
        part = inputs._replace(
            grad=tokens[0],
            top_k_index=tokens[1],
            top_k_weights=tokens[2],
            gate_up=gate_up,
            gate_up_scale_inv=gate_up_scales,
            grad_scale_inv=grad_scale_inv,
        )
        _launch_parts(check, part, weights, part_dx, part_of_weights)


def _sizes_of(inputs: "ExpertsBackwardInputs") -> Sizes:
    (num_tokens, top_k), (e, h, i) = inputs.top_k_index.shape, inputs.down_proj.shape
    return Sizes(num_tokens, top_k, e, h, i, False, inputs.num_global_experts)


def _launch(
    check: Callable[[], object],
    inputs: "ExpertsBackwardInputs",
    weights: tuple[torch.Tensor, ...],
    dx: torch.Tensor,
    of_weights: torch.Tensor,
    combine: Combine | None = None,
    word: int = 0,
) -> None:
    grad, ids, top_k_weights, gate_up, scales = inputs[:5]
    grad_scales = inputs.grad_scale_inv
    driver = current_driver()
    tensors = grad, ids, top_k_weights, gate_up, *weights
    key = (
        _OP,
        tuple([layout_of(x) for x in tensors]),
        None if scales is None else layout_of(scales),
        None if grad_scales is None else layout_of(grad_scales),
        grad.data_ptr() % 16,
        dx.data_ptr() % 16,
        inputs.swiglu_limit,
        inputs.expert_offset,
        inputs.num_global_experts,
        combine,
        driver.max_sms,
    )
    found = driver.prepared().get(key)
    if found is None:
        check()
        found = driver.keep(key, _prepare(inputs, weights, dx.data_ptr() % 16 == 0, combine))
    saved_scales = 0 if scales is None else scales.data_ptr()
    of_grad = 0 if grad_scales is None else grad_scales.data_ptr()
    addresses = [x.data_ptr() for x in (*weights, dx, of_weights)]
    saved = gate_up.data_ptr(), saved_scales
    tokens = grad.data_ptr(), ids.data_ptr(), top_k_weights.data_ptr()
    found(grad.get_device(), (*tokens, *saved, *addresses, of_grad, word))


def _prepare(
    inputs: "ExpertsBackwardInputs",
    weights: tuple[torch.Tensor, ...],
    is_aligned: bool,
    combine: Combine | None,
) -> Launches:
    sizes = _sizes_of(inputs)
    at, rows = BackwardWorkspace.of(sizes), sizes.num_tokens * sizes.top_k
    configs = config_source_of(inputs.grad.get_device())
    token_to_row, is_first = _in_memory(at.token_to_row), _in_memory(at.is_first)
    h, pitch = sizes.hidden_size, scale_pitch(rows)
    dispatch = prepare_dispatch(
        inputs.grad,
        inputs.top_k_index,
        sizes.num_experts,
        None,
        row_pitch=round_up(h, 16),
        scale_pitch=pitch,
        sources=DispatchSources(
            x=_GRAD,
            rows=_in_memory(at.tokens),
            row_scales=_in_memory(at.token_scales),
            counts=_in_memory(at.of_activated),  # it is not yet in use
            zeros=_in_memory(at.tile_counters),
            routing=RoutingSources(
                ids=_IDS,
                tokens_per_expert=_in_memory(at.counts),
                expert_offsets=_in_memory(at.offsets),
                token_to_row=token_to_row,
            ),
            x_scales=None if inputs.grad_scale_inv is None else _GRAD_SCALES,
        ),
        expert_offset=inputs.expert_offset,
        min_amax=MIN_GRADIENT_AMAX,
        x_scale_inv=inputs.grad_scale_inv,
    )
    first, second = _prepare_gemms(sizes, at, weights, configs)
    limit = inputs.swiglu_limit
    swiglu = prepare_swiglu_backward(
        inputs.gate_up,
        inputs.gate_up_scale_inv,
        inputs.top_k_weights,
        math.inf if limit is None else limit,
        grad_row_pitch=round_up(sizes.intermediate_size, 8),
        scale_pitch=pitch,
        sources=SwigluBackwardSources(
            grad=_in_memory(at.of_activated),
            saved=_SAVED,
            saved_scales=None if inputs.gate_up_scale_inv is None else _SAVED_SCALES,
            rows=_in_memory(at.gate_up),
            row_scales=_in_memory(at.gate_up_scales),
            token_to_row=token_to_row,
            weights=_WEIGHTS,
            of_weights=_OF_WEIGHTS,
            is_first=is_first,
        ),
    )
    prepare = prepare_combine if combine is None else combine.prepare
    last = prepare(
        inputs.grad.new_empty(inputs.top_k_index.shape, dtype=torch.float32),
        h,
        y_row_pitch=round_up(h, 8),
        is_aligned=is_aligned,
        sources=CombineSources(
            _in_memory(at.results),
            token_to_row,
            is_first,
            _DX,
            of_choices=_OF_WEIGHTS,
            word=_WORD,
        ),
        programmatic=True,
    )
    return Launches((*dispatch, first, swiglu, second, last), at.size)


def _in_memory(offset: int) -> Source:
    return _MEMORY._replace(plus=offset)


def _prepare_gemms(
    sizes: Sizes, at: BackwardWorkspace, weights: tuple[torch.Tensor, ...], source: ConfigSource
) -> tuple[Launch, Launch]:
    (_, load), sms = mean_load(sizes), source.sms
    first, second = backward_configs(source, sizes)
    of_down, of_gate_up = backward_operands_of(sizes, weights)
    bounds, counter = _in_memory(at.offsets), at.tile_counters

    def prepare(
        config: GemmConfig,
        operands: Operands,
        sources: GemmSources,
        tile_counter: int,
        ready: bool,
    ) -> Launch:
        tiles = 0 if ready else expected_tiles(config, sizes)
        groups = GroupsOfTokens(GroupLayout.OFFSETS, sizes.num_experts, tiles, bounds_ready=ready)
        takes = takes_tiles(config, sizes, operands, groups, sms)
        sources = sources._replace(
            bounds=bounds, tile_counter=_in_memory(tile_counter) if takes else None
        )
        return prepare_gemm(config, operands, sources, sms, load, groups=groups)

    tokens, token_scales = _in_memory(at.tokens), _in_memory(at.token_scales)
    gate_up, gate_up_scales = _in_memory(at.gate_up), _in_memory(at.gate_up_scales)
    of_activated, results = _in_memory(at.of_activated), _in_memory(at.results)
    return (
        prepare(
            first,
            of_down,
            GemmSources(tokens, token_scales, _DOWN, _DOWN_SCALES, of_activated),
            counter,
            False,
        ),
        prepare(
            second,
            of_gate_up,
            GemmSources(gate_up, gate_up_scales, _GATE_UP, _GATE_UP_SCALES, results),
            counter + 4,
            True,
        ),
    )
