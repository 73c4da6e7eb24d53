"""The grouped GEMMs as they are launched, beyond what `test_launch.py` says of all GEMMs."""

import pytest
import torch

from moefp8 import kernels
from moefp8.kernels import jit, m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.operands import Operands
from moefp8.kernels.gemm.sm90 import heuristic
from tests.fakes.emulated_gemm import layout_of
from tests.fakes.emulator import emulated
from tests.gpu import NUM_SMS
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    by_offsets,
    by_rows,
    expected_of,
    finding_segments,
    launch,
    launch_and_compare,
    masked,
    operands,
    routing_of,
    routings_of_384_rows,
    run_op,
)
from tests.kernels.gemm.sm90 import families

LAYOUTS = tuple(GroupLayout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_of_weights_are_taken_where_they_lie(gpu, layout):
    """gate_up_proj has such halves: its first rows are the gate's."""
    routing = routing_of(layout, (3, 0, 20))
    a, a_scale_inv, b, b_scale_inv, _ = operands(routing, 512, 384)
    for first in (0, 256):
        weights, blocks = b[:, first : first + 256], b_scale_inv[:, first // 128 :][:, :2]
        d = torch.empty(*routing.rows_of_a(), 256, dtype=torch.bfloat16)
        launch_and_compare(routing, Operands(a, a_scale_inv, weights, blocks, d))
        made = gpu.launched[-1]
        assert made.b_maps[0].address == weights.data_ptr()
        assert made.b_maps[0].strides == [384, 512 * 384]
        assert made.arguments.weight_scales == blocks.data_ptr()
        assert made.arguments.groups.weight_scale_stride == 4 * 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 5, 130])
def test_rows_of_no_group_survive_a_copy_of_d(gpu, layout, n):
    """Their bits do, whatever they hold."""
    routing = routing_of(layout, (5, 0, 9), 5)
    made = operands(routing, n, 40)
    others = ~routing.is_of_group()
    made.d.copy_(torch.randint(-(2**15), 2**15, made.d.shape).short().view(torch.bfloat16))
    before = made.d.clone()
    launch(routing, made)
    assert torch.equal(made.d[others].view(torch.int16), before[others].view(torch.int16))
    assert torch.equal(made.d[~others], expected_of(routing, made)[~others])
    assert gpu.gemms[0].d_map.address != made.d.data_ptr()


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != GroupLayout.MASKED])
@pytest.mark.parametrize("n", [5, 136])
def test_padding_becomes_zeros_where_it_is_asked_for(gpu, layout, n):
    """On a GPU and a CPU, also where the kernel writes to a copy of d."""
    routing = routing_of(layout, (5, 0, 9), 300)
    bounds, made = routing.bounds_on(), operands(routing, n, 40)
    rows, offsets = (None, bounds) if layout == GroupLayout.OFFSETS else (bounds, None)
    expected = expected_of(routing, made)
    expected[~routing.is_of_group()] = 0
    for driver in (gpu, jit.Driver()):
        made.d.fill_(float("nan"))
        with jit.using(driver), finding_segments(layout == GroupLayout.SEGMENTS):
            m_grouped_fp8_gemm_nt_contiguous(
                made[:2], made[2:4], made.d, rows, expert_offsets=offsets, zero_padding=True
            )
        assert torch.equal(made.d, expected)
    (launched,) = gpu.gemms
    assert layout_of(launched) == layout
    assert (launched.d_map.address == made.d.data_ptr()) == (n % 8 == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["two CTAs on an SM", "weights are rows", "multicast"])
def test_pairs_of_tiles_are_walked_whole_also_the_last(layout, family):
    routing = routing_of(layout, (300, 0, 1, 65, 8, 64 * 6))
    with emulated(families.GROUPED_FAMILIES[family]) as gpu:
        launch_and_compare(routing, operands(routing, 200, 48))
    assert len(gpu.gemms) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expected_m_changes_no_result(gpu, layout):
    routing = routing_of(layout, (70, 0, 1, 130))
    made = operands(routing, 136, 272)
    for expected_m in (1, 2, 8, 16, 33, 64, 65, 128, 200, 1000, 100_000):
        launch_and_compare(routing, made, None, expected_m)
        limit = 128 if layout == GroupLayout.ROWS else routing.num_tokens
        expected = min(expected_m, limit)
        launched = gpu.launched[-1]
        shape = expected, limit, 4, 136, 272, NUM_SMS
        assert launched.config == heuristic.choose_grouped_config(*shape)
        guessed = kernels.ceil_div(expected, launched.config.tile[0])
        assert launched.arguments.groups.expected_tiles == guessed
        assert layout_of(launched) == layout
        l2_bytes = 128 if expected_m <= 64 else 256
        assert {x.l2_bytes for x in launched.a_maps} == {l2_bytes}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [None, *families.GROUPED_FAMILIES])
def test_a_launch_serves_all_routings(layout, family):
    """A CUDA graph may do so too: what the device is told depends on no number in `bounds`."""
    config, cases = families.GROUPED_FAMILIES.get(family), routings_of_384_rows(layout)
    memory = None
    with emulated(config) as gpu:
        for routing in cases:
            fresh = (*operands(routing, 200, 144), routing.bounds_on())
            memory = memory or fresh
            for x, y in zip(memory, fresh, strict=True):
                x.copy_(y)
            *made, bounds = memory
            launch_and_compare(routing, Operands(*made), bounds)
        first, *others = gpu.gemms
        assert len(others) == len(cases) - 1
        assert all(bytes(x.arguments) == bytes(first.arguments) for x in others)
        assert {x.grid for x in others} == {first.grid}
        assert len(gpu.prepared()) == 1


def test_without_groups_nothing_is_launched(gpu):
    """That is no error, neither here nor on a CPU."""
    made = operands(by_offsets((3,)), 8, 16)
    made = made._replace(b=made.b[:0], b_scale_inv=made.b_scale_inv[:0])
    run_op(by_offsets(()), made, torch.zeros(1, dtype=torch.int32))
    assert gpu.launched == []


def test_the_ops_check_their_arguments(gpu):
    routing = by_offsets((3, 0, 9))
    (*pairs, d), bounds = operands(routing, 8, 16), routing.bounds_on()
    a, b = pairs[:2], pairs[2:]
    for zero in (False, True):
        with pytest.raises(
            ValueError, match=r"expert_offsets must be \[G \+ 1\] = \[4\], got \[3\]"
        ):
            m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=bounds[:3], zero_padding=zero)
        assert (d == UNTOUCHED).all()
    for both, came in (({}, "neither"), ({"expert_offsets": bounds}, "both")):
        layout = bounds if both else None
        with pytest.raises(ValueError, match=f"got {came}"):
            m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, **both)
    routing = masked((3, 9))
    *pairs, d = operands(routing, 8, 16)
    with pytest.raises(TypeError, match="masked_m must be int32, got int64"):
        m_grouped_fp8_gemm_nt_masked(pairs[:2], pairs[2:], d, routing.bounds_on().long(), 4)
    assert gpu.launched == []


def test_the_same_memory_may_be_of_another_kind(gpu):
    """[G + 1] offsets and [M] rows look alike where M = G + 1."""
    made = operands(by_offsets((1, 2)), 8, 16)
    bounds = torch.tensor([0, 1, 3], dtype=torch.int32)
    launch_and_compare(by_offsets((1, 2)), made, bounds)
    bounds.copy_(torch.tensor([1, 1, -1]))
    routing = by_rows([(1, 2)], 2, 1)
    launch_and_compare(routing, made, bounds)
    assert len(gpu.prepared()) == 2
