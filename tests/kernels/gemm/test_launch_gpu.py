"""All GEMMs on a GPU: exact sums bit by bit."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.testing import sizes
from tests.gpu import NEEDS_GPU, NEEDS_TWO_GPUS
from tests.kernels.gemm.cases import BIASES, choosing, placements
from tests.kernels.gemm.gpu_cases import MULTICAST, SOME_SHAPES, launch_and_compare, on_gpu
from tests.kernels.gemm.grouped_cases import (
    LAYOUTS,
    UNTOUCHED,
    all_routings,
    bias_of,
    dense,
    expected_of,
    launch,
    operands,
    routing_of,
    run_op,
)
from tests.kernels.gemm.sm90.families import GROUPED_FAMILIES

pytestmark = NEEDS_GPU


@settings(max_examples=250)
@pytest.mark.slow
@given(
    routing=all_routings(),
    n=sizes(500, 1),
    k=sizes(1000, 1),
    placement=placements(),
    bias=st.sampled_from(BIASES),
    m=st.sampled_from((1, 10, 40, 65, 300, 5000)),
)
def test_any_routing_and_layout_is_right(routing, n, k, placement, bias, m):
    made = placement.of(on_gpu(operands(routing, n, k)))
    bias = None if routing.layout or bias is None else bias_of(bias, n).cuda()
    launch_and_compare(routing, made, m, bias)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_prepared_launch_serves_new_addresses_and_streams(new_driver, layout):
    """It is also our kernel that the op takes."""
    routing = routing_of(layout, (5, 0, 130))
    samples = [(on_gpu(operands(routing, 200, 272)), routing.bounds_on("cuda")) for _ in range(4)]
    bias = None if layout else bias_of(torch.bfloat16, 200).cuda()
    torch.cuda.synchronize()
    for made, bounds in (*samples, *samples):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            made.d.fill_(UNTOUCHED)
            run_op(routing, made, bounds, 50, bias)
        stream.synchronize()
        assert torch.equal(made.d, expected_of(routing, made, bias))
        assert len(new_driver.prepared()) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_sizes(layout):
    for counts, n, k in (((0, 0), 5, 9), ((5, 1), 0, 9), ((5, 0, 1), 7, 0), ((0, 0), 0, 0)):
        routing = routing_of(layout, counts)
        for bias in (None,) if layout else BIASES:
            added = None if bias is None else bias_of(bias, n).cuda()
            launch_and_compare(routing, on_gpu(operands(routing, n, k)), bias=added)


def test_streams_and_threads_run_side_by_side(new_driver):
    """Each thread prepares its own launches."""
    some = (5, 0, 9), (300, 20, 0, 700)
    cases = [(routing_of(x, counts), 520, 1040) for x in GroupLayout for counts in some]
    cases += [(dense(m), n, k) for m, n, k in SOME_SHAPES]
    samples = [
        (routing, on_gpu(operands(routing, n, k)), routing.bounds_on("cuda"), torch.cuda.Stream())
        for routing, n, k in cases
    ]
    torch.cuda.synchronize()

    def work(sample) -> int:
        routing, made, bounds, stream = sample
        with torch.cuda.stream(stream):
            for _ in range(50):
                made.d.fill_(UNTOUCHED)
                launch(routing, made, bounds)
        stream.synchronize()
        return len(new_driver.prepared())

    with ThreadPoolExecutor(len(samples)) as pool:
        assert all(pool.map(work, samples))
    assert not new_driver.prepared()
    for routing, made, *_ in samples:
        assert torch.equal(made.d, expected_of(routing, made))


@NEEDS_TWO_GPUS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_gpu_than_the_current_one(layout):
    routing = routing_of(layout, (5, 0, 130))
    made = on_gpu(operands(routing, 200, 264), "cuda:1")
    launch(routing, made)
    assert torch.equal(made.d, expected_of(routing, made))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counts", [(3,), (5, 0, 300, 64, 700)])
@pytest.mark.parametrize("family", [None, *MULTICAST])
@pytest.mark.usefixtures("new_driver")
def test_a_limit_of_sms_changes_no_result(layout, counts, family):
    if family and not layout:
        pytest.skip("multicast is for groups")
    routing = routing_of(layout, counts)
    made = on_gpu(operands(routing, 1000, 1040))
    with choosing(GROUPED_FAMILIES.get(family)):
        for limit in (1, 2, 3, 8, 131, 10_000, None):
            kernels.set_num_sms(limit)
            for m in (4, 60, 1000) if layout and not family else (300,):
                launch_and_compare(routing, made, m)
