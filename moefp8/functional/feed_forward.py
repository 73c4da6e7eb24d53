"""A SwiGLU feed-forward that every token takes: `down(silu(gate(x)) * up(x))`.

T tokens, H hidden, I intermediate.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from ..kernels.common.blocks import E4M3, empty_tma_aligned, num_blocks, round_up
from ..kernels.common.checks import (
    FLOATS,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.common.registry import register_inputs
from ..kernels.common.tma_operands import fitting, lying_as
from ..kernels.gemm.config import GroupLayout
from ..kernels.gemm.dense import DenseInputs, block_scaled_matmul, launch_dense
from ..kernels.gemm.launch import GateUp, GroupsOfTokens, describe_gemm
from ..kernels.gemm.operands import Operands, check_sizes
from ..kernels.gemm.tuned import target_of
from ..kernels.jit import Launch, current_driver
from ..kernels.program import Codes, Place, Record, Tensor, prepare_launch
from ..quant.numerics import quantize_1x128
from ..quant.quantize import launch_quantize_1x128
from .expert_configs import gate_up_config
from .swiglu import check_limit, empty_gate_up, swiglu

_OP = "feed_forward"


class FeedForwardInputs(NamedTuple):
    """What `feed_forward` takes.

    x: [T, H] bf16, fp16 or fp32; it is quantized to 1x128, and so are the activated values.
    gate, up: e4m3 [I, H]. down: e4m3 [H, I]. Each has fp32 scales of its 128x128 blocks.
    swiglu_limit: see `swiglu`.
    batch_invariant: a row of the result has the same bits whatever T is, see `fp8_gemm_nt`.
    """

    x: torch.Tensor
    gate: torch.Tensor
    gate_scale_inv: torch.Tensor
    up: torch.Tensor
    up_scale_inv: torch.Tensor
    down: torch.Tensor
    down_scale_inv: torch.Tensor
    swiglu_limit: float | None
    batch_invariant: bool = False


def _allocate(inputs: FeedForwardInputs) -> torch.Tensor:
    """Check, then allocate the result; this is also the fake body."""
    x, gate, gate_scale_inv, up, up_scale_inv, down, down_scale_inv, swiglu_limit, _ = inputs
    check_tensor(_OP, "x", x, FLOATS, 2)
    weights = {"gate": (gate, gate_scale_inv), "up": (up, up_scale_inv)}
    weights["down"] = (down, down_scale_inv)
    h, i = x.shape[1], gate.shape[0]
    for name, (data, scale_inv) in weights.items():
        check_same_device(_OP, x=x, **{name: data, f"{name}_scale_inv": scale_inv})
        check_tensor(_OP, name, data, (E4M3,), 2)
        check_tensor(_OP, f"{name}_scale_inv", scale_inv, (torch.float32,), 2)
        shape = [h, i] if name == "down" else [i, h]
        check_shape(_OP, name, data, shape, "[H, I]" if name == "down" else "[I, H]")
        blocks = [num_blocks(size) for size in shape]
        check_shape(_OP, f"{name}_scale_inv", scale_inv, blocks, f"the blocks of {name}")
        check_rows_contiguous(_OP, name, data)
    check_limit(_OP, swiglu_limit)
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _body(inputs: FeedForwardInputs, gate_up: torch.Tensor | None = None) -> torch.Tensor:
    y = _allocate(inputs)
    x, gate, gate_scale_inv, up, up_scale_inv, down, down_scale_inv, swiglu_limit, exact = inputs
    data, scale_inv = quantize_1x128(x)
    gated = block_scaled_matmul(data, scale_inv, gate, gate_scale_inv, exact=exact)
    ungated = block_scaled_matmul(data, scale_inv, up, up_scale_inv, exact=exact)
    if gate_up is not None:
        gate_up[:, 0], gate_up[:, 1] = gated, ungated
    activated, scales = quantize_1x128(swiglu(gated, ungated, swiglu_limit, exact=exact))
    return y.copy_(block_scaled_matmul(activated, scales, down, down_scale_inv, exact=exact))


def _launch(inputs: FeedForwardInputs, gate_up: torch.Tensor | None = None) -> torch.Tensor:
    """`feed_forward` on a Hopper GPU: three kernels on the current stream; nothing waits for them.

    Each starts while the one before it ends, and loads weights meanwhile, as in linear.py.
    """
    y = _allocate(inputs)
    x, gate, gate_scale_inv, up, up_scale_inv, down, down_scale_inv, *_ = inputs
    swiglu_limit, batch_invariant = inputs.swiglu_limit, inputs.batch_invariant
    (num_tokens, _), size = x.shape, gate.shape[0]
    if y.numel() == 0 or size == 0:
        return y.zero_()
    # Copies come before our kernels. The kernel knows only the address of up: up lies as gate does.
    fitting_gate = fitting(gate)
    fitting_up = lying_as(fitting_gate, up)
    if gate_scale_inv.stride() != up_scale_inv.stride():  # one may be a single number, expanded
        gate_scale_inv, up_scale_inv = gate_scale_inv.contiguous(), up_scale_inv.contiguous()
    data, scale_inv = launch_quantize_1x128(x, False)
    activated = x.new_empty(num_tokens, round_up(size, 16), dtype=E4M3)[:, :size]
    scales = empty_tma_aligned((num_tokens, num_blocks(size)), x.device)
    operands = Operands(fitting(data), scale_inv, fitting_gate, gate_scale_inv, activated)
    _launch_gate_up(operands, fitting_up, up_scale_inv, scales, swiglu_limit, gate_up)
    of_down = DenseInputs(activated, scales, down, down_scale_inv, y, None, batch_invariant)
    launch_dense(of_down, programmatic=True)
    return y


def _launch_gate_up(
    operands: Operands,
    up: torch.Tensor,
    up_scale_inv: torch.Tensor,
    scales: torch.Tensor,
    swiglu_limit: float | None,
    gate_up: torch.Tensor | None,
) -> None:
    """Write SwiGLU of the GEMMs of gate, in operands, and up, lying alike, into d and scales."""
    driver, saves = current_driver(), gate_up is not None
    tensors = (*operands, up, up_scale_inv, scales)
    limit = math.inf if swiglu_limit is None else swiglu_limit
    key = ("gate_up", tuple([layout_of(x) for x in operands]), limit, saves, driver.max_sms)
    launch = prepared(
        key, lambda: _prepare_gate_up(operands, (up, up_scale_inv), scales, limit, saves)
    )
    saved = 0 if gate_up is None else gate_up.data_ptr()
    addresses = *(x.data_ptr() for x in tensors), saved
    launch.on(operands.a.get_device(), addresses)


_INPUTS = (
    *("x", "x_scales", "gate", "gate_scales", "activated", "up", "up_scales"),
    *("activated_scales", "saved"),
)
_WEIGHTS = frozenset(_INPUTS[2:4] + _INPUTS[5:7])


def _prepare_gate_up(
    operands: Operands,
    up: tuple[torch.Tensor, torch.Tensor],
    scales: torch.Tensor,
    limit: float,
    saves: bool,
) -> Launch:
    """The grouped GEMM of a single group that has all tokens, and needs no bounds."""
    (m, h), i = operands.a.shape, operands.b.shape[0]
    check_sizes(_OP, m, i, h)
    device_index = operands.a.get_device()
    r = Record(target_of(device_index), _INPUTS, older=_WEIGHTS)
    config = replace(gate_up_config(r.target.configs, m, h, i), saves_gate_up=saves)
    tiles = config.token_tiles(m)
    describe_gemm(
        r,
        config,
        Codes.of(operands.a, operands.a_scale_inv, "x").batched(),
        Codes.of(operands.b, operands.b_scale_inv, "gate").batched(),
        Tensor.of(operands.d, "activated").batched(),
        m,
        groups=GroupsOfTokens(GroupLayout.OFFSETS, None, 1, 1, tiles, bounds_ready=True),
        gate_up=GateUp(
            Codes.of(*up, "up").batched(),
            limit,
            Tensor.of(scales, "activated_scales").batched(),
            Place("saved") if saves else None,
        ),
    )
    return prepare_launch(r, device_index)


feed_forward = register_inputs(
    _OP, FeedForwardInputs, "Tensor", cpu=_body, fake=_allocate, hopper=_launch
)
"""`FeedForwardInputs` -> bf16 [T, H]. Raises TypeError, ValueError, naming the argument, the rule
and what came."""


# ---- What a backward needs ----

Saving = tuple[torch.Tensor, torch.Tensor]  # the result, gate_up


def _empty_gate_up(inputs: FeedForwardInputs) -> torch.Tensor:
    return empty_gate_up(inputs.gate, inputs.x.shape[0], inputs.gate.shape[0])


def _allocate_saving(inputs: FeedForwardInputs) -> Saving:
    return _allocate(inputs), _empty_gate_up(inputs)


def _body_saving(inputs: FeedForwardInputs) -> Saving:
    _allocate(inputs)
    gate_up = _empty_gate_up(inputs)
    return _body(inputs, gate_up), gate_up


def _launch_saving(inputs: FeedForwardInputs) -> Saving:
    _allocate(inputs)
    gate_up = _empty_gate_up(inputs)
    return _launch(inputs, gate_up), gate_up


feed_forward_saving = register_inputs(
    "feed_forward_saving",
    FeedForwardInputs,
    "(Tensor, Tensor)",
    cpu=_body_saving,
    fake=_allocate_saving,
    hopper=_launch_saving,
)
"""`feed_forward`, the same to the bit, and what `feed_forward_backward` takes: gate and up of each
token, as they are before SwiGLU, rounded to BF16: [T, 2, I]."""
