"""Every op with numbers of every bit pattern, wherever they lie: `make fuzz` draws many of them.

On the CPU they are compared with slow references, and on a GPU with these and with the CPU.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.functional.experts import experts
from moefp8.functional.feed_forward import feed_forward
from moefp8.functional.linear import fp8_linear
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.k_grouped import KGroupedInputs, k_grouped_gemm
from moefp8.kernels.gemm.operands import Operands
from moefp8.kernels.gemm.sizes import Sizes
from moefp8.quant import columns, quantize
from moefp8.quant.both import quantize_128x128_both
from moefp8.quant.each import quantize_128x128_each_into
from moefp8.testing import assert_matches_reference, row_errors
from tests import naive
from tests.functional.cases import ids_here
from tests.functional.experts.records import forward_bytes
from tests.fuzz import cases as fuzz
from tests.fuzz import judges
from tests.fuzz import layers as fuzz_layers
from tests.fuzz.judges import check, side
from tests.gpu import on_cpu_and_gpu, places_of, poison, same_bits
from tests.kernels.gemm import grouped_cases
from tests.kernels.gemm.cases import nothing_around_is_written
from tests.kernels.gemm.k_grouped import cases as k_grouped_cases
from tests.quant import both_cases, each_cases
from tests.quant.columns_cases import assert_right, assert_same

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


@on_cpu_and_gpu
@given(
    case=fuzz.matrices(),
    ue8m0=st.booleans(),
    blocks=st.booleans(),
    shares=st.lists(st.integers(0, 9), max_size=5),
)
def test_columns(device, case, ue8m0, blocks, shares):
    x = case.make("cpu")
    x = x.flatten(0, 1) if x.ndim == 3 else x
    offsets = None
    if shares:
        ends = [sum(shares[:i]) * len(x) // max(sum(shares), 1) for i in range(len(shares) + 1)]
        offsets = torch.tensor(ends, dtype=torch.int32)
    options = ue8m0, 1e-4, blocks
    expected = columns.quantize_1x128_and_128x1(x, offsets, *options)
    if device == "cpu":
        assert_right(expected[2:], x, offsets, *options)
        return
    poison(device, *(y.untyped_storage().nbytes() for y in expected))
    on_device, there = case.make(device), None if offsets is None else offsets.to(device)
    on_device = on_device.flatten(0, 1) if on_device.ndim == 3 else on_device
    found = columns.quantize_1x128_and_128x1(on_device, there, *options)
    assert_same(found, expected, offsets, len(x))
    found = columns.quantize_128x1(on_device, there, None, *options)
    assert_same(found, expected[2:], offsets, len(x))


@on_cpu_and_gpu
@given(case=fuzz.matrices(), halves=st.booleans())
def test_quantize_both(device, case, halves):
    def make(place: str) -> torch.Tensor:
        w = case.make(place)
        return w if w.stride(-1) == 1 or w.shape[-1] == 1 else w.contiguous()

    w = make("cpu")
    parts = 2 if halves and w.shape[-2] % 2 == 0 else 1
    expected = both_cases.expected_of(w, parts)
    for place in places_of(device):
        poison(place, *(y.untyped_storage().nbytes() for y in expected))
        both_cases.assert_same(quantize_128x128_both(make(place), parts), expected)


@on_cpu_and_gpu
@given(case=fuzz.matrices(), halves=st.booleans(), with_transposed=st.booleans())
def test_quantize_each(device, case, halves, with_transposed):
    """The matrices of a stack, backwards, of which the last one is left as it is."""
    w = case.make("cpu")
    w = (w if w.ndim == 3 else w[None]).contiguous()
    if not w.numel():
        return
    parts = 2 if halves and len(w) % 2 == 0 else 1
    places = list(reversed(range(len(w))))[: max(len(w) - 1, 1)]
    whole = torch.zeros_like(w)
    whole[places] = w[places]
    stacked = whole.view(len(w) // parts, parts * w.shape[1], w.shape[2])
    expected = both_cases.expected_of(stacked, parts)
    for place in places_of(device):
        made = each_cases.untouched(len(w), parts, *w.shape[1:], place)
        kept = made._replace(transposed=made.transposed if with_transposed else None)
        quantize_128x128_each_into(*kept, parts, [w[i].to(place) for i in places], places)
        found = made.data.view(torch.uint8)[places].cpu()
        assert same_bits(found, expected.data.view(torch.uint8).view(made.data.shape)[places])
        scales = expected.scale_inv.view(made.scale_inv.shape)
        assert same_bits(made.scale_inv[places], scales[places])
        if with_transposed:
            turned = (x.unflatten(-1, (parts, -1)) for x in (made.transposed, expected.transposed))
            ours, theirs = (x.transpose(1, 2).flatten(0, 1).view(torch.uint8) for x in turned)
            assert same_bits(ours[places], theirs[places])


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
            check_rows(made, d, expected)


def check_rows(made: fuzz.Gemm, d: torch.Tensor, expected: judges.Judged) -> None:
    d = d.to(expected.value.device)
    check(d, expected)
    if made.is_ordinary and made.n >= 64:
        assert_matches_reference(d, expected.value)


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
        x = x[segment.matrix] if drawn.layout == GroupLayout.MASKED else x
        return x[segment.begin : segment.end]

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
            bounds = drawn.bounds_on(operands.d.device)
            grouped_cases.run_op(drawn, operands, bounds, expected_m)
            for segment, of_segment in zip(drawn.segments, expected, strict=True):
                check_rows(made, rows_of(operands.d, segment), of_segment)


@on_cpu_and_gpu
@given(case=fuzz.weight_gradients())
def test_weight_gradient(device, case):
    """The bound of the grouped GEMMs, whose K are the tokens of an expert."""
    made = case.make(device)
    expected = judged_by_expert(made)
    for place in places_of(device):
        found = case.make(place)
        with k_grouped_cases.only_d_is_written(found.d):
            k_grouped_gemm(*found)
        for d, of_expert in zip(found.d.to(device), expected, strict=True):
            check(d, of_expert)


def judged_by_expert(made: KGroupedInputs) -> list[judges.Judged]:
    """What is right for each expert: its blocks, side by side, are the K of a GEMM."""
    found, of_b = [], made.b_scale_inv
    if of_b.shape[1] != made.b.shape[1]:
        of_b = k_grouped_cases.by_features(of_b, made.b)
    for expert, (begin, end) in enumerate(pairwise(made.expert_offsets.tolist())):
        first, count = begin // 128 + expert, end - begin
        blocks = slice(first, first + kernels.ceil_div(count, 128))
        of_expert = judges.products(
            *(
                side(x[blocks].transpose(0, 1).flatten(1)[:, :count], scale_inv[blocks].T, 1)
                for x, scale_inv in ((made.a, made.a_scale_inv), (made.b, of_b))
            )
        )
        if made.accumulates:
            of_expert = judges.plus_bias(of_expert, made.d[expert])
        is_bf16 = made.d.dtype == torch.bfloat16
        found.append(judges.rounded(of_expert) if is_bf16 else of_expert)
    return found


# ---- Layers ----


def quantized(x: torch.Tensor, device: str) -> judges.Side:
    """x as every device quantizes it, bit for bit: `test_quantize` sees to that."""
    return side(*(y.to(device) for y in quantize.quantize_1x128(x.cpu(), False)), 1)


def check_codes_lost(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Among ordinary numbers, a code that differs now and then is lost."""
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
    """If `apart`, gate and up are no parts of one tensor, and lie in different ways."""

    def make(place: str) -> list[torch.Tensor]:
        *gate_up, down, down_scale_inv = (y[0] for y in case.weights.make_experts(place))
        gate, up = zip(*(x.tensor_split(2) for x in gate_up), strict=True)
        if apart:
            up = [x.clone(memory_format=torch.contiguous_format) for x in up]
        return [*gate, *up, down, down_scale_inv]

    made = make(device)
    sides = [side(*made[i : i + 2], 128) for i in (0, 2, 4)]
    x = quantized(case.x.make(device), device)
    expected = judges.feed_forward(x, *sides, case.limit)
    results = []
    for place in places_of(device):
        poison(place, 2 * expected.value.numel())
        y = feed_forward(case.x.make(place), *make(place), case.activation)
        check(y.to(device), expected)
        results.append(y.cpu())
    if case.is_ordinary:
        check_codes_lost(results[0], results[-1])


@pytest.mark.slow
@on_cpu_and_gpu
@given(
    case=fuzz_layers.layers(16 if fuzz.HAS_GPU else 5),
    choices=fuzz_layers.choices(),
    others=st.sampled_from(((0, 0), (0, 0), (0, 3), (1, 0), (2, 5))),
)
def test_experts(device, case, choices, others):
    """others: how many experts of the model are on ranks before, and on ranks behind."""
    (num_tokens, hidden_size), num_experts = case.x.shape, case.weights.num_experts
    first, num_global = others[0], sum(others) + num_experts

    def make(place: str) -> list[torch.Tensor]:
        ids = choices.make_ids(num_tokens, num_global, place)
        ids = fuzz_layers.known_to_cpu(ids, num_global) if place == "cpu" else ids
        weights = choices.make_weights(num_tokens, place)
        return [case.x.make(place), ids, weights, *case.weights.make_experts(place)]

    x, ids, weights, *projections = make(device)
    pairs = projections[:2], projections[2:]
    own = ids_here(ids, num_experts, first)
    expected = judges.experts(quantized(x, device), own, weights, *pairs, case.limit)
    sizes = Sizes(
        num_tokens, choices.top_k, num_experts, hidden_size, case.weights.rows, masked=False
    )
    results = []
    for place, masked in ((device, False), (device, True), ("cpu", False)):
        workspace = forward_bytes(sizes._replace(masked=masked))
        poison(place, workspace, 2 * expected.value.numel())
        y = experts(*make(place), case.activation, masked, first, num_global)
        check(y.to(device), expected)
        results.append(y.cpu())
        tokens, *rest = make(place)
        codes, scale_inv = quantize.quantize_1x128(tokens, False)
        options = case.activation, masked, first, num_global, None
        assert same_bits(experts(codes, *rest, *options, scale_inv), y)
        addend = fuzz.floats(case.x.kind, torch.bfloat16, num_tokens, hidden_size).to(place)
        added = experts(*make(place), case.activation, masked, first, num_global, addend)
        assert same_bits(added, y + addend)
        if device == "cpu":
            return
    assert same_bits(results[0], results[1])
    x, ids, weights, *projections = make(device)
    some = torch.arange(0, num_tokens, 2)  # a token depends on no other
    rank = first, num_global
    y = experts(x[some], ids[some], weights[some], *projections, case.activation, False, *rank)
    assert same_bits(y, results[0][some])
    if case.is_ordinary and choices.weights.kind == "ordinary":
        check_codes_lost(results[0], results[2])
