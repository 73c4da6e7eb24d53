"""What results may be, in FP64: for each element a value, how far from it, and what is not finite.

Bounds hold for every device: for FP32 sums in any order, for the tensor cores' sums of some 14
bits, and for activations that another sum rounds to another code. Where FP32 may overflow on the
way, a result may be infinite, or anything; its neighbours must not notice. T tokens, H hidden, I
intermediate.
"""

import math
from dataclasses import dataclass, replace

import torch

from tests import naive

_MAX = torch.finfo(torch.float32).max
_MAX_BF16 = torch.finfo(torch.bfloat16).max
# Relative errors of a block of 128 of K. Tensor cores cut terms off 13 bits below the largest of 32
# terms and their sum so far: the error grows with that term, and if signs are equal, with the sum.
# A model of them reaches half of this bound: `test_sums_of_14_bits_are_within_bounds`.
_OF_TERMS, _OF_LARGEST = 2.0**-10, 2.0**-6


@dataclass(frozen=True)
class Judged:
    """Results [...]: bad ones are not finite, nan ones NaN, free ones may be anything."""

    value: torch.Tensor
    error: torch.Tensor
    nan: torch.Tensor
    bad: torch.Tensor
    free: torch.Tensor

    def rows(self, index: torch.Tensor) -> "Judged":
        return Judged(*(x[index] for x in vars(self).values()))


@dataclass(frozen=True)
class Side:
    """Rows of an operand, dequantized, and how far from it they may be.

    scales: fp32 [R, K/128]. nan, bad, free: what all results of a row are.
    """

    values: torch.Tensor
    scales: torch.Tensor
    nan: torch.Tensor
    bad: torch.Tensor
    free: torch.Tensor
    error: torch.Tensor | None = None

    def rows(self, index: torch.Tensor) -> "Side":
        assert self.error is None
        return Side(*(x[index] for x in list(vars(self).values())[:-1]))


def side(data: torch.Tensor, scale_inv: torch.Tensor, block_rows: int) -> Side:
    """A scale stands for 128 columns of `block_rows` rows, 1 or 128."""
    rows, k = data.shape
    decoded = naive.decode(data)
    scales = scale_inv[torch.arange(rows, device=data.device) // block_rows]
    nan = decoded.isnan().any(1) | scales.isnan().any(1)
    finite = scales.double().nan_to_num(0.0, 0.0, 0.0)
    values = decoded.nan_to_num(0.0) * finite.repeat_interleave(128, 1)[:, :k]
    return Side(values, scales, nan, nan | ~scales.isfinite().all(1), torch.zeros_like(nan))


def products(a: Side, b: Side) -> Judged:
    """Products in FP32, [M, N], summed k-block by k-block as every kernel does."""
    value = a.values.new_zeros(a.values.shape[0], b.values.shape[0])
    error, size = torch.zeros_like(value), torch.zeros_like(value)
    nan, bad, free = (x[:, None] | y for x, y in ((a.nan, b.nan), (a.bad, b.bad), (a.free, b.free)))
    for block, scale in enumerate(a.scales.unbind(1)):
        columns = slice(block * 128, (block + 1) * 128)
        x, y, x_error = a.values[:, columns], b.values[:, columns].T, 0.0
        if a.error is not None:
            x_error = a.error[:, columns]
            error += x_error @ y.abs()
        terms = (x.abs() + x_error) @ y.abs()
        largest = ((x.abs() + x_error).square() @ y.square()).sqrt()  # at least the largest term
        value += x @ y
        error += _OF_TERMS * terms + _OF_LARGEST * largest
        error += 2.0**-124  # the product of both scales may be denormal
        size += terms
        overflows = (scale[:, None] * b.scales[:, block]).isinf()
        bad, free = (bad | overflows, free) if a.error is None else (bad, free | overflows)
    made = Judged(value, error.masked_fill(free, torch.inf), nan, bad, free)
    return _overflowing(made, size)


def _overflowing(
    made: Judged, size: torch.Tensor, surely_finite: float = _MAX, surely_not: float = _MAX
) -> Judged:
    """Mark as bad what overflows, and as free what may; sums on the way are at most `size`."""
    bad = made.bad | (made.value.abs() - made.error > surely_not)
    free = made.free | (size + made.error > surely_finite * (1 - 2**-10))
    return replace(made, bad=bad, free=free)


def plus_bias(made: Judged, bias: torch.Tensor | None) -> Judged:
    if bias is None:
        return made
    bias = bias.double()
    finite = bias.nan_to_num(0.0, 0.0, 0.0)
    return replace(
        made,
        value=made.value + finite,
        error=made.error + 2.0**-23 * finite.abs(),
        nan=made.nan | bias.isnan(),
        bad=made.bad | ~bias.isfinite(),
    )


def rounded(made: Judged) -> Judged:
    """`made`, rounded to BF16."""
    size = made.value.abs()
    made = _overflowing(made, size, _MAX_BF16, _MAX_BF16 * (1 + 2.0**-9))
    return replace(made, error=made.error * (1 + 2.0**-8) + size * 2.0**-8 + 2.0**-133)


def check(actual: torch.Tensor, expected: Judged) -> None:
    assert actual.shape == expected.value.shape
    actual, finite = actual.double(), actual.isfinite()
    close = (actual - expected.value).abs() <= expected.error
    right = torch.where(finite, close & ~expected.bad, expected.bad | expected.free)
    wrong = ~right | (expected.nan & ~actual.isnan())
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        told = {name: x[at].item() for name, x in vars(expected).items()}
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} are wrong, first {list(at)}: "
            f"{actual[at].item()}, expected {told}"
        )


# ---- Experts ----


def swiglu(gate: Judged, up: Judged, limit: float | None) -> Judged:
    """silu(gate) * up in FP32."""
    if limit is not None:
        gate, up = _clamped(gate, -torch.inf, limit), _clamped(up, -limit, limit)
    silu = gate.value * gate.value.sigmoid()
    # |silu'| < 1.1; exp(-gate) is off by some |gate| 2^-24 of it, and tiny sigmoids may be 0.
    silu_error = 1.1 * gate.error + silu.abs() * 2.0**-16 + gate.value.abs() * 2.0**-124
    value = silu * up.value
    error = silu_error * (up.value.abs() + up.error) + silu.abs() * up.error
    error = (error + value.abs() * 2.0**-22 + 2.0**-148).nan_to_num(torch.inf, torch.inf)
    made = Judged(value, error, gate.nan | up.nan, gate.bad | up.bad, gate.free | up.free)
    return _overflowing(made, value.abs())


def _clamped(made: Judged, low: float, high: float) -> Judged:
    """An infinity becomes either limit, so anything is allowed there."""
    free = made.free | made.bad
    error = made.error.masked_fill(free, torch.inf)
    return Judged(made.value.clamp(low, high), error, made.nan, made.nan, free)


def quantized(made: Judged) -> Side:
    """FP32 [T, I] in E4M3; codes lie between those of the least and of the largest numbers."""
    columns = made.value.shape[1]
    bad, free = made.bad.any(1), made.free.any(1)  # an infinity has the code of NaN
    spoilt = (bad | free)[:, None]
    value, error = (x.masked_fill(spoilt, 0.0) for x in (made.value, made.error))
    error = error + value.abs() * 2.0**-20
    scales = [_scales(x, columns) for x in ((value.abs() - error), (value.abs() + error))]
    scales = [scales[0] * (1 - 2.0**-20), scales[1] * (1 + 2.0**-20)]
    wide = [x.repeat_interleave(128, 1)[:, :columns] for x in scales]
    ends = [_e4m3(x / s) for x in (value - error, value + error) for s in wide]
    low, high = torch.stack(ends).amin(0), torch.stack(ends).amax(0)
    numbers = torch.stack([x * s for x in (low, high) for s in wide])
    low, high = numbers.amin(0), numbers.amax(0)
    return Side((low + high) / 2, scales[1].float(), bad, bad, free, (high - low) / 2)


def _scales(magnitudes: torch.Tensor, columns: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(magnitudes, (0, -columns % 128))
    blocks = padded.unflatten(1, (math.ceil(columns / 128), 128))
    return blocks.amax(2).clamp(min=1e-4) / 448


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 number, ties to even."""
    x = x.clamp(-448, 448)
    step = torch.exp2((torch.frexp(x).exponent - 1).clamp(min=-6).double() - 3)
    return (x / step).round() * step


def feed_forward(x: Side, gate: Side, up: Side, down: Side, limit: float | None) -> Judged:
    """The result in BF16, [T, H]."""
    activated = swiglu(products(x, gate), products(x, up), limit)
    return rounded(products(quantized(activated), down))


def experts(
    x: Side,
    ids: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    limit: float | None,
) -> Judged:
    """The result in BF16, [T, H]. gate_up and down are codes and scales of all experts."""
    num_experts, hidden_size, size = down[0].shape
    value = x.values.new_zeros(*ids.shape, hidden_size)
    no = torch.zeros_like(value, dtype=torch.bool)
    made = Judged(value, torch.zeros_like(value), no, no.clone(), no.clone())
    for expert in range(num_experts):
        chosen = torch.where(ids == expert)
        halves = (x[expert].tensor_split(2) for x in gate_up)
        gate, up = (side(*half, 128) for half in zip(*halves, strict=True))
        of_down = side(down[0][expert], down[1][expert], 128)
        one = feed_forward(x.rows(chosen[0]), gate, up, of_down, limit)
        for name, rows in vars(made).items():
            rows[chosen] = getattr(one, name)
    # Where experts have no size, not even a top_k_weight of NaN counts.
    is_here = ((ids >= 0) & (ids < num_experts) & (size > 0))[..., None]
    return _combined(made, top_k_weights[..., None].double(), is_here)


def _combined(made: Judged, weights: torch.Tensor, is_here: torch.Tensor) -> Judged:
    """The sum over k, rounded; made [T, k, H], weights and is_here [T, k, 1]."""
    finite = weights.nan_to_num(0.0, 0.0, 0.0).masked_fill(~is_here, 0.0)
    error = (finite.abs() * made.error).nan_to_num(torch.inf, torch.inf).masked_fill(~is_here, 0.0)
    value = finite * made.value
    size, error = value.abs().sum(1), error.sum(1)
    nan = (made.nan | (weights.isnan() & is_here)).any(1)
    bad = (made.bad | (~weights.isfinite() & is_here)).any(1)
    summed = Judged(value.sum(1), error + size * 2.0**-18, nan, bad, made.free.any(1))
    return rounded(_overflowing(summed, size + error))
