"""Every op with numbers of every bit pattern, wherever they lie: `make fuzz` draws many of them.

On the CPU they are compared with slow references, and on a GPU with these and with the CPU.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.functional.experts import experts
from moefp8.functional.feed_forward import feed_forward
from moefp8.functional.linear import fp8_linear
from moefp8.functional.workspace import Workspace
from moefp8.kernels.gemm.config import GroupLayout
from moefp8.kernels.gemm.experts_sizes import Sizes
from moefp8.kernels.gemm.operands import Operands
from moefp8.quant import quantize
from moefp8.testing import assert_matches_reference, row_errors
from tests import naive
from tests.fuzz import cases as fuzz
from tests.fuzz import judges
from tests.fuzz import layers as fuzz_layers
from tests.fuzz.judges import check, side
from tests.gpu import on_cpu_and_gpu, places_of, poison, same_bits
from tests.kernels.gemm import grouped_cases
from tests.kernels.gemm.cases import nothing_around_is_written

pytestmark = pytest.mark.filterwarnings("error:.*portable PyTorch body")
BLOCK_ROWS = {"1x128": 1, "128x128": 128}


# ---- Quantization: bit for bit ----


@on_cpu_and_gpu
@pytest.mark.parametrize("blocks", BLOCK_ROWS)
@given(case=fuzz.matrices(), ue8m0=st.booleans())
def test_quantize(device, blocks, case, ue8m0):
    op = getattr(quantize, f"quantize_{blocks}")
    x = case.make("cpu")
    expected = op(x, ue8m0)
    if device == "cpu":
        for matrix, *ours in zip(
            *(y if y.ndim == 3 else y[None] for y in (x, *expected)), strict=True
        ):
            codes, scales = naive.quantize(matrix, BLOCK_ROWS[blocks], ue8m0)
            assert torch.equal(ours[0].view(torch.uint8), codes.to(torch.uint8))
            assert same_bits(ours[1], scales)
    else:
        poison(device, *(y.untyped_storage().nbytes() for y in expected))
        for ours, theirs in zip(op(case.make(device), ue8m0), expected, strict=True):
            assert same_bits(ours, theirs)
            assert ours.stride() == theirs.stride()


# ---- GEMMs ----


@on_cpu_and_gpu
@given(case=fuzz.gemms())
def test_gemm(device, case):
    m, made = case
    a, a_scale_inv, b, b_scale_inv, _ = made.make((m,), (), device)
    sums = judges.products(side(a, a_scale_inv, 1), side(b, b_scale_inv, 128))
    expected = judges.rounded(judges.plus_bias(sums, made.make_bias(device)))
    for place in places_of(device):
        a, a_scale_inv, b, b_scale_inv, d = made.make((m,), (), place)
        bias = made.make_bias(place)
        with nothing_around_is_written(d):
            kernels.fp8_gemm_nt((a, a_scale_inv), (b, b_scale_inv), d, bias=bias)
            check(d.to(device), expected)
            if made.is_ordinary and made.n >= 64:
                assert_matches_reference(d.to(device), expected.value)


def run_grouped(drawn: grouped_cases.Routing, operands: Operands, expected_m: int) -> None:
    a, b, d = operands[:2], operands[2:4], operands.d
    bounds = drawn.bounds_on(d.device)
    if drawn.layout == GroupLayout.MASKED:
        kernels.m_grouped_fp8_gemm_nt_masked(a, b, d, bounds, expected_m)
    elif drawn.layout == GroupLayout.ROWS:
        kernels.m_grouped_fp8_gemm_nt_contiguous(a, b, d, bounds)
    else:
        kernels.m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=bounds)


@on_cpu_and_gpu
@given(case=fuzz.grouped_gemms(), expected_m=st.sampled_from((1, 30, 100, 700)))
def test_grouped_gemm(device, case, expected_m):
    drawn, made = case

    def make(place: str) -> Operands:
        operands = made.make(drawn.rows_of_a(), (drawn.num_groups,), place)
        fuzz.poison_padding(drawn, operands)
        operands.d.fill_(grouped_cases.UNTOUCHED)
        return operands

    def rows_of(x: torch.Tensor, segment: grouped_cases.Segment) -> torch.Tensor:
        return (x[segment.matrix] if drawn.layout == GroupLayout.MASKED else x)[
            segment.begin : segment.end
        ]

    a, a_scale_inv, b, b_scale_inv, _ = make(device)
    of_groups = [side(*of_one, 128) for of_one in zip(b, b_scale_inv, strict=True)]
    tokens = [[rows_of(x, segment) for x in (a, a_scale_inv)] for segment in drawn.segments]
    expected = [
        judges.rounded(judges.products(side(*of_one, 1), of_groups[segment.group]))
        for of_one, segment in zip(tokens, drawn.segments, strict=True)
    ]
    for place in places_of(device):
        operands = make(place)
        with grouped_cases.only_groups_are_written(drawn, operands.d):
            run_grouped(drawn, operands, expected_m)
            for segment, of_segment in zip(drawn.segments, expected, strict=True):
                d = rows_of(operands.d, segment).to(device)
                check(d, of_segment)
                if made.is_ordinary and made.n >= 64:
                    assert_matches_reference(d, of_segment.value)


# ---- Layers ----


def quantized(x: torch.Tensor, device: str) -> judges.Side:
    """Bit for bit as on every device, which is `test_quantize`'s concern."""
    return side(*(y.to(device) for y in quantize.quantize_1x128(x.cpu(), False)), 1)


def check_codes_lost(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Of ordinary numbers: a code that differs now and then is lost among the others."""
    errors = row_errors(ours, theirs)
    assert bool((errors < 0.12).all())
    assert len(errors) < 64 or float(errors.mean()) < 1.2e-2


@on_cpu_and_gpu
@given(case=fuzz_layers.layers())
def test_linear(device, case):
    weight = side(*(y[0] for y in case.weights.make(device)), 128)
    sums = judges.products(quantized(case.x.make(device), device), weight)
    expected = judges.rounded(judges.plus_bias(sums, case.make_bias(device)))
    for place in places_of(device):
        x, bias = case.x.make(place), case.make_bias(place)
        data, scale_inv = (y[0] for y in case.weights.make(place))
        poison(place, 2 * expected.value.numel())
        y = fp8_linear(x, data, scale_inv, bias)
        check(y.to(device), expected)
        in_two_steps = torch.empty_like(y)
        kernels.fp8_gemm_nt(
            quantize.quantize_1x128(x, False), (data, scale_inv), in_two_steps, bias=bias
        )
        assert same_bits(y, in_two_steps)


@on_cpu_and_gpu
@given(case=fuzz_layers.layers(), apart=st.booleans())
def test_feed_forward(device, case, apart):
    """apart: gate and up are no parts of one tensor, and lie in different ways."""
    i, blocks = case.weights.rows, kernels.num_blocks(case.weights.rows)

    def make(place: str) -> tuple[torch.Tensor, ...]:
        gate_up, gate_up_scale_inv, *down = (y[0] for y in case.weights.make_experts(place))
        gate, up = gate_up[:i], gate_up[i:]
        gate_scale_inv, up_scale_inv = gate_up_scale_inv[:blocks], gate_up_scale_inv[blocks:]
        if apart:
            up, up_scale_inv = (
                x.clone(memory_format=torch.contiguous_format) for x in (up, up_scale_inv)
            )
        return (gate, gate_scale_inv, up, up_scale_inv, *down)

    sides = [side(*pair, 128) for pair in zip(*[iter(make(device))] * 2, strict=True)]
    x = quantized(case.x.make(device), device)
    expected = judges.feed_forward(x, *sides, case.limit)
    results = []
    for place in places_of(device):
        poison(place, 2 * expected.value.numel())
        y = feed_forward(case.x.make(place), *make(place), case.limit)
        check(y.to(device), expected)
        results.append(y.cpu())
    if case.is_ordinary:
        check_codes_lost(results[0], results[-1])


@on_cpu_and_gpu
@given(case=fuzz_layers.layers(16 if fuzz.HAS_GPU else 5), choices=fuzz_layers.choices())
def test_experts(device, case, choices):
    (num_tokens, hidden_size), num_experts = case.x.shape, case.weights.num_experts

    def make(place: str) -> list[torch.Tensor]:
        ids = choices.make_ids(num_tokens, num_experts, place)
        ids = fuzz_layers.known_to_cpu(ids, num_experts) if place == "cpu" else ids
        weights = choices.make_weights(num_tokens, place)
        return [case.x.make(place), ids, weights, *case.weights.make_experts(place)]

    x, ids, weights, *projections = make(device)
    pairs = projections[:2], projections[2:]
    expected = judges.experts(quantized(x, device), ids, weights, *pairs, case.limit)
    sizes = Sizes(
        num_tokens, choices.top_k, num_experts, hidden_size, case.weights.rows, masked=False
    )
    results = []
    for place, masked in ((device, False), (device, True), ("cpu", False)):
        workspace = Workspace.of(sizes._replace(masked=masked))
        poison(place, workspace.size, 2 * expected.value.numel())
        y = experts(*make(place), case.limit, masked)
        check(y.to(device), expected)
        results.append(y.cpu())
        if device == "cpu":
            return
    assert same_bits(results[0], results[1])
    x, ids, weights, *projections = make(device)
    some = torch.arange(0, num_tokens, 2)  # a token depends on no other
    y = experts(x[some], ids[some], weights[some], *projections, case.limit, False)
    assert same_bits(y, results[0][some])
    if case.is_ordinary and choices.weights.kind == "ordinary":
        check_codes_lost(results[0], results[2])
