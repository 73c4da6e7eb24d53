"""Segments of `grouped_layout` on a GPU: the list itself, and what a GEMM makes of it."""

import pytest
import torch

from moefp8.kernels import m_grouped_fp8_gemm_nt_contiguous, tma_aligned
from moefp8.kernels.gemm import segments
from moefp8.kernels.gemm.grouped import finds_segments
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.program import Place
from tests.gpu import NEEDS_GPU, no_synchronisation, poison
from tests.kernels.gemm.gpu_cases import assert_right, launch_and_compare, on_gpu, random
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    Routing,
    by_offsets,
    by_rows,
    expected_of,
    finding_segments,
    launch,
    operands,
    run_op,
)
from tests.kernels.gemm.segments_cases import (
    LAYOUTS,
    NUM_GROUPS,
    list_of,
    random_layout,
)
from tests.records import launches_of

pytestmark = NEEDS_GPU


def find(rows: torch.Tensor, num_groups: int) -> list[int]:
    """The list that the kernel writes into poisoned memory, 20 times alike."""
    device, size = rows.get_device(), segments.list_bytes(len(rows)) // 4
    given = Place("rows"), Place("list"), len(rows), num_groups
    (made,) = launches_of(
        lambda r: segments.describe_segments(r, *given, programmatic=False),
        ("rows", "list"),
        device,
    )
    found = torch.full((20, size + 4), -1, dtype=torch.int32, device=rows.device)
    for one in found:
        made.on(device, (rows.data_ptr(), one.data_ptr()))
    assert bool((found == found[0]).all())
    assert bool((found[0, size:] == -1).all())
    return found[0, :size].tolist()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shift", [0, 1])
def test_the_list_is_that_of_plain_loops(name, shift):
    rows = torch.tensor([99] * shift + LAYOUTS[name], dtype=torch.int32, device="cuda")[shift:]
    assert find(rows, NUM_GROUPS) == list_of(LAYOUTS[name], NUM_GROUPS)


@pytest.mark.parametrize("num_blocks", [32, 63, 130, 321, 1023, 1024, 1025, 2049, 8000])
def test_the_list_of_many_blocks(num_blocks):
    for seed, num_groups in enumerate((1, 8, 257)):
        rows = random_layout(num_blocks, num_groups, seed)
        found = find(torch.tensor(rows, dtype=torch.int32, device="cuda"), num_groups)
        assert found == list_of(rows, num_groups)


def test_rows_that_break_the_rules_give_segments_within_the_tensors():
    rows = torch.randint(-1, 2, (128 * 300 + 5,), dtype=torch.int32)
    found = torch.tensor(find(rows.cuda(), 2)).view(-1, 4)
    begin, end, group, _ = found[1 : 1 + found[0, 0]].T
    assert bool(((begin >= 0) & (begin < end) & (end <= len(rows))).all())
    assert bool((rows[begin.long()] == group).all())


MANY = {
    "each group once": [(0, 3000), (1, 128), (2, 1), (3, 1500), (4, 640)],
    "groups come again": [(1, 900), (0, 1024), (1, 1024), (1, 300), (3, 127), (0, 77), (3, 1900)],
    "blocks of none between": [(-1, 128), (4, 1280), (-1, 640), (4, 5), (-1, 100), (2, 2500)],
    "falling": [(4, 513), (3, 129), (2, 128), (1, 1023), (0, 4096)],
}


def many(name: str, after: int) -> Routing:
    routing = by_rows(MANY[name], 5, after)._replace(layout=GroupLayout.SEGMENTS)
    assert finds_segments(routing.num_tokens, routing.num_groups)
    return routing


def by_offsets_alone(routing: Routing, made) -> torch.Tensor:
    """Each segment by a call of its own with `expert_offsets`; poison in all other rows."""
    d = torch.full_like(made.d, UNTOUCHED)
    for group, _, begin, end in routing.segments:
        counts = [0] * routing.num_groups
        counts[group] = end - begin
        alone = by_offsets(counts, begin, routing.num_tokens - end)
        launch(alone, made._replace(d=d), expected_m=routing.num_tokens // routing.num_groups)
    return d


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("after", [0, 77, 300])
@pytest.mark.parametrize(("n", "k"), [(520, 1040), (4096, 7168), (2048, 768)])
def test_bits_are_those_of_offsets(name, after, n, k):
    """By the op's own choice; rows of no group keep their poison, and the list begins as NaN."""
    routing = many(name, after)
    made, bounds = random(routing, n, k), routing.bounds_on("cuda")
    expected = by_offsets_alone(routing, made)
    for _ in range(4):  # the last ones by a graph
        made.d.fill_(UNTOUCHED)
        poison("cuda", segments.list_bytes(routing.num_tokens))
        with no_synchronisation():
            m_grouped_fp8_gemm_nt_contiguous(made[:2], made[2:4], made.d, bounds)
        assert torch.equal(made.d, expected)
    assert_right(routing, made)


@pytest.mark.parametrize("name", MANY)
def test_sums_are_exact(name):
    """Bit by bit what FP64 gives; the tokens of no group are NaN."""
    for after in (0, 1, 127):
        routing = many(name, after)
        made = on_gpu(operands(routing, 264, 272))
        for m in (4, 100, 2000):
            launch_and_compare(routing, made, m)


@pytest.mark.parametrize("name", MANY)
def test_both_ways_to_read_rows_give_the_same_bits(name):
    routing = many(name, 5)
    made, bounds = random(routing, 1032, 2064), routing.bounds_on("cuda")
    run_op(routing, made, bounds)
    twin = made._replace(d=torch.full_like(made.d, UNTOUCHED))
    with finding_segments(False):
        m_grouped_fp8_gemm_nt_contiguous(twin[:2], twin[2:4], twin.d, bounds)
    assert torch.equal(made.d, twin.d)


def test_a_million_rows():
    rows = random_layout(2**13, 64, 3)
    bounds = torch.tensor(rows, dtype=torch.int32, device="cuda")
    a = torch.ones(len(rows), 16, device="cuda").to(torch.float8_e4m3fn)
    scales = tma_aligned(torch.ones(len(rows), 1, device="cuda"))
    b_scale_inv = torch.arange(1.0, 65, device="cuda")[:, None, None]
    d = torch.full((len(rows), 8), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
    ones = torch.ones(64, 8, 16, device="cuda").to(torch.float8_e4m3fn)
    for _ in range(4):
        m_grouped_fp8_gemm_nt_contiguous((a, scales), (ones, b_scale_inv), d, bounds)
        expected = torch.where(bounds < 0, UNTOUCHED, 16.0 * (bounds + 1)).bfloat16()
        assert torch.equal(d, expected[:, None].expand_as(d))
        d.fill_(UNTOUCHED)


def test_the_rows_may_be_written_by_the_kernel_before():
    """They are read only when it has ended, also while the GEMM already runs."""
    names = list(MANY)
    routings = [many(name, 0) for name in names]
    most = max(x.num_tokens for x in routings)
    routings = [many(name, most - x.num_tokens) for name, x in zip(names, routings, strict=True)]
    bounds = routings[0].bounds_on("cuda")
    for _ in range(5):
        for routing in routings:
            made, fresh = on_gpu(operands(routing, 264, 528)), routing.bounds_on("cuda")
            expected = expected_of(routing, made)
            torch.cuda.synchronize()
            bounds.fill_(-1)
            torch.cuda._sleep(200_000)
            bounds.copy_(fresh)
            m_grouped_fp8_gemm_nt_contiguous(made[:2], made[2:4], made.d, bounds)
            assert torch.equal(made.d, expected)


def test_calls_on_two_streams_have_lists_of_their_own():
    first, second = many("each group once", 0), many("falling", 0)
    cases = [
        (x, random(x, 520, 1040), x.bounds_on("cuda"), torch.cuda.Stream()) for x in (first, second)
    ]
    expected = [by_offsets_alone(x, made) for x, made, *_ in cases]
    torch.cuda.synchronize()
    for _ in range(30):
        for _, made, bounds, stream in cases:
            with torch.cuda.stream(stream):
                made.d.fill_(UNTOUCHED)
                m_grouped_fp8_gemm_nt_contiguous(made[:2], made[2:4], made.d, bounds)
    torch.cuda.synchronize()
    for (_, made, *_), right in zip(cases, expected, strict=True):
        assert torch.equal(made.d, right)


@pytest.mark.usefixtures("new_driver")
def test_one_graph_serves_all_layouts():
    names = list(MANY)
    most = max(many(name, 0).num_tokens for name in names)
    cases = [many(name, most - many(name, 0).num_tokens) for name in names]
    memory = on_gpu(operands(cases[0], 264, 528))
    bounds, graph = cases[0].bounds_on("cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        m_grouped_fp8_gemm_nt_contiguous(memory[:2], memory[2:4], memory.d, bounds)
    for routing in (*cases, *cases[::-1]):
        fresh = *on_gpu(operands(routing, 264, 528)), routing.bounds_on("cuda")
        for x, y in zip((*memory, bounds), fresh, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(memory.d, by_offsets_alone(routing, memory))
