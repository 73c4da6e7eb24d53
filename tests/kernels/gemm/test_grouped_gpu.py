"""The grouped GEMMs on a GPU: exact sums bit by bit, random data against FP64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels.gemm import heuristic
from moefp8.kernels.gemm.config import GemmConfig, GroupLayout
from moefp8.kernels.gemm.operands import Operands
from moefp8.quant import quantize_1x128, quantize_128x128
from moefp8.testing import assert_matches_reference, sizes
from tests.gpu import NEEDS_GPU, NEEDS_TWO_GPUS, no_synchronisation
from tests.kernels import sanitizer as sanitizer_cases
from tests.kernels.gemm import grouped_cases
from tests.kernels.gemm.cases import GROUPED_PLACES, GROUPED_SCALE_PLACES, stacked
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    Routing,
    by_offsets,
    expected_of,
    launch,
    launch_grouped_gemm,
    masked,
    operands,
    routing_of,
    routings,
    run_op,
)

pytestmark = NEEDS_GPU
LAYOUTS = tuple(GroupLayout)


def on_gpu(made: Operands, device: str = "cuda") -> Operands:
    """With scales in the order that they had."""
    return Operands(*(x.to(device) for x in made))


def launch_and_compare(routing: Routing, made: Operands, m: int = 4) -> None:
    grouped_cases.launch_and_compare(routing, made, None, m, no_synchronisation)


def random(routing: Routing, n: int, k: int, octaves: float = 0.0) -> Operands:
    """Normal numbers; scales spread over `octaves` powers of two; NaN in tokens of no group."""
    a = quantize_1x128(torch.randn(*routing.rows_of_a(), k, device="cuda"))
    b = quantize_128x128(torch.randn(routing.num_groups, n, k, device="cuda"))
    for scale_inv in (a.scale_inv, b.scale_inv):
        scale_inv.mul_(torch.exp2((torch.rand(scale_inv.shape, device="cuda") - 0.5) * octaves))
    of_none = ~routing.is_of_group().cuda()
    a.data.view(torch.uint8)[of_none] = 0x7F
    a.scale_inv[of_none] = torch.nan
    d = torch.full((*routing.rows_of_a(), n), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
    return Operands(*a, *b, d)


def assert_right(routing: Routing, made: Operands) -> None:
    of_group = routing.is_of_group().cuda()
    assert bool((made.d[~of_group] == UNTOUCHED).all())
    for group, matrix, begin, end in routing.segments:
        if begin == end:
            continue
        x, x_scale_inv, d = (
            (y[matrix] if y.ndim == 3 else y)[begin:end] for y in (made.a, made.a_scale_inv, made.d)
        )
        (rows, k), (n, _) = x.shape, made.b[group].shape
        scales = made.b_scale_inv[group].repeat_interleave(128, 0)[:n]
        weights = made.b[group].double() * scales.repeat_interleave(128, 1)[:, :k].double()
        tokens = x.double() * x_scale_inv.repeat_interleave(128, 1)[:, :k].double()
        expected, size = tokens @ weights.T, tokens.abs() @ weights.abs().T
        excess = (d.double() - expected).abs() - expected.abs() * 2**-8 - size * 2**-11
        assert bool((excess <= 0).all()), f"group {group} of {rows} tokens"
        if n >= 64:
            assert_matches_reference(d, expected)


@settings(max_examples=150)
@given(
    routing=routings(),
    n=sizes(300, 1),
    k=sizes(500, 1),
    places=st.tuples(*[st.sampled_from(sorted(GROUPED_PLACES))] * 3),
    scale_places=st.tuples(*[st.sampled_from(sorted(GROUPED_SCALE_PLACES))] * 2),
    m=st.sampled_from((1, 10, 40, 65, 300, 5000)),
)
def test_any_routing_and_layout_is_right(routing, n, k, places, scale_places, m):
    a, a_scale_inv, b, b_scale_inv, d = on_gpu(operands(routing, n, k))
    a, b, d = (
        stacked(GROUPED_PLACES[place].make, x) for place, x in zip(places, (a, b, d), strict=True)
    )
    a_scale_inv, b_scale_inv = (
        stacked(GROUPED_SCALE_PLACES[place], x)
        for place, x in zip(scale_places, (a_scale_inv, b_scale_inv), strict=True)
    )
    launch_and_compare(routing, Operands(a, a_scale_inv, b, b_scale_inv, d), m)


@pytest.fixture
def choose(new_driver, monkeypatch):
    def take(config: GemmConfig) -> None:
        monkeypatch.setattr(heuristic, "choose_grouped_config", lambda *shape: config)

    return take


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sanitizer_cases.GROUPED_FAMILIES)
def test_every_family_is_right(name, layout, choose):
    """Also where it would not be chosen; multicast too, where neighbours have tokens or not."""
    choose(sanitizer_cases.GROUPED_FAMILIES[name])
    for i, counts in enumerate(
        (
            *((3,), (0, 77, 1, 0, 130, 5), (64, 128, 192, 63, 65, 127, 129, 191, 193)),
            *((0,) * 40, (*[0] * 33, 9, 0, 500, 1), (1, 2, 3) * 40, (1000, 0, 700)),
        )
    ):
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


@pytest.mark.parametrize("num_groups", [1, 2, 31, 32, 33, 64, 100, 511, 512])
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
    """Those of DeepSeek-V3's layer, 7.5 GB; few groups are looked at."""
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
    """Not even on where in a tile it is."""
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
    """Also when the kernel is loaded and prepared while the graph is captured."""
    num_tokens, n, k = 512, 264, 528
    loads = [(512, 0, 0), (0, 0, 0), (0, 512, 0), (100, 200, 128), (1, 0, 1), (128, 127, 256)]

    def made_of(counts) -> tuple[Routing, Operands]:
        routing = routing_of(layout, counts, 0)
        if layout == GroupLayout.MASKED:
            routing = masked(counts, num_tokens - max(counts))
        elif layout == GroupLayout.OFFSETS:
            routing = by_offsets(counts, 0, num_tokens - sum(counts))
        else:
            spare = num_tokens - len(routing.bounds)
            bounds = routing.bounds + [-1] * spare
            routing = routing._replace(bounds=bounds, num_tokens=num_tokens)
        return routing, on_gpu(operands(routing, n, k))

    routing, memory = made_of(loads[0])
    bounds, graph = routing.bounds_on("cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(routing, memory, bounds, m)
    for counts in (*loads, *loads[::-1]):
        routing, fresh = made_of(counts)
        for x, y in zip((*memory, bounds), (*fresh, routing.bounds_on("cuda")), strict=True):
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
    ],
)
def test_numbers_that_break_the_rules_do_no_harm(layout, bounds, m):
    """On a GPU nobody checks them. That nothing else is read, `sanitizer_cases` shows."""
    routing = routing_of(layout, (50,) * 6)._replace(segments=[])
    if layout == GroupLayout.ROWS:
        routing = routing._replace(num_tokens=len(bounds))
    guard, made = 1 << 20, on_gpu(operands(routing, 136, 144))
    memory = torch.full((made.d.numel() + 2 * guard,), UNTOUCHED).bfloat16().cuda()
    made = made._replace(d=memory[guard:-guard].view(made.d.shape))
    launch(routing, made, torch.tensor(bounds, dtype=torch.int32, device="cuda"), m)
    torch.cuda.synchronize()
    assert bool((memory[:guard] == UNTOUCHED).all())
    assert bool((memory[-guard:] == UNTOUCHED).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_prepared_launch_serves_new_addresses_and_streams(new_driver, layout):
    """And it is our kernel that the op takes."""
    routing = routing_of(layout, (5, 0, 130))
    samples = [(on_gpu(operands(routing, 200, 272)), routing.bounds_on("cuda")) for _ in range(4)]
    torch.cuda.synchronize()
    for made, bounds in (*samples, *samples):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            made.d.fill_(UNTOUCHED)
            run_op(routing, made, bounds, 50)
        stream.synchronize()
        assert torch.equal(made.d, expected_of(routing, made))
        assert len(new_driver.prepared()) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_sizes(layout):
    for counts, n, k in (((0, 0), 5, 9), ((5, 1), 0, 9), ((5, 0, 1), 7, 0), ((0, 0), 0, 0)):
        routing = routing_of(layout, counts)
        launch_and_compare(routing, on_gpu(operands(routing, n, k)))


def test_streams_and_threads_run_side_by_side():
    made = []
    for layout in LAYOUTS:
        for counts in ((5, 0, 9), (300, 20, 0, 700)):
            routing = routing_of(layout, counts)
            made.append((routing, on_gpu(operands(routing, 520, 1040)), torch.cuda.Stream()))
    bounds = [routing.bounds_on("cuda") for routing, *_ in made]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        routing, of_thread, stream = made[i]
        with torch.cuda.stream(stream):
            for _ in range(50):
                of_thread.d.fill_(UNTOUCHED)
                launch(routing, of_thread, bounds[i])
        stream.synchronize()

    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(work, range(len(made))))
    for routing, of_thread, _ in made:
        assert torch.equal(of_thread.d, expected_of(routing, of_thread))


@NEEDS_TWO_GPUS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_gpu_than_the_current_one(layout):
    routing = routing_of(layout, (5, 0, 130))
    made = on_gpu(operands(routing, 200, 264), "cuda:1")
    launch(routing, made)
    assert torch.equal(made.d, expected_of(routing, made))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("new_driver")
def test_a_limit_of_sms_changes_no_result(layout):
    routing = routing_of(layout, (5, 0, 300, 64))
    made = on_gpu(operands(routing, 1000, 1040))
    for limit in (1, 8, 131, 10_000, None):
        kernels.set_num_sms(limit)
        for m in (4, 60, 1000):
            launch_and_compare(routing, made, m)


SHARED_TOKENS = "two buffers, multicast", "three math groups, multicast"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHARED_TOKENS)
def test_a_limit_of_sms_changes_no_result_of_clusters(layout, name, choose):
    choose(sanitizer_cases.GROUPED_FAMILIES[name])
    routing = routing_of(layout, (5, 0, 300, 64, 700))
    made = on_gpu(operands(routing, 1000, 1040))
    for limit in (2, 3, 131, None):
        kernels.set_num_sms(limit)
        launch_and_compare(routing, made, 300)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [4, 60, 1000, *SHARED_TOKENS])
def test_a_programmatic_launch_waits_for_what_it_reads(layout, m, choose):
    """It starts when the kernel that quantizes its tokens does, while others are in that memory."""
    if m in SHARED_TOKENS:
        choose(sanitizer_cases.GROUPED_FAMILIES[m])
        m = 1000
    routing = routing_of(layout, (400, 0, 1300, 10))
    made, bounds = random(routing, 264, 2064), routing.bounds_on("cuda")
    of_group = routing.is_of_group().cuda()
    for _ in range(20):
        x = torch.randn(*routing.rows_of_a(), 2064, device="cuda")
        d = [torch.full_like(made.d, UNTOUCHED) for _ in range(2)]
        torch.cuda.synchronize()
        a = quantize_1x128(x)
        late = made._replace(a=a.data, a_scale_inv=a.scale_inv, d=d[0])
        launch_grouped_gemm("op", layout, late, bounds, m, programmatic=True)
        torch.cuda.synchronize()
        launch(routing, late._replace(d=d[1]), bounds, m)
        assert torch.equal(d[0][of_group], d[1][of_group])
        del a, late
