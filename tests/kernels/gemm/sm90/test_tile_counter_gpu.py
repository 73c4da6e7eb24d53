"""Clusters of grouped GEMMs that take tiles from a counter, on a GPU: results are the same bits."""

import pytest
import torch

from moefp8.kernels import (
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    set_num_sms,
)
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.segments import list_bytes
from moefp8.kernels.gemm.sm90.tile_counter import COUNTER_BYTES
from tests.gpu import NEEDS_GPU, no_synchronisation, poison, slow
from tests.kernels.gemm.cases import choosing
from tests.kernels.gemm.gpu_cases import assert_right, launch_and_compare, on_gpu, random
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    Routing,
    expected_of,
    operands,
    routing_of,
    taking_tiles,
)
from tests.kernels.gemm.sm90.families import COUNTS, GROUPED_FAMILIES

pytestmark = NEEDS_GPU

UNEVEN = (700, 3, 0, 512, 130, 1, 900, 64, 257, 0, 333, 1000)
N, K = 4096, 2560


def call(routing: Routing, made, bounds: torch.Tensor) -> None:
    """By the op's public name."""
    a, b, d = made[:2], made[2:4], made.d
    if routing.layout == GroupLayout.MASKED:
        m_grouped_fp8_gemm_nt_masked(a, b, d, bounds, 325)
    elif routing.layout == GroupLayout.OFFSETS:
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=bounds)
    else:
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, bounds)


LAYOUTS = [GroupLayout.OFFSETS, GroupLayout.MASKED, GroupLayout.SEGMENTS]


@pytest.mark.parametrize("layout", GroupLayout)
@pytest.mark.parametrize("family", GROUPED_FAMILIES)
@pytest.mark.parametrize("limit", [2, *slow(6, None)])
def test_sums_are_exact(layout, family, limit):
    """Bit by bit what FP64 gives, however few clusters take all tiles."""
    set_num_sms(limit)
    try:
        with choosing(GROUPED_FAMILIES[family]), taking_tiles(True):
            for counts in (*COUNTS, UNEVEN[:6]):
                routing = routing_of(layout, counts)
                made = on_gpu(operands(routing, 712, 272))
                for _ in range(3):
                    launch_and_compare(routing, made, 100)
    finally:
        set_num_sms(None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("new_driver")
def test_bits_are_those_without_a_counter(layout):
    routing = routing_of(layout, UNEVEN)
    made, bounds = random(routing, N, K), routing.bounds_on("cuda")
    with taking_tiles(False):
        call(routing, made, bounds)
    expected = made.d.clone()
    assert_right(routing, made)
    with taking_tiles(True):
        for _ in range(6):  # the last ones by a graph
            made.d.fill_(UNTOUCHED)
            for size in (COUNTER_BYTES, list_bytes(routing.num_tokens)):
                poison("cuda", size)
            with no_synchronisation():
                call(routing, made, bounds)
            assert torch.equal(made.d, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("new_driver")
def test_calls_on_two_streams_have_counters_of_their_own(layout):
    cases = []
    for counts in (UNEVEN, UNEVEN[::-1]):
        routing = routing_of(layout, counts)
        made, bounds = random(routing, N, K), routing.bounds_on("cuda")
        with taking_tiles(False):
            call(routing, made, bounds)
        cases.append((routing, made, bounds, made.d.clone(), torch.cuda.Stream()))
    torch.cuda.synchronize()
    with taking_tiles(True):
        for _ in range(20):
            for routing, made, bounds, _, stream in cases:
                with torch.cuda.stream(stream):
                    made.d.fill_(UNTOUCHED)
                    call(routing, made, bounds)
        torch.cuda.synchronize()
    for _, made, _, expected, _ in cases:
        assert torch.equal(made.d, expected)


@pytest.mark.parametrize("layout", [GroupLayout.OFFSETS, GroupLayout.MASKED])
@pytest.mark.usefixtures("new_driver")
def test_one_graph_serves_all_loads(layout):
    orders = UNEVEN, UNEVEN[::-1], sorted(UNEVEN), [325] * 12
    routings = [routing_of(layout, counts, 0) for counts in orders]
    most = max(x.num_tokens for x in routings)
    routings = [x._replace(num_tokens=most) for x in routings]
    memory = on_gpu(operands(routings[0], 712, 272))
    bounds, graph = routings[0].bounds_on("cuda"), torch.cuda.CUDAGraph()
    with taking_tiles(True), torch.cuda.graph(graph):
        for _ in range(2):
            call(routings[0], memory, bounds)
    for routing in (*routings, *routings[::-1]):
        fresh = *on_gpu(operands(routing, 712, 272)), routing.bounds_on("cuda")
        for x, y in zip((*memory, bounds), fresh, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(memory.d, expected_of(routing, memory))
