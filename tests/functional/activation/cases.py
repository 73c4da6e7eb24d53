"""Inputs of `activation_backward.cu`, the buffers that it fills, and what these must hold."""

from typing import NamedTuple

import torch

from moefp8.functional.activation import describe_activation_backward, empty_gate_up
from moefp8.kernels import BLOCK, empty_tma_aligned, num_blocks, round_up
from moefp8.kernels.common.activation import KINDS, Activation
from moefp8.kernels.common.blocks import E4M3, MIN_GRADIENT_AMAX
from moefp8.kernels.program import Codes, Place, Record, layouts
from moefp8.quant import BlockScaled, dequantize
from moefp8.quant.numerics import quantize_1x128, quantize_128x128
from tests import naive, records
from tests.routing.cases import POISON, ids_of, plan_of, poisoned

# Name -> T, k, I, whether rows have choices of their own, and what `ids_of` knows.
CASES = {
    "one block": (3, 2, 128, True, "distinct"),
    "two warps, the second half empty": (2, 3, 384, True, "distinct"),
    "a CTA goes round": (2, 1, 2176, True, "distinct"),
    "multiples of 8": (4, 2, 200, True, "out of range"),
    "odd": (5, 3, 257, True, "out of range"),
    "a single element": (2, 2, 1, True, "distinct"),
    "rows that choices share": (6, 5, 136, False, "repeated"),
    "more choices than lanes": (2, 40, 24, False, "repeated"),
    "nowhere": (2, 2, 136, True, "nowhere"),
}
NUM_EXPERTS = 4


ACTIVATIONS = [
    Activation(kind, limit, 1.3 if kind == "gpt_oss" else None)
    for kind in KINDS
    for limit in (None, 0.5)
]


class Made(NamedTuple):
    """What the kernel reads.

    grad: bf16 [R, I]. saved: bf16 [R, 2, I], or codes [2 R, I] with scales.
    token_to_row, weights: [T, k], or None: each row has a token, and no weight.
    """

    grad: torch.Tensor
    saved: torch.Tensor
    saved_scales: torch.Tensor | None
    token_to_row: torch.Tensor | None
    weights: torch.Tensor | None
    activation: Activation


class Found(NamedTuple):
    """What it writes, in poisoned memory; the last two have more behind them."""

    rows: torch.Tensor  # uint8 [R, 2 padded I]
    row_scales: torch.Tensor  # [2 padded I / 128, pitch]
    of_weights: torch.Tensor
    is_first: torch.Tensor


def make(
    name: str, weights_dtype: torch.dtype, fp8: bool, activation: Activation, device="cpu"
) -> Made:
    """Rows of no choice, and what lies behind rows, are NaN. Some elements are at the limit."""
    num_tokens, top_k, size, own_rows, kind = CASES[name]
    ids = ids_of(kind, num_tokens, top_k, NUM_EXPERTS)
    plan = plan_of(ids, NUM_EXPERTS, None if own_rows else num_tokens)
    num_rows, has_token = len(plan.row_to_token), plan.row_to_token >= 0
    gate_up = torch.randn(num_rows, 2, size) * torch.exp2(torch.randint(-2, 4, (num_rows, 1, 1)))
    if activation.limit is not None:
        gate_up[..., ::7] = gate_up[..., ::7].sign() * activation.limit
    grad = torch.randn(num_rows, size) * torch.exp2(torch.randint(-30, -20, (num_rows, 1)))
    gate_up, grad = gate_up.bfloat16(), grad.bfloat16()
    scales = None
    if fp8:
        saved, scales = quantize_1x128(gate_up.flatten(0, 1))
        saved = saved.view(torch.uint8)
        saved.view(num_rows, 2, size)[~has_token] = POISON
        saved = saved.view(E4M3).to(device)
        scales = empty_tma_aligned(scales.shape, torch.device(device)).copy_(scales)
    else:
        gate_up[~has_token] = torch.nan
        saved = in_padded_rows(empty_gate_up(gate_up.to(device), num_rows, size), gate_up)
    grad[~has_token] = torch.nan
    pitch = round_up(size, 8)
    grad = in_padded_rows(torch.empty(num_rows, pitch).bfloat16().to(device)[:, :size], grad)
    weights = (torch.rand(num_tokens, 2 * top_k) + 0.1).to(weights_dtype).to(device)[:, ::2]
    return Made(grad, saved, scales, plan.token_to_row.to(device), weights, activation)


def in_padded_rows(memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x in memory whose rows have NaN behind them."""
    whole = memory.as_strided((memory[..., 0].numel(), memory.stride(-2)), (memory.stride(-2), 1))
    whole.fill_(torch.nan)
    return memory.copy_(x)


def run(made: Made) -> Found:
    """Launch the kernel."""
    num_rows, size = made.grad.shape
    padded, device = round_up(size, BLOCK), made.grad.device
    pitch, num_choices = round_up(num_rows, 4) + 4, 0
    if made.token_to_row is not None:
        num_choices = made.token_to_row.numel()
    found = Found(
        poisoned((num_rows, 2 * padded), torch.uint8, device),
        poisoned((2 * num_blocks(size), pitch), torch.float32, device),
        *(poisoned((num_choices + 8,), torch.float32, device) for _ in range(2)),
    )
    grad, saved, saved_scales, token_to_row, weights, activation = made
    inputs = {"grad": grad, "saved": saved, "saved_scales": saved_scales, "weights": weights}
    of_choices = {}
    if token_to_row is not None:
        of_choices = {"token_to_row": token_to_row, "grad_weights": found.of_weights}
        of_choices["is_first"] = found.is_first

    def describe(r: Record) -> None:
        describe_activation_backward(
            r,
            **layouts(**inputs),
            rows=Codes.of(found.rows, found.row_scales.T, "rows"),
            activation=activation,
            **{name: Place(name) for name in of_choices},
        )

    records.run(describe, **inputs, **of_choices, rows=found.rows, rows_scales=found.row_scales)
    return found


def check(made: Made, found: Found) -> None:
    """Rows of choices against FP64; nothing else is written."""
    num_rows, size = made.grad.shape
    padded, rows = round_up(size, BLOCK), torch.arange(num_rows)
    weights, grad = torch.ones(num_rows).double(), made.grad.cpu().double()
    gate_up = made.saved.cpu()
    if made.saved_scales is not None:
        gate_up = dequantize(BlockScaled(gate_up, made.saved_scales.cpu()))
    gate, up = gate_up.view(num_rows, 2, size).double().unbind(1)
    if made.token_to_row is not None:
        token_to_row, of_choices = made.token_to_row.cpu().long(), made.weights.cpu().double()
        rows = token_to_row[token_to_row >= 0].unique()
        at = token_to_row.flatten()
        weights = torch.stack([of_choices.flatten()[at == row].sum() for row in range(num_rows)])
        activated = naive.activate(gate, up, made.activation)
        slack = grad * slack_of(gate, up, made.activation)
        check_choices(found, token_to_row, grad * activated, slack)
    sizes = sizes_of_terms(gate, up, made.activation)
    for i, of_half in enumerate(differentiated(gate, up, made.activation)):
        right, size_of_terms = ((weights[:, None] * grad * x)[rows] for x in (of_half, sizes[i]))
        codes = found.rows.cpu()[rows, i * padded : (i + 1) * padded]
        scales = found.row_scales.cpu().T[rows]
        assert not codes[:, size:].any()
        blocks = scales[:, i * num_blocks(size) : (i + 1) * num_blocks(size)]
        check_quantized(codes[:, :size], blocks, right, size_of_terms.abs())
    is_other = torch.ones(num_rows, dtype=torch.bool).index_fill(0, rows, False)
    assert (found.rows.cpu()[is_other] == POISON).all()
    untouched = poisoned((1,), torch.float32, "cpu").view(torch.int32)
    scales = found.row_scales.cpu().view(torch.int32)
    assert (scales[:, :num_rows][:, is_other] == untouched).all()
    assert (scales[:, num_rows:] == untouched).all()


def check_choices(found: Found, token_to_row, products, slack) -> None:
    num_choices, has_row = token_to_row.numel(), token_to_row >= 0
    untouched = poisoned((1,), torch.float32, "cpu").view(torch.int32)
    of_weights, is_first = (x.cpu() for x in found[2:])
    for x in (of_weights, is_first):
        assert (x[num_choices:].view(torch.int32) == untouched).all()
    told = [
        [float(row >= 0 and own.index(row) == i) for i, row in enumerate(own)]
        for own in token_to_row.tolist()
    ]
    assert is_first[:num_choices].view_as(token_to_row).tolist() == told
    terms, slack = (x[token_to_row.clamp(min=0)] for x in (products, slack))
    right, of_choices = terms.sum(-1), of_weights[:num_choices].view_as(token_to_row)
    close = (of_choices - right).abs() <= (1e-5 * terms.abs() + slack.abs()).sum(-1)
    assert close[has_row].all()
    assert (of_choices[~has_row] == 0).all()


def check_quantized(
    codes: torch.Tensor,
    scales: torch.Tensor,
    right: torch.Tensor,
    sizes: torch.Tensor,
    block_rows: int = 1,
) -> None:
    """One code in a hundred may be the next one: formulas are approximate.

    sizes: what the terms of each element, whose sum may be near zero, are in absolute value.
    block_rows: how many rows share a scale, 1 or 128.
    """
    quantize = quantize_1x128 if block_rows == 1 else quantize_128x128
    expected, expected_scales = quantize(right.float(), min_amax=MIN_GRADIENT_AMAX)
    inexact = 1e-5 * quantize(sizes.float(), min_amax=MIN_GRADIENT_AMAX)[1]
    assert scales.shape == expected_scales.shape
    assert ((scales - expected_scales).abs() <= inexact).all()
    values = naive.values(codes.view(E4M3), scales, block_rows)
    of_rows = scales.double().repeat_interleave(block_rows, 0)[: len(right)]
    of_elements = of_rows.repeat_interleave(BLOCK, 1)[:, : right.shape[1]]
    error = ((values - right).abs() - 1e-5 * sizes) / of_elements
    half_a_step = (values / of_elements).abs() * 2.0**-4
    assert bool((error <= half_a_step * 1.01 + 2.0**-10).all())
    differ = (codes != expected.view(torch.uint8)) & (codes & 0x7F != 0)
    # What is as small as the error of a formula alone has other codes.
    is_exact = (inexact <= 1e-4 * expected_scales).repeat_interleave(block_rows, 0)[: len(right)]
    differ &= is_exact.repeat_interleave(BLOCK, 1)[:, : right.shape[1]]
    assert int(differ.sum()) <= 1 + codes.numel() // 100


def differentiated(
    gate: torch.Tensor, up: torch.Tensor, activation: Activation
) -> list[torch.Tensor]:
    """fp64: the derivatives of `activate` in gate and up, by PyTorch's own formulas."""
    leaves = [x.clone().requires_grad_() for x in (gate, up)]
    y = naive.activate(*leaves, activation)
    return list(torch.autograd.grad(y.sum(), leaves))


def slack_of(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """How far the activated values may be off, beside the rounding of what they are.

    GELUs of negative gates are small, where the error of the fitted polynomial counts as a part of
    the gate; and numbers below those of FP32 become 0.
    """
    part = 2e-7 if activation.kind == "geglu" else 0.0
    return part * (gate * up).abs() + 1e-36


def sizes_of_terms(
    gate: torch.Tensor, up: torch.Tensor, activation: Activation
) -> list[torch.Tensor]:
    """fp64: bounds of the same, of gates and ups whose terms all have one sign.

    The slope of silu has a zero near -1.28, where rounding is all that is left of its terms. Those
    of GELUs have one near -0.75, and their approximations may be off by some 1e-6 of a gate.
    """
    if activation.kind == "swiglu":
        sigmoid = gate.sigmoid()
        return [up * sigmoid * (1 + gate.abs() * (1 - sigmoid)), gate * sigmoid]
    factor = up.abs() + (activation.kind == "gpt_oss")
    return [factor * 2, gate.abs()]
