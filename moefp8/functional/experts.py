"""The routed SwiGLU experts of a MoE layer, from tokens and the router's choice to their output.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

import math
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from ..kernels.common.blocks import E4M3, num_blocks
from ..kernels.common.checks import (
    FLOATS,
    check_choices,
    check_quantized_or_not,
    check_rank,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.registry import register_inputs
from ..kernels.gemm.dense import block_scaled_matmul
from ..quant.numerics import quantize_1x128
from ..routing.combine import combine_rows
from ..routing.dispatch import dispatch_rows
from ..routing.plan import build_maps
from .expert_configs import Sizes
from .expert_parts import Combine
from .experts_launch import launch_experts, num_parts_of
from .swiglu import check_limit, empty_gate_up, swiglu

_OP = "experts"


class ExpertsInputs(NamedTuple):
    """What `experts` takes.

    hidden_states: [T, H] bf16, fp16 or fp32; it is quantized to 1x128, and so are the activated
        values, which are FP32 before. Or e4m3, codes as `quantize_1x128` gives them, whose result
        is bit for bit that of the tokens that were quantized.
    top_k_index: int32 or int64 [T, k] in [0, E]. E marks a choice held elsewhere, which has score
        0. Values are checked on the CPU; on a GPU other ids count as E. A rank of expert
        parallelism takes the ids of the whole model.
    top_k_weights: [T, k] bf16, fp16 or fp32.
    gate_up_proj: e4m3 [E, 2I, H], gate first; gate and up have 128x128 blocks of their own.
    gate_up_proj_scale_inv: fp32 [E, 2 ceil(I/128), ceil(H/128)].
    down_proj: e4m3 [E, H, I].
    down_proj_scale_inv: fp32 [E, ceil(H/128), ceil(I/128)].
    swiglu_limit: see `swiglu`.
    masked: whether, on a GPU, every expert has T rows of memory, not as many as it has tokens; the
        result is the same.
    expert_offset, num_global_experts: for a rank of expert parallelism, the id of its first expert,
        and how many the whole model has, by which tiles are chosen; None: E. Ids are then in
        [0, num_global_experts], and all but [expert_offset, expert_offset + E) are held elsewhere.
    addend: bf16 [T, H], such as the output of shared experts, or None. The result is bit for bit
        that of an addition behind the op: the sum over the choices is rounded to BF16, then the
        sum with `addend` is.
    hidden_states_scale_inv: fp32 [T, ceil(H/128)], the scales of e4m3 hidden states, in any
        strides; None for others.
    """

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    gate_up_proj: torch.Tensor
    gate_up_proj_scale_inv: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scale_inv: torch.Tensor
    swiglu_limit: float | None
    masked: bool
    expert_offset: int = 0
    num_global_experts: int | None = None
    addend: torch.Tensor | None = None
    hidden_states_scale_inv: torch.Tensor | None = None


def _allocate(inputs: ExpertsInputs) -> torch.Tensor:
    """Check, then allocate the result; this is also the fake body."""
    hidden_states, down, addend = inputs.hidden_states, inputs.down_proj, inputs.addend
    fp32, ids = (torch.float32,), (torch.int32, torch.int64)
    dtypes = ((hidden_states.dtype,), ids, FLOATS, (E4M3,), fp32, (E4M3,), fp32)
    named = dict(zip(inputs._fields, inputs[:7], strict=False))
    scale_inv = inputs.hidden_states_scale_inv
    check_same_device(_OP, **named, addend=addend, hidden_states_scale_inv=scale_inv)
    check_quantized_or_not(_OP, "hidden_states", hidden_states, scale_inv)
    for (name, x), allowed in zip(named.items(), dtypes, strict=True):
        check_tensor(_OP, name, x, allowed, 3 if "proj" in name else 2)
    (num_tokens, _), (e, h, i) = hidden_states.shape, down.shape
    top_k = inputs.top_k_index.shape[1]
    rules = (
        ([num_tokens, h], "[T, H]"),
        ([num_tokens, top_k], "[T, k]"),
        ([num_tokens, top_k], "[T, k] as top_k_index"),
        ([e, 2 * i, h], "[E, 2I, H] for down_proj [E, H, I]"),
        ([e, 2 * num_blocks(i), num_blocks(h)], "[E, 2 ceil(I/128), ceil(H/128)]"),
        ([e, h, i], "[E, H, I]"),
        ([e, num_blocks(h), num_blocks(i)], "[E, ceil(H/128), ceil(I/128)]"),
    )
    for (name, x), (shape, rule) in zip(named.items(), rules, strict=True):
        check_shape(_OP, name, x, shape, rule)
    if addend is not None:
        check_tensor(_OP, "addend", addend, (torch.bfloat16,), 2)
        check_shape(_OP, "addend", addend, [num_tokens, h], "[T, H] as hidden_states")
    check_limit(_OP, inputs.swiglu_limit)
    if top_k < 1 or e < 1:
        raise ValueError(f"{_OP}: k and E must be at least 1, got k = {top_k} and E = {e}")
    check_rank(_OP, e, inputs.expert_offset, inputs.num_global_experts)
    check_rows_contiguous(_OP, "gate_up_proj", inputs.gate_up_proj)
    check_rows_contiguous(_OP, "down_proj", down)
    return hidden_states.new_empty((num_tokens, h), dtype=torch.bfloat16)


def _body(inputs: ExpertsInputs, gate_up: torch.Tensor | None = None) -> torch.Tensor:
    y = _allocate(inputs)
    hidden_states, top_k_index, top_k_weights = inputs[:3]
    gate_up_proj, gate_up_scales, down_proj, down_scales = inputs[3:7]
    num_experts, h, i = down_proj.shape
    if is_on_cpu := hidden_states.device.type == "cpu":
        check_choices(_OP, top_k_index, inputs.num_global_experts or num_experts)
    if i == 0:
        return y.zero_() if inputs.addend is None else y.zero_().add_(inputs.addend)
    maps = build_maps(top_k_index, num_experts, 1, None, inputs.expert_offset)
    _, expert_offsets, row_to_token, _, token_to_row = maps
    if len(row_to_token) == 0:
        return y
    data, scale_inv = hidden_states, inputs.hidden_states_scale_inv
    if scale_inv is None:
        data, scale_inv = quantize_1x128(hidden_states)
    data, scale_inv = (dispatch_rows(x, row_to_token) for x in (data, scale_inv))
    rows = y.new_zeros(len(row_to_token), h)
    # Then no row depends on how many an expert has. GPUs without our kernels have few FP64 units.
    product = partial(block_scaled_matmul, exact=is_on_cpu)
    for expert, (begin, end) in enumerate(pairwise(expert_offsets.tolist())):
        if begin == end:
            continue
        weights = gate_up_proj[expert].split(i)
        scales = gate_up_scales[expert].split(num_blocks(i))
        gate, up = (
            product(data[begin:end], scale_inv[begin:end], *of_half)
            for of_half in zip(weights, scales, strict=True)
        )
        if gate_up is not None:
            gate_up[begin:end, 0], gate_up[begin:end, 1] = gate, up
        activated = quantize_1x128(swiglu(gate, up, inputs.swiglu_limit, exact=is_on_cpu))
        of_down = down_proj[expert], down_scales[expert]
        rows[begin:end] = product(*activated, *of_down)
    return combine_rows(rows, token_to_row, top_k_weights, inputs.addend)


def _launch(
    inputs: ExpertsInputs,
    gate_up: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    combine: Combine | None = None,
    word: int = 0,
) -> torch.Tensor:
    limit = inputs.swiglu_limit
    check_limit(_OP, limit)
    limit = math.inf if limit is None else limit
    tokens, projections, options = inputs[:3], inputs[3:7], (limit, *inputs[8:11])
    check = partial(_allocate, inputs)
    scale_inv = inputs.hidden_states_scale_inv
    others = inputs.addend, y, gate_up, scale_inv, combine, word
    return launch_experts(check, tokens, projections, options, *others)


experts = register_inputs(_OP, ExpertsInputs, "Tensor", cpu=_body, fake=_allocate, hopper=_launch)
"""`sum_j w_j down(silu(gate(x)) * up(x))` over a token's k experts, in the order of its choices.

The output of each expert is rounded to BF16, and the sum is FP32: `ExpertsInputs` -> bf16 [T, H].
On a Hopper GPU, what a token gives does not depend on the other tokens, bit for bit. Raises
TypeError, ValueError, naming the argument, the rule and what came."""


# ---- What a backward needs ----

Saving = tuple[torch.Tensor, torch.Tensor]  # the result, gate_up


def _allocate_saving(inputs: ExpertsInputs) -> Saving:
    return _allocate(inputs), _empty_gate_up(inputs)


def _empty_gate_up(inputs: ExpertsInputs) -> torch.Tensor:
    (num_tokens, top_k), size = inputs.top_k_index.shape, inputs.down_proj.shape[2]
    return empty_gate_up(inputs.down_proj, num_tokens * top_k, size)


def _body_saving(inputs: ExpertsInputs) -> Saving:
    _allocate(inputs)
    gate_up = _empty_gate_up(inputs).zero_()
    return _body(inputs, gate_up), gate_up


def _launch_saving(inputs: ExpertsInputs) -> Saving:
    inputs = inputs._replace(masked=False)
    if (inputs.top_k_index.ndim, inputs.down_proj.ndim) != (2, 3):
        _allocate(inputs)  # this raises
    gate_up = _empty_gate_up(inputs)
    return _launch(inputs, gate_up), gate_up


experts_saving = register_inputs(
    "experts_saving",
    ExpertsInputs,
    "(Tensor, Tensor)",
    cpu=_body_saving,
    fake=_allocate_saving,
    hopper=_launch_saving,
)
"""`experts`, the same to the bit, and what `experts_backward` takes: gate and up of each row, as
they are before SwiGLU, rounded to BF16: [T k, 2, I]. Rows lie expert by expert; behind the last
expert's they are not defined."""


# ---- On one GPU of several ----


def runs_as_a_whole(inputs: ExpertsInputs, *, saves: bool) -> bool:
    """Whether a Hopper GPU computes all tokens in one part, as `launch_combining` needs.

    saves: whether it is `experts_saving`.
    """
    (num_tokens, top_k), (e, h, i) = inputs.top_k_index.shape, inputs.down_proj.shape
    sizes = Sizes(num_tokens, top_k, e, h, i, inputs.masked and not saves)
    return num_parts_of(sizes, saves=saves) == 1


def launch_combining(
    inputs: ExpertsInputs, combine: Combine, word: int, y: torch.Tensor, *, saves: bool
) -> torch.Tensor | None:
    """`experts` on a Hopper GPU, where `combine` sums the rows of tokens and brings them elsewhere.

    word: a number for the kernel of `combine`, which may differ from call to call.
    y: what it takes for the result. It knows no addend.
    saves: whether to return gate and up as `experts_saving` does; else None.
    """
    gate_up = _empty_gate_up(inputs) if saves else None
    if saves:
        inputs = inputs._replace(masked=False)
    _launch(inputs, gate_up, y, combine, word)
    return gate_up
