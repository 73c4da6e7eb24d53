"""The grouped GEMMs on a GPU, beyond what `test_launch_gpu.py` says of all GEMMs."""

import pytest
import torch

from moefp8 import kernels
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.operands import Operands
from moefp8.quant import quantize_1x128, quantize_128x128
from tests.gpu import NEEDS_GPU, no_synchronisation, slow
from tests.kernels.gemm.cases import choosing
from tests.kernels.gemm.gpu_cases import MULTICAST, assert_right, launch_and_compare, on_gpu, random
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    by_offsets,
    expected_of,
    launch,
    operands,
    routing_of,
    routings_of_384_rows,
)
from tests.kernels.gemm.sm90 import families

pytestmark = NEEDS_GPU
LAYOUTS = tuple(GroupLayout)


@pytest.mark.parametrize("layout", [*LAYOUTS[:2], *slow(*LAYOUTS[2:])])
@pytest.mark.parametrize("name", families.GROUPED_FAMILIES)
def test_every_family_is_right(name, layout):
    """It is right also where it would not be chosen, and neighbours of a cluster have no tokens."""
    many_counts = (
        (3,), (0, 77, 1, 0, 130, 5), (64, 128, 192, 63, 65, 127, 129, 191, 193),
        (0,) * 40, (*[0] * 33, 9, 0, 500, 1), (1, 2, 3) * 40, (1000, 0, 700),
    )  # fmt: skip
    with choosing(families.GROUPED_FAMILIES[name]):
        for i, counts in enumerate(many_counts):
            routing = routing_of(layout, counts, i % 4)
            for n, k in ((200, 424), (1111, 2000)):
                made = random(routing, n, k, octaves=i % 3 * 10.0)
                with no_synchronisation():
                    bounds = routing.bounds_on("cpu").pin_memory().cuda(non_blocking=True)
                    launch(routing, made, bounds)
                assert_right(routing, made)


@pytest.mark.parametrize("m", [1, 8, 30, 100, 200, 700, 3000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_shapes_are_right(layout, m):
    counts = [int(m * f) for f in (0.7, 1.3, 0.0, 1.0, 2.1)]
    routing = routing_of(layout, counts)
    for n, k in ((4096, 7168), (7168, 2048), (2048, 768)):
        made = random(routing, n, k)
        launch(routing, made, expected_m=m)
        assert_right(routing, made)


@pytest.mark.parametrize("num_groups", [1, 32, 33, *slow(2, 31, 64, 100, 511, 512)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_groups(layout, num_groups):
    """A warp looks at 32 of them at once."""
    counts = [0] * num_groups
    for i in {0, num_groups // 2, num_groups - 1}:
        counts[i] = 5 + i % 7
    for every in (counts, [1] * num_groups, [0] * num_groups):
        routing = routing_of(layout, every)
        launch_and_compare(routing, on_gpu(operands(routing, 72, 144)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_group_with_everything(layout):
    for group in (0, 17, 39):
        counts = [0] * 40
        counts[group] = 3000
        routing = routing_of(layout, counts)
        made = on_gpu(operands(routing, 264, 272))
        for m in (1, 75, 3000):
            launch_and_compare(routing, made, m)


def test_a_hundred_thousand_tokens_of_a_group():
    routing = by_offsets((100_000, 0, 3, 99_999), 3, 5)
    for m in (4, 50_000):
        launch_and_compare(routing, on_gpu(operands(routing, 136, 144)), m)


def test_weights_of_more_than_2_to_32_bytes():
    """The weights of DeepSeek-V3's layer take 7.5 GB; few groups are looked at."""
    groups, n, k = 256, 4096, 7168
    b = torch.empty(groups, n, k, dtype=torch.float8_e4m3fn, device="cuda")
    b_scale_inv = torch.empty(groups, n // 128, k // 128, device="cuda")
    for group in range(groups):
        data, scale_inv = quantize_128x128(torch.randn(n, k, device="cuda"))
        b[group].copy_(data)
        b_scale_inv[group].copy_(scale_inv)
    assert b.numel() > 2**32
    counts = [0] * groups
    for group in (0, 73, 74, 146, 147, 255):
        counts[group] = 20
    for layout in (GroupLayout.OFFSETS, GroupLayout.MASKED):
        routing = routing_of(layout, counts)
        made = random(routing, 8, k)
        d = made.d.new_full((*routing.rows_of_a(), n), UNTOUCHED)
        made = made._replace(b=b, b_scale_inv=b_scale_inv, d=d)
        launch(routing, made)
        assert_right(routing, made)


def test_d_of_more_than_2_to_31_elements():
    counts = (2**15 + 7, 0, 2**15 - 7)
    routing, n = by_offsets(counts), 2**15 + 8
    made = on_gpu(operands(by_offsets((1, 1, 1)), n, 16))
    a = torch.randint(-3, 4, (sum(counts), 16), device="cuda").float().to(torch.float8_e4m3fn)
    scales = kernels.tma_aligned(torch.ones(sum(counts), 1, device="cuda"))
    d = torch.full((sum(counts), n), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
    assert d.numel() > 2**31
    launch(routing, made._replace(a=a, a_scale_inv=scales, d=d), expected_m=20_000)
    for group, first in ((0, 0), (0, 2**15), (2, 2**15 + 7), (2, sum(counts) - 90)):
        rows = slice(first, first + 7)
        weights = made.b[group].double() * made.b_scale_inv[group].repeat_interleave(128, 0)[:n]
        assert torch.equal(d[rows], (a[rows].double() @ weights.T).bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [1, 30, 700])
def test_a_row_depends_on_no_other_and_no_run_on_another(layout, m):
    """A row does not even depend on where in a tile it is."""
    counts = (m, 0, m + 77, 3)
    routing = routing_of(layout, counts)
    made, bounds = random(routing, 520, 1040), routing.bounds_on("cuda")
    launch(routing, made, bounds, m)
    first = made.d.clone()
    for _ in range(20):
        made.d.fill_(UNTOUCHED)
        launch(routing, made, bounds, m)
        assert torch.equal(made.d, first)
    if layout == GroupLayout.MASKED:
        return
    _, _, begin, end = routing.segments[2]
    for start in range(begin, begin + 9):
        some = by_offsets((0, 0, end - start, 0))
        rows = slice(start, end)
        part = Operands(
            made.a[rows].clone(), made.a_scale_inv[rows], made.b, made.b_scale_inv, first[rows] * 0
        )
        launch(some, part, expected_m=m)
        assert torch.equal(part.d, first[rows])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [4, 60, 1000])
@pytest.mark.usefixtures("new_driver")
def test_one_graph_serves_all_loads(layout, m):
    """The kernel is loaded and prepared while the graph is captured."""
    cases = routings_of_384_rows(layout)
    memory = on_gpu(operands(cases[0], 264, 528))
    bounds, graph = cases[0].bounds_on("cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(cases[0], memory, bounds, m)
    for routing in (*cases, *cases[::-1]):
        fresh = *on_gpu(operands(routing, 264, 528)), routing.bounds_on("cuda")
        for x, y in zip((*memory, bounds), fresh, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(memory.d, expected_of(routing, memory))


@pytest.mark.parametrize("m", [4, 60, 1000])
@pytest.mark.parametrize(
    ("layout", "bounds"),
    [
        (GroupLayout.OFFSETS, [9, 3, 200, 50, 2**31 - 1, -7, 20]),
        (GroupLayout.OFFSETS, [-(2**31), 2**31 - 1, -1, -5, 0, 500, 499]),
        (GroupLayout.MASKED, [-1, 2**31 - 1, 0, -(2**31), 80, 81]),
        (GroupLayout.ROWS, [6, -2] * 150),
        (GroupLayout.ROWS, [2**31 - 1] * 128 + [-(2**31)] * 128 + [5] * 44),
        (GroupLayout.SEGMENTS, [6, -2] * 150),
        (GroupLayout.SEGMENTS, [2**31 - 1] * 128 + [-(2**31)] * 128 + [5] * 44),
        (GroupLayout.SEGMENTS, [3, 3, 5] * 100),
    ],
)
def test_numbers_that_break_the_rules_do_no_harm(layout, bounds, m):
    """On a GPU nobody checks them. `tests.kernels.sanitizer` shows that nothing else is read."""
    routing = routing_of(layout, (50,) * 6)._replace(segments=[])
    if layout in (GroupLayout.ROWS, GroupLayout.SEGMENTS):
        routing = routing._replace(num_tokens=len(bounds))
    guard, made = 1 << 20, on_gpu(operands(routing, 136, 144))
    memory = torch.full((made.d.numel() + 2 * guard,), UNTOUCHED).bfloat16().cuda()
    made = made._replace(d=memory[guard:-guard].view(made.d.shape))
    launch(routing, made, torch.tensor(bounds, dtype=torch.int32, device="cuda"), m)
    torch.cuda.synchronize()
    assert bool((memory[:guard] == UNTOUCHED).all())
    assert bool((memory[-guard:] == UNTOUCHED).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("m", "family"), [(4, None), (60, None), *((1000, x) for x in (None, *MULTICAST))]
)
def test_a_programmatic_launch_waits_for_what_it_reads(layout, m, family):
    """It starts when the kernel that quantizes its tokens does, while others are in that memory."""
    routing = routing_of(layout, (400, 0, 1300, 10))
    made, bounds = random(routing, 264, 2064), routing.bounds_on("cuda")
    of_group = routing.is_of_group().cuda()
    with choosing(families.GROUPED_FAMILIES.get(family)):
        for _ in range(20):
            x = torch.randn(*routing.rows_of_a(), 2064, device="cuda")
            d = [torch.full_like(made.d, UNTOUCHED) for _ in range(2)]
            torch.cuda.synchronize()
            a = quantize_1x128(x)
            late = made._replace(a=a.data, a_scale_inv=a.scale_inv, d=d[0])
            launch(routing, late, bounds, m, programmatic=True)
            torch.cuda.synchronize()
            launch(routing, late._replace(d=d[1]), bounds, m)
            assert torch.equal(d[0][of_group], d[1][of_group])
            del a, late
