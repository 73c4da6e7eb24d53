"""Rows of tokens on their way to the experts: quantized once a token, and a plan of where they lie.

T tokens, k choices each, E experts, H hidden, R = T k rows.
"""

from typing import NamedTuple

import torch

from ...kernels.common.blocks import E4M3, empty_tma_aligned, num_blocks, round_up
from ...kernels.common.checks import FLOATS, check_same_device, check_shape, check_tensor
from ...kernels.common.prepared import Launches, layout_of, prepared
from ...kernels.common.registry import register_inputs
from ...kernels.jit import Source
from ...quant.quantize import quantize_1x128
from ...routing.dispatch import dispatch_rows
from ...routing.dispatch_launch import DispatchSources, most_count_bytes, prepare_dispatch
from ...routing.plan import build_plan
from ...routing.plan_launch import RoutingSources

_OP = "quantized_rows"


class RowsInputs(NamedTuple):
    """What `quantized_rows` takes.

    x: [T, H] bf16, fp16 or fp32. top_k_index: int32 or int64 [T, k].
    num_experts, expert_offset, num_global_experts: as in `build_plan`.
    min_amax: as in `quantize_1x128`.
    """

    x: torch.Tensor
    top_k_index: torch.Tensor
    num_experts: int
    expert_offset: int
    num_global_experts: int | None
    min_amax: float


Rows = tuple[torch.Tensor, torch.Tensor]  # codes, scales


def _allocate(inputs: RowsInputs) -> Rows:
    """Check, then allocate; this is also the fake body."""
    x, ids = inputs.x, inputs.top_k_index
    check_same_device(_OP, x=x, top_k_index=ids)
    check_tensor(_OP, "x", x, FLOATS, 2)
    check_tensor(_OP, "top_k_index", ids, (torch.int32, torch.int64), 2)
    check_shape(_OP, "top_k_index", ids, [len(x), ids.shape[1]], "[T, k] for x [T, H]")
    num_rows, h = ids.numel(), x.shape[1]
    data = x.new_empty((num_rows, round_up(h, 16)), dtype=E4M3)[:, :h]
    return data, empty_tma_aligned((num_rows, num_blocks(h)), x.device)


def _body(inputs: RowsInputs) -> Rows:
    found = _allocate(inputs)
    x, ids, num_experts, expert_offset, num_global_experts, min_amax = inputs
    plan = build_plan(
        ids, num_experts, expert_offset=expert_offset, num_global_experts=num_global_experts
    )
    for y, value in zip(found, quantize_1x128(x, False, min_amax), strict=True):
        rows = dispatch_rows(value, plan.row_to_token)
        if y.dtype == E4M3:
            y.view(torch.uint8).copy_(rows.view(torch.uint8))
        else:
            y.copy_(rows)
    return found


_X, _IDS, _ROWS, _SCALES, _MEMORY = map(Source, range(5))


def _launch(inputs: RowsInputs) -> Rows:
    data, scale_inv = _allocate(inputs)
    x, ids, num_experts, expert_offset, _, min_amax = inputs
    if data.numel() == 0:
        return data, scale_inv
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_tokens, top_k), at = ids.shape, [0]

    def place(num_bytes: int) -> Source:
        at.append(round_up(at[-1] + num_bytes, 256))
        return _MEMORY._replace(plus=at[-2])

    def prepare() -> Launches:
        launches = prepare_dispatch(
            x,
            ids,
            num_experts,
            None,
            row_pitch=data.stride(0),
            scale_pitch=scale_inv.stride(1),
            sources=DispatchSources(
                x=_X,
                rows=_ROWS,
                row_scales=_SCALES,
                counts=place(most_count_bytes(num_tokens, top_k, num_experts)),
                zeros=place(8),
                routing=RoutingSources(
                    ids=_IDS,
                    tokens_per_expert=place(4 * num_experts),
                    expert_offsets=place(4 * num_experts + 4),
                    token_to_row=place(4 * ids.numel()),
                ),
            ),
            expert_offset=expert_offset,
            min_amax=min_amax,
        )
        return Launches(launches, at[-1])

    key = (_OP, layout_of(x), layout_of(ids), x.data_ptr() % 16, *inputs[2:])
    addresses = (x.data_ptr(), ids.data_ptr(), data.data_ptr(), scale_inv.data_ptr())
    prepared(key, prepare)(x.get_device(), addresses)
    return data, scale_inv


quantized_rows = register_inputs(
    _OP, RowsInputs, "(Tensor, Tensor)", cpu=_body, fake=_allocate, hopper=_launch
)
"""`RowsInputs` -> (e4m3 [R, H], fp32 scales of 1x128 blocks [R, ceil(H/128)]), in the rows of
`build_plan` with the same arguments. Rows of no expert are not defined."""
