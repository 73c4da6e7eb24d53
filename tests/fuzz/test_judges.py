"""What judges the fuzz tests: it takes what tensor cores give, and refuses what is wrong."""

import pytest
import torch

from moefp8.functional import experts as op_room
from moefp8.functional.experts import experts
from moefp8.kernels.common.activation import SWIGLU, Activation
from moefp8.kernels.gemm import dense as gemm
from moefp8.quant.quantize import quantize_1x128
from tests import naive
from tests.fuzz import cases as fuzz
from tests.fuzz import judges
from tests.fuzz import layers as fuzz_layers
from tests.fuzz.judges import check, side
from tests.kernels.gemm.cases import NAN

M, N, K = 60, 150, 300


# ---- What tensor cores give ----


def exponent(x: torch.Tensor) -> torch.Tensor:
    """The exponent of x, 0 for 1.0 and very low for zeros."""
    return torch.where(x == 0, -1000, torch.frexp(x).exponent - 1).double()


def cut_off(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return (x / unit).trunc() * unit


def sums_of_14_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """FP64 [M, N] of [M, 128] and [N, 128]: 32 products and the sum so far are added at a time.

    Each loses what lies more than 13 bits below the exponent of the largest.
    """
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    for x, y in zip(a[:, None].split(32, 2), b[None].split(32, 2), strict=True):
        largest = torch.maximum((exponent(x) + exponent(y)).amax(2), exponent(total))
        unit = torch.exp2(largest - 13)
        total = cut_off(x * y, unit[..., None]).sum(2) + cut_off(total, unit)
        total = cut_off(total, torch.exp2(exponent(total) - 13))
    return total


KINDS = "ordinary", "positive", "sparse", "finite", "one large", "all alike"


def codes(kind: str, rows: int) -> torch.Tensor:
    """[rows, 128]; also what is worst: a large product before many small ones, all of one sign."""
    if kind == "one large":
        return torch.cat([torch.full((rows, 1), 448.0), torch.rand(rows, 127) * 4], 1).to(fuzz.E4M3)
    if kind == "all alike":
        return torch.rand(rows, 128).mul(448).to(fuzz.E4M3)
    return fuzz.codes(kind, rows, 128)


@pytest.mark.parametrize("of_b", KINDS)
@pytest.mark.parametrize("of_a", KINDS)
def test_sums_of_14_bits_are_within_bounds(of_a, of_b):
    a, b = codes(of_a, 150), codes(of_b, 100)
    judged = judges.products(side(a, torch.ones(150, 1), 1), side(b, torch.ones(1, 1), 128))
    sums = sums_of_14_bits(naive.decode(a), naive.decode(b))
    check(sums, judged)
    assert float(((sums - judged.value).abs() / judged.error).nan_to_num(0.0).max()) < 0.8


# ---- What is wrong ----


def operands(a_scales: str = "ordinary") -> list[torch.Tensor]:
    torch.manual_seed(0)
    a, a_scales = fuzz.codes("ordinary", M, K), fuzz.scales(a_scales, M, 3)
    return [a, a_scales, fuzz.codes("ordinary", N, K), fuzz.scales("ordinary", 2, 3)]


def judged_gemm(a, a_scale_inv, b, b_scale_inv) -> judges.Judged:
    return judges.rounded(judges.products(side(a, a_scale_inv, 1), side(b, b_scale_inv, 128)))


def computed(made: list[torch.Tensor]) -> torch.Tensor:
    return gemm.block_scaled_matmul(*made).bfloat16()


def changed(x: torch.Tensor, row: int, column: int, value: float) -> torch.Tensor:
    """A copy with another number in one place, or with another code if it is FP8."""
    copy = x.clone()
    (copy.view(torch.uint8) if x.dtype == fuzz.E4M3 else copy)[row, column] = value
    return copy


WRONG_RESULTS = {
    "zeros": torch.zeros_like,
    "NaN": lambda d: torch.full_like(d, NAN),
    "a row lost": lambda d: d.index_fill(0, torch.tensor([M - 1]), 0.0),
    "rows swapped": lambda d: d[[1, 0, *range(2, M)]],
    "rows shifted": lambda d: d.roll(1, 0),
    "columns swapped": lambda d: d[:, [*range(N - 2), N - 1, N - 2]],
    "twice": lambda d: d * 2,
    "the sign": torch.neg,
    "an infinity": lambda d: torch.where(torch.arange(M * N).view(M, N) == 77, torch.inf, d),
    "the last columns": lambda d: torch.cat([d[:, : N - 6], d[:, N - 12 : N - 6]], 1),
}
WRONG_OPERANDS = {
    "a k-block lost": (1, lambda x: x.index_fill(1, torch.tensor([2]), 0.0)),
    "a scale of another row": (1, lambda x: x.roll(1, 0)),
    "a scale of another block": (3, lambda x: x.roll(1, 1)),
    "a weight scale twice": (3, lambda x: changed(x, 1, 1, float(x[1, 1]) * 2)),
    "NaN that was not there": (0, lambda x: changed(x, 3, 299, 0xFF)),
    "rows of weights": (2, lambda x: x.view(torch.uint8).roll(1, 0).view(x.dtype)),
}


@pytest.mark.parametrize("wrong", WRONG_RESULTS)
def test_wrong_results_are_refused(wrong):
    made = operands()
    d, expected = computed(made), judged_gemm(*made)
    check(d, expected)
    with pytest.raises(AssertionError):
        check(WRONG_RESULTS[wrong](d), expected)


@pytest.mark.parametrize("wrong", WRONG_OPERANDS)
def test_results_of_wrong_operands_are_refused(wrong):
    made, (at, change) = operands(), WRONG_OPERANDS[wrong]
    expected = judged_gemm(*made)
    made[at] = change(made[at])
    with pytest.raises(AssertionError):
        check(computed(made), expected)


@pytest.mark.parametrize("odd", [NAN, torch.inf, -torch.inf, 3e38, "code"])
def test_what_is_not_finite_stays_in_its_row(odd):
    made = operands()
    if odd == "code":
        made[0] = changed(made[0], 5, 200, 0x7F)
    else:
        made[1] = changed(made[1], 5, 1, odd)
    if odd == 3e38:  # with weights' scales that are as large, products overflow
        made[3] = made[3] * 2.0**20
    d, expected = computed(made), judged_gemm(*made)
    check(d, expected)
    assert not d[5].isfinite().any()
    assert d[[*range(5), *range(6, M)]].isfinite().all()
    for row in (4, 6):  # a NaN is lost, or is in another row too
        with pytest.raises(AssertionError):
            check(d.index_copy(0, torch.tensor([5]), d[row : row + 1]), expected)
        with pytest.raises(AssertionError):
            check(d.index_copy(0, torch.tensor([row]), d[5:6]), expected)


def test_a_row_that_may_overflow_is_free_and_no_other():
    made = operands()
    made[0] = made[0].float().abs().to(fuzz.E4M3)
    made[2][::2] = made[2][::2].float().abs().to(fuzz.E4M3)
    made[1][7] = 3e38
    expected = judged_gemm(*made)
    check(computed(made), expected)
    assert bool((expected.free | expected.bad)[7].any())
    assert not (expected.free | expected.bad)[[*range(7), *range(8, M)]].any()


# ---- Experts ----

NOWHERE = 4


def layer() -> list[torch.Tensor]:
    """x, ids, top_k_weights; gate_up, its scales, down, its scales."""
    torch.manual_seed(1)
    x = fuzz.floats("ordinary", torch.bfloat16, 30, 256)
    ids = torch.rand(30, NOWHERE).argsort(1)[:, :2]
    ids[::7, 1] = NOWHERE
    kinds = "ordinary", "ordinary", "own", "own"
    weights = fuzz_layers.Weights(2, NOWHERE, 256, 200, *kinds).make_experts("cpu")
    return [x, ids, torch.rand(30, 2) + 0.5, *weights]


def judged_experts(x, ids, top_k_weights, *weights, limit=None) -> judges.Judged:
    rows = side(*quantize_1x128(x, False), 1)
    return judges.experts(rows, ids, top_k_weights, weights[:2], weights[2:], limit)


def halves_swapped(gate_up: torch.Tensor) -> torch.Tensor:
    return torch.cat(gate_up.view(torch.uint8).chunk(2, 1)[::-1], 1).view(gate_up.dtype)


WRONG_LAYERS = {
    "another token": (0, lambda x: x.roll(1, 0)),
    "a NaN": (0, lambda x: x.index_fill(0, torch.tensor([3]), NAN)),
    "another expert": (1, lambda x: torch.where(x == 2, 1, x)),
    "a choice lost": (1, lambda x: x.index_fill(1, torch.tensor([1]), NOWHERE)),
    "weights in turn": (2, lambda x: x.flip(1) * 2),
    "gate and up swapped": (3, halves_swapped),
    "a scale of gate": (4, lambda x: x.roll(1, 1)),
    "a scale of down": (6, lambda x: x * torch.tensor([1.0, 4.0])[:, None]),
}


@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize("wrong", WRONG_LAYERS)
def test_wrong_experts_are_refused(wrong, limit):
    made, (at, change) = layer(), WRONG_LAYERS[wrong]
    expected = judged_experts(*made, limit=limit)
    check(experts(*made, Activation(limit=limit), False), expected)
    made[at] = change(made[at])
    with pytest.raises(AssertionError):
        check(experts(*made, Activation(limit=limit), False), expected)


def test_a_limit_that_is_forgotten_is_noticed():
    made = layer()
    with pytest.raises(AssertionError):
        check(experts(*made, SWIGLU, False), judged_experts(*made, limit=0.5))


def test_an_activation_without_its_sigmoid_is_noticed(monkeypatch):
    made = layer()
    monkeypatch.setattr(op_room, "activate", lambda gate, up, activation, **_: gate * up)
    with pytest.raises(AssertionError):
        check(experts(*made, SWIGLU, False), judged_experts(*made))
