"""The kernels of plan, dispatch and combine, without a GPU: how they are cut, what they compute."""

from collections.abc import Callable, Iterable
from ctypes import Structure
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.kernels import E4M3, jit
from moefp8.kernels.jit import compile_kernels
from moefp8.kernels.program import Place, Tensor
from moefp8.routing.combine import combine_kernel_of
from moefp8.routing.dispatch import (
    count_kernel_of,
    cut_dispatch,
    dispatch_kernel_of,
    few_kernel_of,
    most_count_bytes,
)
from moefp8.routing.plan import (
    MAX_CHOICES,
    MapPlaces,
    Maps,
    PlanInputs,
    build_maps,
    cut_plan,
    launch_plan,
    num_slots_of,
    plan_kernel_of,
    routing_of,
)
from moefp8.testing import sizes
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.functional.cases import ids_here
from tests.gpu import ARCH, NUM_SMS
from tests.routing.cases import (
    CODE_PLACES,
    DTYPES,
    KINDS,
    RANKS,
    SCALE_PLACES,
    check_dispatch,
    codes_of,
    expected_combine,
    ids_of,
    ids_of_whole,
    placed_addend,
    plan_of,
    poisoned,
    run_combine,
    run_dispatch,
)
from tests.sampling import pairs

FLAGS = True, False


def dispatch_kernels(combine: Callable[..., Iterable[tuple[Any, ...]]]) -> list[jit.Kernel]:
    """combine: which values of several axes to take."""
    dtypes = *DTYPES, E4M3
    return [
        *(count_kernel_of(masked=masked) for masked in FLAGS),
        *(few_kernel_of(dtype, vectorized=flag) for dtype, flag in combine(dtypes, FLAGS)),
        *(
            dispatch_kernel_of(dtype, vectorized=vectorized, masked=masked, is_counted=is_counted)
            for dtype, vectorized, masked, is_counted in combine(dtypes, FLAGS, FLAGS, FLAGS)
        ),
    ]


KERNELS = {
    "plan": [plan_kernel_of(ahead) for ahead in (1, 4)],
    "dispatch": dispatch_kernels(product),
    "combine": [combine_kernel_of(x, flag) for x, flag in product(DTYPES, FLAGS)],
}
COMPILED = {**KERNELS, "dispatch": dispatch_kernels(pairs)}

# ---- Compiling ----


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("op", COMPILED)
def test_variants_compile_and_spill_nothing(op):
    for cubin in compile_kernels(COMPILED[op], ARCH):
        assert cubin.problems() == []


# ---- How the kernels are cut ----


dispatches = st.tuples(  # T, k, E, k-blocks, SMs
    sizes(2**18, 1), st.integers(1, 64), st.integers(1, 2000),
    st.integers(1, 200), st.integers(1, 256),
)  # fmt: skip


@given(shape=dispatches)
def test_each_block_of_each_token_has_a_cta(shape):
    num_tokens, top_k, _, num_k_blocks, num_sms = shape
    cut = cut_dispatch(*shape)
    chunks, parts = -(-num_tokens // cut.tokens), -(-num_k_blocks // cut.k_blocks)
    assert (cut.threads % 32, 32 <= cut.threads <= 1024) == (0, True)
    assert cut.tokens * top_k <= MAX_CHOICES
    places = -(-top_k // 4) * 4  # of a token's choices in shared memory
    if num_tokens * places <= num_sms * MAX_CHOICES // 2:
        assert chunks * parts <= num_sms
    if parts > 1:
        assert cut.k_blocks >= 8
    assert cut.group.bit_count() == 1
    at_once = cut.threads // 8  # blocks
    assert at_once >= min(64, cut.tokens * cut.k_blocks)
    assert cut.group == 1 or cut.tokens * cut.group <= at_once


@given(shape=dispatches)
def test_counts_of_all_chunks_have_room(shape):
    num_tokens, top_k, num_experts, *_ = shape
    cut = cut_dispatch(*shape)
    slots = num_slots_of(num_experts)
    assert cut.is_counted == (num_tokens * top_k > 2**13 and num_experts < 1024)
    if cut.is_counted:  # a thread for each two experts
        assert (cut.threads, slots // 2 <= 512) == (1024, True)
    num_bytes = most_count_bytes(num_tokens, top_k, num_experts)
    assert num_bytes >= -(-num_tokens // cut.tokens) * slots * 2


@given(num_tokens=st.integers(0, 2**20), top_k=st.integers(1, 9000))
def test_a_plan_fits_into_shared_memory(num_tokens, top_k):
    cut = cut_plan(num_tokens, top_k, NUM_SMS)
    assert cut.tokens >= 1
    assert cut.tokens == 1 or cut.tokens * top_k <= MAX_CHOICES
    assert cut.threads in range(128, 1025, 32)


@pytest.mark.parametrize(
    ("tokens", "hidden_blocks", "expected"),
    [
        (1, 56, (1, 8, 8, 64, False)),
        (16, 56, (1, 8, 8, 64, False)),
        (128, 56, (1, 56, 64, 512, False)),
        (128, 16, (1, 16, 16, 512, False)),
        (1024, 56, (8, 56, 16, 1024, False)),
        (1025, 56, (8, 56, 16, 1024, True)),
        (4096, 56, (32, 56, 4, 1024, True)),
        (65536, 56, (497, 56, 1, 1024, True)),
    ],
)
def test_cuts_of_common_shapes(tokens, hidden_blocks, expected):
    assert cut_dispatch(tokens, 8, 256, hidden_blocks, NUM_SMS) == expected


@pytest.mark.parametrize("top_k", range(1, 70))
def test_lanes_find_their_token(top_k):
    routing = routing_of_five(top_k).arguments
    for lane in range(32):
        assert lane * routing["reciprocal_of_k"] >> 16 == lane // top_k
    assert routing["tokens_at_once"] == max(1, 32 // top_k)


def routing_of_five(
    top_k: int,
    num_experts: int = 8,
    max_m: int | None = None,
    num_warps: int = 0,
    words: int = 1,
) -> Structure:
    """The routing of five tokens, in chunks of two."""
    ids = Tensor.of(torch.zeros(5, top_k, dtype=torch.int64), "ids")
    maps = MapPlaces(*map(Place, MapPlaces._fields))
    options = {"num_warps": num_warps, "words_of_choice": words}
    return routing_of("op", 2, ids, num_experts, max_m, maps, **options)


@pytest.mark.parametrize("num_experts", [1, 127, 128, 384])
@pytest.mark.parametrize(("top_k", "places"), [(1, 4), (4, 4), (5, 8), (8, 8), (10, 12), (41, 44)])
def test_shared_memory_holds_all_experts_and_one_more_and_all_rows(top_k, places, num_experts):
    """The rows of a token are read four at once."""
    for words in (1, 2):
        routing, shared_bytes = routing_of_five(top_k, num_experts, words=words)
        num_slots = routing["num_slots"]
        assert (num_slots % 128, routing["rows_of_token"]) == (0, places)
        assert num_experts < num_slots <= num_experts + 128
        assert shared_bytes == 8 * num_slots + 4 * 2 * places * words


@pytest.mark.parametrize(
    ("top_k", "num_experts", "rankers"),
    [(8, 8, 1), (16, 8, 1), (17, 8, 2), (600, 8, 32), (600, 1023, 16), (600, 20000, 1)],
)
def test_as_many_warps_rank_choices_as_are_useful(top_k, num_experts, rankers):
    """They rank the choices of two tokens."""
    routing, without = (routing_of_five(top_k, num_experts, num_warps=n) for n in (32, 0))
    found = [x.arguments["num_rankers"] for x in (routing, without)]
    assert found == [rankers, 0]
    more = 2 * rankers * routing.arguments["num_slots"]
    assert routing.shared_bytes - without.shared_bytes == more


def test_more_rows_than_a_kernel_counts_are_refused():
    with pytest.raises(ValueError, match=r"op: one call takes fewer than 2\*\*31 rows, got T = 5"):
        routing_of_five(4, max_m=2**30)


# ---- What the kernels compute ----


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    functions = {}
    for op, kernels in KERNELS.items():
        folder = tmp_path_factory.mktemp(op)
        functions |= cuda_on_cpu.build(kernels, folder)
    return functions


@pytest.fixture
def on_cpu(functions):
    """A GPU of two SMs that runs the kernels' text."""
    with jit.using(FakeDriver(2, library=cuda_on_cpu.OnCpu(functions))) as driver:
        yield driver


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "alignment", "spare"),
    [
        (0, 2, 3, 4, 0),
        (1, 8, 8, 1, None),
        (7, 1, 130, 16, None),
        (33, 8, 256, 1, None),
        (40, 10, 7, 128, None),
        (300, 3, 40, 5, None),
        (21, 40, 64, 3, None),
        (9, 3, 5, 1, 0),
        (30, 70, 9, 1, 3),
        (50, 2, 384, 1, 1),
    ],
)
def test_plan_equals_the_portable_body(
    on_cpu, kind, num_tokens, top_k, num_experts, alignment, spare
):
    on_cpu.sms = 5
    ids = ids_of(kind, num_tokens, top_k, num_experts)
    max_m = None if spare is None else num_tokens + spare
    expected = build_maps(ids, num_experts, alignment, max_m)
    ours = Maps(*(poisoned(x.shape, x.dtype, "cpu") for x in expected))
    launch_plan(PlanInputs(ids, num_experts, alignment, max_m), ours)
    assert all(map(torch.equal, ours, expected))


def has_memory(_: str, masked: bool, *others: tuple) -> bool:
    num_tokens, _, num_experts, *_ = others[-1]
    return not masked or num_experts * num_tokens <= 2**18


DISPATCHED = [
    (1, 2, 8, 128, torch.float32, 4), (4, 8, 5, 130, torch.float16, 1),
    (1, 32, 300, 4104, torch.bfloat16, 9),
    (2, 8, 130, 2104, torch.bfloat16, 7),
    (3, 10, 5, 200, torch.float16, 2),
    (37, 1, 8, 333, torch.float32, 6),
    (50, 40, 64, 8, torch.bfloat16, 3),
    (130, 8, 256, 264, torch.bfloat16, 3),
    (20, 3, 4, 1500, torch.float32, 30),
    (70, 5, 20, 16, torch.bfloat16, 1),
    (1366, 6, 1030, 24, torch.bfloat16, 3), (1025, 8, 600, 40, torch.float16, 40),
    (1366, 6, 8, 24, torch.bfloat16, 2), (130, 65, 1023, 136, torch.float32, 5),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "masked", "shape"), pairs(KINDS, FLAGS, DISPATCHED, where=has_memory), ids=str
)
def test_dispatch_equals_its_parts(on_cpu, kind, masked, shape):
    num_tokens, top_k, num_experts, hidden_size, dtype, on_cpu.sms = shape
    x = torch.randn(num_tokens, hidden_size + 8)[:, :hidden_size].to(dtype)
    ids = ids_of(kind, num_tokens, top_k, num_experts)
    if kind != "out of range":
        ids = torch.stack([ids, ids + 1], 2).int()[..., 0]  # strides of 2 k and 2
    max_m = num_tokens + 1 if masked else None
    done = run_dispatch(x, ids, num_experts, max_m)
    check_dispatch(done, x, ids, num_experts, max_m)


OF_CODES = [
    (1, 2, 8, 128, 4), (4, 8, 5, 131, 1), (1, 32, 300, 4112, 9),
    (3, 10, 5, 200, 2), (37, 1, 8, 333, 6), (50, 40, 64, 8, 3),
    (130, 8, 256, 272, 3), (20, 3, 4, 1504, 30), (70, 5, 20, 16, 1),
    (274, 30, 8, 32, 2), (274, 30, 1030, 24, 3),
]  # fmt: skip
PLACES = list(zip(CODE_PLACES, SCALE_PLACES, strict=True))


@pytest.mark.parametrize(
    ("kind", "masked", "places", "shape"),
    pairs(KINDS, FLAGS, PLACES, OF_CODES, where=has_memory),
    ids=str,
)
def test_codes_and_scales_pass_as_they_are(on_cpu, kind, masked, places, shape):
    num_tokens, top_k, num_experts, hidden_size, on_cpu.sms = shape
    codes, scales = codes_of(num_tokens, hidden_size, "cpu")
    ids = ids_of(kind, num_tokens, top_k, num_experts)
    max_m = num_tokens + 1 if masked else None
    codes = CODE_PLACES[places[0]](codes.view(torch.uint8)).view(E4M3)
    scales = SCALE_PLACES[places[1]](scales)
    done = run_dispatch(codes, ids, num_experts, max_m, x_scale_inv=scales)
    check_dispatch(done, codes, ids, num_experts, max_m, x_scale_inv=scales)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_sms"), [(2, 4, 4), (70, 5, 3), (1400, 6, 2)])
def test_codes_of_a_rank(on_cpu, rank, masked, num_tokens, top_k, num_sms):
    on_cpu.sms = num_sms
    codes, scales = codes_of(num_tokens, 272, "cpu")
    ids = ids_of_whole("out of range", num_tokens, top_k, rank, True)
    (num_experts, first, _), max_m = rank, num_tokens if masked else None
    done = run_dispatch(codes, ids, num_experts, max_m, first, scales)
    check_dispatch(done, codes, ids, num_experts, max_m, first, scales)


@pytest.mark.parametrize(
    ("hidden_size", "place", "vectorized"),
    [
        (128, "own", True), (144, "own", True), (144, "wide rows", True),
        (144, "unaligned", False), (144, "odd rows", False),
        (136, "own", False), (136, "wide rows", False),  # a load would end behind x
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_tokens", [2, 40])
def test_codes_are_loaded_16_at_once_where_they_fit(
    on_cpu, hidden_size, place, vectorized, num_tokens
):
    codes, scales = codes_of(num_tokens, hidden_size, "cpu")
    codes = CODE_PLACES[place](codes.view(torch.uint8)).view(E4M3)
    run_dispatch(codes, ids_of("distinct", num_tokens, 2, 5), 5, None, x_scale_inv=scales)
    (made,) = on_cpu.launched
    assert f"<Codes, {str(vectorized).lower()}" in made.kernel.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("spare", [None, 1])
def test_plan_of_a_rank_equals_the_portable_body(on_cpu, kind, rank, wide, spare):
    on_cpu.sms = 5
    ids = ids_of_whole(kind, 70, 3, rank, wide)
    (num_experts, first, num_global), max_m = rank, None if spare is None else 70 + spare
    expected = build_maps(ids, num_experts, 1, max_m, first)
    by_hand = build_maps(ids_here(ids, num_experts, first), num_experts, 1, max_m)
    assert all(map(torch.equal, expected, by_hand))
    ours = Maps(*(poisoned(x.shape, x.dtype, "cpu") for x in expected))
    launch_plan(PlanInputs(ids, num_experts, 1, max_m, first, num_global), ours)
    assert all(map(torch.equal, ours, expected))


OF_RANKS = [(1, 2, 4), (70, 5, 3), (1400, 6, 2)]


@pytest.mark.parametrize(
    ("kind", "rank", "wide", "masked", "shape"),
    pairs(KINDS, RANKS, FLAGS, FLAGS, OF_RANKS),
    ids=str,
)
def test_dispatch_of_a_rank_takes_the_ids_of_the_whole_model(
    on_cpu, kind, rank, wide, masked, shape
):
    """The last choices are counted by a kernel before."""
    num_tokens, top_k, on_cpu.sms = shape
    x, ids = torch.randn(num_tokens, 24), ids_of_whole(kind, num_tokens, top_k, rank, wide)
    (num_experts, first, _), max_m = rank, num_tokens if masked else None
    done = run_dispatch(x, ids, num_experts, max_m, first)
    check_dispatch(done, x, ids, num_experts, max_m, first)
    assert len(on_cpu.launched) == (2 if num_tokens == 1400 else 1)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "names"),
    [(2730, 4, ["dispatch"]), (2731, 4, ["count", "dispatch"]), (2731, 1024, ["dispatch"])],
)
def test_of_many_choices_a_kernel_before_counts(on_cpu, num_tokens, num_experts, names):
    x, ids = torch.randn(num_tokens, 16), ids_of("distinct", num_tokens, 3, num_experts)
    run_dispatch(x, ids, num_experts, None)
    assert [made.kernel.name.split("_")[0] for made in on_cpu.launched] == names
    assert all(made.programmatic for made in on_cpu.launched)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "masked", "is_few"),
    [(1, 8, False, True), (4, 8, False, True), (33, 1, False, False), (4, 8, True, False)],
)
def test_of_choices_that_a_warp_holds_a_kernel_needs_no_counts(
    on_cpu, num_tokens, top_k, masked, is_few
):
    x, ids = torch.randn(num_tokens, 16), ids_of("distinct", num_tokens, top_k, 20)
    run_dispatch(x, ids, 20, num_tokens if masked else None)
    (made,) = on_cpu.launched
    assert ("few" in made.kernel.name) == is_few


@pytest.mark.parametrize("masked", [False, True])
def test_the_second_kernel_takes_the_counts_of_the_first(on_cpu, masked):
    """It does not count anew: what is in memory decides."""
    on_cpu.sms = 10
    x, ids = torch.randn(1100, 8), ids_of("distinct", 1100, 8, 20)
    max_m = 1100 if masked else None
    done = run_dispatch(x, ids, 20, max_m)
    check_dispatch(done, x, ids, 20, max_m)
    per_chunk = torch.stack([chunk.flatten().bincount(minlength=128) for chunk in ids.split(110)])
    assert torch.equal(done.counts[: 10 * 128 * 2].view(torch.int16), per_chunk.short().flatten())
    done.counts.zero_()
    done.launch(done.launches[1:])
    assert (done.tokens_per_expert == 0).all()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights_dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size"), [(1, 1, 8), (5, 8, 264), (9, 2, 333), (20, 19, 16)]
)
def test_combine_equals_the_cpu(kind, weights_dtype, num_tokens, top_k, hidden_size):
    plan = plan_of(ids_of(kind, num_tokens, top_k, 6), 6, None)
    y = torch.randn(plan.row_to_token.shape[0], (hidden_size + 15) // 8 * 8).bfloat16()
    y[plan.row_to_token < 0] = torch.nan  # also row 0, if there is none
    weights = torch.rand(top_k, num_tokens).to(weights_dtype).T
    ours = run_combine(y, hidden_size, plan, weights)
    assert torch.equal(ours, expected_combine(y, hidden_size, plan, weights))
    for offsets in ((0, 0), (8, 0), (1, 0), (0, 3), (5, 1)):
        addend = placed_addend(num_tokens, hidden_size, offsets[0], "cpu")
        ours = run_combine(y, hidden_size, plan, weights, addend=addend, offset=offsets[1])
        assert torch.equal(ours, expected_combine(y, hidden_size, plan, weights, addend))
