"""The routed SwiGLU experts of a MoE layer, from tokens and the router's choice to their output.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

import math
from itertools import pairwise

import torch
from torch.nn import functional as F

from ..kernels.common.blocks import E4M3, num_blocks
from ..kernels.common.checks import (
    FLOATS,
    check_choices,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.fp8 import quantize_1x128
from ..kernels.common.registry import register
from ..kernels.gemm.dense import block_scaled_matmul
from ..routing.combine import combine_rows
from ..routing.dispatch import dispatch_rows
from ..routing.plan_op import build_maps
from .experts_launch import launch_experts

_OP = "experts"


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """`silu(gate) * up` in FP32; with `limit`, of gate below it and up within +-limit."""
    gate, up = gate.float(), up.float()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return F.silu(gate) * up


def check_limit(op: str, swiglu_limit: float | None) -> None:
    if swiglu_limit is not None and not swiglu_limit >= 0:
        raise ValueError(f"{op}: swiglu_limit must be at least 0, or None, got {swiglu_limit}")


def _allocate(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    gate_up_proj_scale_inv: torch.Tensor,
    down_proj: torch.Tensor,
    down_proj_scale_inv: torch.Tensor,
    swiglu_limit: float | None,
    masked: bool,
) -> torch.Tensor:
    """Check, then allocate the result. Also the fake body."""
    check_same_device(
        _OP,
        hidden_states=hidden_states,
        top_k_index=top_k_index,
        top_k_weights=top_k_weights,
        gate_up_proj=gate_up_proj,
        gate_up_proj_scale_inv=gate_up_proj_scale_inv,
        down_proj=down_proj,
        down_proj_scale_inv=down_proj_scale_inv,
    )
    for name, x, dtypes, ndim in (
        ("hidden_states", hidden_states, FLOATS, 2),
        ("top_k_index", top_k_index, (torch.int32, torch.int64), 2),
        ("top_k_weights", top_k_weights, FLOATS, 2),
        ("gate_up_proj", gate_up_proj, (E4M3,), 3),
        ("gate_up_proj_scale_inv", gate_up_proj_scale_inv, (torch.float32,), 3),
        ("down_proj", down_proj, (E4M3,), 3),
        ("down_proj_scale_inv", down_proj_scale_inv, (torch.float32,), 3),
    ):
        check_tensor(_OP, name, x, dtypes, ndim)
    (num_tokens, _), top_k, (e, h, i) = hidden_states.shape, top_k_index.shape[1], down_proj.shape
    for name, x, shape, rule in (
        ("hidden_states", hidden_states, [num_tokens, h], "[T, H]"),
        ("top_k_index", top_k_index, [num_tokens, top_k], "[T, k]"),
        ("top_k_weights", top_k_weights, [num_tokens, top_k], "[T, k] as top_k_index"),
        ("gate_up_proj", gate_up_proj, [e, 2 * i, h], "[E, 2I, H] for down_proj [E, H, I]"),
        (
            *("gate_up_proj_scale_inv", gate_up_proj_scale_inv),
            *([e, 2 * num_blocks(i), num_blocks(h)], "[E, 2 ceil(I/128), ceil(H/128)]"),
        ),
        (
            *("down_proj_scale_inv", down_proj_scale_inv),
            *([e, num_blocks(h), num_blocks(i)], "[E, ceil(H/128), ceil(I/128)]"),
        ),
    ):
        check_shape(_OP, name, x, shape, rule)
    check_limit(_OP, swiglu_limit)
    if top_k < 1 or e < 1:
        raise ValueError(f"{_OP}: k and E must be at least 1, got k = {top_k} and E = {e}")
    for name, x in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        check_rows_contiguous(_OP, name, x)
    return hidden_states.new_empty((num_tokens, h), dtype=torch.bfloat16)


def _body(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    gate_up_proj_scale_inv: torch.Tensor,
    down_proj: torch.Tensor,
    down_proj_scale_inv: torch.Tensor,
    swiglu_limit: float | None,
    masked: bool,
) -> torch.Tensor:
    weights = (gate_up_proj, gate_up_proj_scale_inv, down_proj, down_proj_scale_inv)
    y = _allocate(hidden_states, top_k_index, top_k_weights, *weights, swiglu_limit, masked)
    num_experts, h, i = down_proj.shape
    if hidden_states.device.type == "cpu":
        check_choices(_OP, top_k_index, num_experts)
    if i == 0:
        return y.zero_()
    maps = build_maps(top_k_index, num_experts, 1, None)
    _, expert_offsets, row_to_token, _, token_to_row = maps
    if len(row_to_token) == 0:
        return y
    data, scale_inv = (dispatch_rows(x, row_to_token) for x in quantize_1x128(hidden_states))
    rows = y.new_zeros(len(row_to_token), h)
    for expert, (begin, end) in enumerate(pairwise(expert_offsets.tolist())):
        if begin == end:
            continue
        gate, up = (
            block_scaled_matmul(data[begin:end], scale_inv[begin:end], weight, scales)
            for weight, scales in zip(
                gate_up_proj[expert].split(i),
                gate_up_proj_scale_inv[expert].split(num_blocks(i)),
                strict=True,
            )
        )
        activated = quantize_1x128(swiglu(gate, up, swiglu_limit))
        of_down = down_proj[expert], down_proj_scale_inv[expert]
        rows[begin:end] = block_scaled_matmul(*activated, *of_down)
    return combine_rows(rows, token_to_row, top_k_weights)


def _launch(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    gate_up_proj_scale_inv: torch.Tensor,
    down_proj: torch.Tensor,
    down_proj_scale_inv: torch.Tensor,
    swiglu_limit: float | None,
    masked: bool,
) -> torch.Tensor:
    tokens = (hidden_states, top_k_index, top_k_weights)
    weights = (gate_up_proj, gate_up_proj_scale_inv, down_proj, down_proj_scale_inv)
    check_limit(_OP, swiglu_limit)

    def check() -> torch.Tensor:
        return _allocate(*tokens, *weights, swiglu_limit, masked)

    limit = math.inf if swiglu_limit is None else swiglu_limit
    return launch_experts(check, tokens, weights, limit, masked)


experts = register(
    f"{_OP}(Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_proj, "
    "Tensor gate_up_proj_scale_inv, Tensor down_proj, Tensor down_proj_scale_inv, "
    "float? swiglu_limit, bool masked) -> Tensor",
    _body,
    _allocate,
    _launch,
)
"""`sum_j w_j down(silu(gate(x)) * up(x))` over a token's k experts, in the order of its choices.

hidden_states [T, H] bf16, fp16 or fp32 is quantized to 1x128, and so are the activated values,
which are FP32 before; the output of each expert is rounded to BF16, the sum FP32. top_k_index
int32 or int64 [T, k] in [0, E] (E: held elsewhere, of weight 0; values are checked on the CPU,
and on a GPU other ids count as E), top_k_weights [T, k]; gate_up_proj e4m3 [E, 2I, H], gate first,
with gate_up_proj_scale_inv fp32 [E, 2 ceil(I/128), ceil(H/128)]; down_proj e4m3 [E, H, I] with
down_proj_scale_inv fp32 [E, ceil(H/128), ceil(I/128)] -> bf16 [T, H]. On a Hopper GPU, what
a token gives does not depend on the other tokens, bit for bit. swiglu_limit: see `swiglu`.
masked: on a GPU, every expert has T rows of memory, else as many as it has tokens: the result is
the same. Raises TypeError, ValueError, naming the argument, the rule and what came."""
