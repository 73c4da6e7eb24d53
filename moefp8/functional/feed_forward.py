"""A gated feed-forward that every token takes: `down(f(gate(x)) * up(x))`.

T tokens, H hidden, I intermediate.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..kernels.common.activation import SWIGLU, Activation, check_activation
from ..kernels.common.blocks import E4M3
from ..kernels.common.checks import (
    FLOATS,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.prepared import Launches, layout_of, prepared
from ..kernels.common.tma_operands import fits, fitting, with_strides_of
from ..kernels.gemm.dense import block_scaled_matmul
from ..kernels.gemm.interface import GateUp, GroupLayout, GroupsOfTokens
from ..kernels.gemm.operands import check_sizes
from ..kernels.jit import Kernel, current_driver
from ..kernels.program import (
    Codes,
    Place,
    Record,
    Span,
    Target,
    Tensor,
    kernels_at_any_address,
    prepare_launches,
)
from ..kernels.registry import register_inputs
from ..kernels.targets import target_of
from ..quant.numerics import quantize_1x128
from ..quant.quantize import describe_quantize
from ..quant.weight_format import check_weight_scales, tile_scales
from .activation import activate, empty_gate_up

_OP = "feed_forward"


class FeedForwardInputs(NamedTuple):
    """The inputs of `feed_forward`.

    x: [T, H] bf16, fp16 or fp32, quantized to 1x128; so are the activated values.
    gate, up: e4m3 [I, H]. down: e4m3 [H, I]. Each has fp32 scales, in any of `FORMATS`.
    batch_invariant: a row of the result has the same bits whatever T is, see `fp8_gemm_nt`.
    """

    x: torch.Tensor
    gate: torch.Tensor
    gate_scale_inv: torch.Tensor
    up: torch.Tensor
    up_scale_inv: torch.Tensor
    down: torch.Tensor
    down_scale_inv: torch.Tensor
    activation: Activation
    batch_invariant: bool = False


def _allocate(inputs: FeedForwardInputs) -> torch.Tensor:
    """Check, then allocate the result; this is also the fake body."""
    x, gate, gate_scale_inv, up, up_scale_inv, down, down_scale_inv, activation, _ = inputs
    check_tensor(_OP, "x", x, FLOATS, 2)
    weights = {"gate": (gate, gate_scale_inv), "up": (up, up_scale_inv)}
    weights["down"] = (down, down_scale_inv)
    h, i = x.shape[1], gate.shape[0]
    for name, (data, scale_inv) in weights.items():
        check_same_device(_OP, x=x, **{name: data, f"{name}_scale_inv": scale_inv})
        check_tensor(_OP, name, data, (E4M3,), 2)
        shape, axes = ([h, i], "H I") if name == "down" else ([i, h], "I H")
        check_shape(_OP, name, data, shape, f"[{axes.replace(' ', ', ')}]")
        check_weight_scales(_OP, f"{name}_scale_inv", scale_inv, data, axes)
        check_rows_contiguous(_OP, name, data)
    check_activation(_OP, activation)
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _body(inputs: FeedForwardInputs, gate_up: torch.Tensor | None = None) -> torch.Tensor:
    y = _allocate(inputs)
    x, gate, gate_scale_inv, up, up_scale_inv, down, down_scale_inv, activation, exact = inputs
    rows = quantize_1x128(x)
    gated, ungated = (
        block_scaled_matmul(*rows, weight, tile_scales(weight, scales), exact=exact)
        for weight, scales in ((gate, gate_scale_inv), (up, up_scale_inv))
    )
    if gate_up is not None:
        gate_up[:, 0], gate_up[:, 1] = gated, ungated
    activated = quantize_1x128(activate(gated, ungated, activation, exact=exact))
    scales = tile_scales(down, down_scale_inv)
    return y.copy_(block_scaled_matmul(*activated, down, scales, exact=exact))


_INPUTS = (
    *("x", "gate", "gate_scales", "up", "up_scales", "down", "down_scales"),
    *("y", "saved"),
)


def _launch(inputs: FeedForwardInputs, gate_up: torch.Tensor | None = None) -> torch.Tensor:
    """`feed_forward` on a Hopper GPU: three kernels on the current stream; nothing waits for them.

    Each starts before the previous one ends, and loads weights in the meantime, as in linear.py.
    """
    y = _allocate(inputs)
    if y.numel() == 0 or inputs.gate.shape[0] == 0:
        return y.zero_()
    return _launch_into(y, inputs, gate_up)


def _launch_into(
    y: torch.Tensor, inputs: FeedForwardInputs, gate_up: torch.Tensor | None
) -> torch.Tensor:
    """Write y [T, H], contiguous and not empty."""
    tensors, driver = inputs[:7], current_driver()
    key = (
        (_OP, *[layout_of(x) for x in tensors]),
        tuple([x.data_ptr() % 16 for x in (inputs.x, inputs.gate, inputs.up, inputs.down)]),
        (gate_up is None, inputs.activation, inputs.batch_invariant, driver.max_sms),
    )
    entry = prepared(key, lambda: _prepare(y, inputs, gate_up))
    if not entry.launches:
        return _launch_copies(y, inputs, gate_up)
    saved = 0 if gate_up is None else gate_up.data_ptr()
    entry(y.get_device(), (*[x.data_ptr() for x in (*tensors, y)], saved))
    return y


def _launch_copies(
    y: torch.Tensor, inputs: FeedForwardInputs, gate_up: torch.Tensor | None
) -> torch.Tensor:
    """Copy operands so that kernels can address them, H padded to a multiple of 16, then launch."""
    more = -inputs.x.shape[1] % 16
    gate, up = (fitting(pad(w, (0, more))) for w in (inputs.gate, inputs.up))
    scales: tuple[torch.Tensor, ...] = inputs.gate_scale_inv, inputs.up_scale_inv
    if scales[0].stride() != scales[1].stride():  # even contiguous single rows may differ
        scales = tuple([x.clone(memory_format=torch.contiguous_format) for x in scales])
    fit = inputs._replace(
        x=pad(inputs.x, (0, more)).contiguous(),
        gate=gate,
        gate_scale_inv=scales[0],
        up=with_strides_of(gate, up),
        up_scale_inv=scales[1],
        down=fitting(pad(inputs.down, (0, 0, 0, more))),
    )
    if not more:
        return _launch_into(y, fit, gate_up)
    return y.copy_(_launch_into(torch.empty_like(fit.x, dtype=y.dtype), fit, gate_up)[:, :-more])


def pad(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """`torch.nn.functional.pad` with zeros, also for e4m3; x itself if there is nothing to add."""
    if not any(sizes):
        return x
    if x.dtype != E4M3:
        return torch.nn.functional.pad(x, sizes)
    return torch.nn.functional.pad(x.view(torch.uint8), sizes).view(E4M3)


def _prepare(y: torch.Tensor, inputs: FeedForwardInputs, gate_up: torch.Tensor | None) -> Launches:
    """The launches of all kernels; none if operands must be copied."""
    x, gate, gate_scales, up, up_scales, down, down_scales, activation, batch_invariant = inputs
    are_alike = gate.stride() == up.stride() and gate_scales.stride() == up_scales.stride()
    can_address = all(map(fits, (gate, up, down)))
    if not (x.shape[1] % 16 == 0 and x.stride(1) == 1 and are_alike and can_address):
        return Launches((), 0)
    check_sizes(_OP, len(x), gate.shape[0], x.shape[1])
    device_index = x.get_device()
    r = Record(target_of(device_index), _INPUTS)
    describe_feed_forward(
        r,
        Tensor.of(x, "x"),
        Codes.of(gate, tile_scales(gate, gate_scales), "gate"),
        Codes.of(up, tile_scales(up, up_scales), "up"),
        Codes.of(down, tile_scales(down, down_scales), "down"),
        Tensor.of(y, "y"),
        activation=activation,
        saved=None if gate_up is None else Place("saved"),
        batch_invariant=batch_invariant,
    )
    return prepare_launches(r, device_index)


def describe_feed_forward(
    r: Record,
    x: Tensor,
    gate: Codes,
    up: Codes,
    down: Codes,
    y: Tensor,
    *,
    activation: Activation = SWIGLU,
    saved: Place | None = None,
    batch_invariant: bool = False,
) -> None:
    """Quantize x [T, H], multiply it by gate and up, activate and quantize, multiply by down.

    The GEMM of gate and up is the grouped one, with a single group that has all tokens and needs no
    bounds.

    Args:
        x: columns contiguous; 16 divides H.
        gate, up: codes [I, H] and scales, of one layout. down: [H, I]. TMA can address them.
        y: bf16 [T, H], contiguous.
        saved: memory for gate and up [T, 2, I], which a backward needs, or None.
    """
    (m, h), i, gemms = x.shape, gate.data.shape[0], r.target.gemms
    config = gemms.shared_gate_up(r, m, h, i, saves=saved is not None)
    rows, activated = r.codes("rows", (1, m, h)), r.codes("activated", (1, m, i))
    describe_quantize(r, x, rows.first(), None)
    gemms.describe(
        r,
        config,
        rows,
        gate.batched(),
        activated.data,
        m,
        groups=GroupsOfTokens(GroupLayout.OFFSETS, None, 1, 1, m, bounds_ready=True),
        gate_up=GateUp(up.batched(), activation, activated.scale_inv, saved),
    )
    gemms.dense(r, activated.first(), down, y, batch_invariant=batch_invariant)


def feed_forward_kernels(
    target: Target,
    most_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    *,
    activation: Activation = SWIGLU,
    saves: bool,
    batch_invariant: bool = False,
) -> Iterator[Kernel]:
    """The kernels for up to `most_tokens` tokens of that dtype, at any address.

    saves: for `feed_forward_saving`.
    """
    h, i = hidden_size, intermediate_size

    def describe(span: Span, alignment: int) -> Record:
        r = Record(target, _INPUTS, span=span)
        describe_feed_forward(
            r,
            Tensor.contiguous("x", span.first, h, dtype=dtype, alignment=alignment),
            Codes.contiguous("gate", i, h),
            Codes.contiguous("up", i, h),
            Codes.contiguous("down", h, i),
            Tensor.contiguous("y", span.first, h),
            activation=activation,
            saved=Place("saved") if saves else None,
            batch_invariant=batch_invariant,
        )
        return r

    return kernels_at_any_address(describe, most_tokens, dtype.itemsize)


feed_forward = register_inputs(
    _OP, FeedForwardInputs, "Tensor", reference=_body, fake=_allocate, kernels=_launch
)
"""`FeedForwardInputs` -> bf16 [T, H]. Raises TypeError, ValueError, naming the argument, the rule
and the value."""


# ---- Saving for a backward ----

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
    reference=_body_saving,
    fake=_allocate_saving,
    kernels=_launch_saving,
)
"""`feed_forward`, bit for bit, and for `feed_forward_backward` gate and up of each token before
the activation, rounded to BF16: [T, 2, I]."""
