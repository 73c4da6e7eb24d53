"""The grouped GEMMs as they are launched, without a GPU: see `tests/fakes/emulator.py`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels import jit, m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked
from moefp8.kernels.gemm import config as gemm_config
from moefp8.kernels.gemm.config import GroupLayout
from moefp8.kernels.gemm.operands import Operands
from moefp8.testing import sizes
from tests.fakes.emulated_gemm import layout_of
from tests.fakes.emulator import emulated
from tests.gpu import NUM_SMS
from tests.kernels import sanitizer as sanitizer_cases
from tests.kernels.gemm.cases import GROUPED_PLACES, GROUPED_SCALE_PLACES, flat, stacked
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    by_offsets,
    by_rows,
    expected_of,
    launch,
    launch_and_compare,
    launch_grouped_gemm,
    masked,
    only_groups_are_written,
    operands,
    routing_of,
    routings,
    run_op,
)

LAYOUTS = tuple(GroupLayout)


@settings(max_examples=200)
@given(
    routing=routings(),
    n=sizes(300, 1),
    k=sizes(500, 1),
    places=st.tuples(*[st.sampled_from(sorted(GROUPED_PLACES))] * 3),
    scale_places=st.tuples(*[st.sampled_from(sorted(GROUPED_SCALE_PLACES))] * 2),
    bounds_step=st.sampled_from((1, 2)),
    expected_m=st.sampled_from((1, 40, 64, 65, 5000)),
)
def test_every_layout_is_addressed_rightly(
    routing, n, k, places, scale_places, bounds_step, expected_m
):
    a, a_scale_inv, b, b_scale_inv, d = operands(routing, n, k)
    a, b, d = (
        stacked(GROUPED_PLACES[place].make, x) for place, x in zip(places, (a, b, d), strict=True)
    )
    a_scale_inv, b_scale_inv = (
        stacked(GROUPED_SCALE_PLACES[place], x)
        for place, x in zip(scale_places, (a_scale_inv, b_scale_inv), strict=True)
    )
    bounds = routing.bounds_on().repeat_interleave(bounds_step)[::bounds_step]
    made = Operands(a, a_scale_inv, b, b_scale_inv, d)
    with emulated() as gpu:
        launch_and_compare(routing, made, bounds, expected_m)
    assert len(gpu.launched) == (d.numel() > 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", GROUPED_PLACES)
def test_what_tma_can_address_is_not_copied(gpu, layout, place):
    routing = routing_of(layout, (5, 0, 9))
    a, a_scale_inv, b, b_scale_inv, d = operands(routing, 48, 256)
    made, fits = GROUPED_PLACES[place]
    a, b, d = (stacked(made, x) for x in (a, b, d))
    launch_and_compare(routing, Operands(a, a_scale_inv, b, b_scale_inv, d))
    (made,) = gpu.launched
    for x, its_map in zip((a, b, d), (made.a_maps[0], made.b_maps[0], made.d_map), strict=True):
        # What is at odd steps is copied if there are two.
        assert (its_map.address == x.data_ptr()) == (fits or (place == "odd steps" and x.ndim == 2))
    assert made.arguments.weight_scales == b_scale_inv.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("place", "copied"),
    [
        *(("as quantized", False), ("wider", False), ("halves", False), ("rows in turn", False)),
        *(("K innermost", True), ("odd", True), ("steps of 2", True)),
    ],
)
def test_scales_are_copied_only_if_they_must(gpu, layout, place, copied):
    routing = routing_of(layout, (5, 0, 9))
    a, a_scale_inv, b, b_scale_inv, d = operands(routing, 48, 512)
    a_scale_inv, b_scale_inv = (
        stacked(GROUPED_SCALE_PLACES[place], x) for x in (a_scale_inv, b_scale_inv)
    )
    launch_and_compare(routing, Operands(a, a_scale_inv, b, b_scale_inv, d))
    (made,) = gpu.launched
    assert (made.scale_map.address != a_scale_inv.data_ptr()) == copied
    assert made.arguments.weight_scales == b_scale_inv.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_of_weights_are_taken_where_they_lie(gpu, layout):
    """As of gate_up_proj, whose first rows are the gate's."""
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
@pytest.mark.parametrize("stride", [0, 1, 7, 2**50])
def test_what_one_row_or_one_group_says_of_its_stride_is_void(gpu, layout, stride):
    routing = routing_of(layout, (1,), 0)
    made = operands(routing, 8, 112)
    void = (
        x.as_strided(x.shape, [stride if x.shape[i] == 1 else x.stride(i) for i in range(x.ndim)])
        for x in made
    )
    launch_and_compare(routing, Operands(*void))
    (launched,) = gpu.launched
    maps = launched.a_maps[0], launched.scale_map, launched.b_maps[0], launched.d_map
    tensors = made.a, made.a_scale_inv, made.b, made.d
    assert [x.address for x in maps] == [x.data_ptr() for x in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 5, 130])
def test_rows_of_no_group_survive_a_copy_of_d(gpu, layout, n):
    """Whatever they hold: their bits do."""
    routing = routing_of(layout, (5, 0, 9), 5)
    made = operands(routing, n, 40)
    others = ~routing.is_of_group()
    made.d.copy_(torch.randint(-(2**15), 2**15, made.d.shape).short().view(torch.bfloat16))
    before = made.d.clone()
    launch(routing, made)
    assert torch.equal(made.d[others].view(torch.int16), before[others].view(torch.int16))
    assert torch.equal(made.d[~others], expected_of(routing, made)[~others])
    assert gpu.launched[0].d_map.address != made.d.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_padded_d_is_not_copied(gpu, layout):
    routing = routing_of(layout, (5, 0, 9), 5)
    made = operands(routing, 5, 40)
    d = made.d.new_full((*made.d.shape[:-1], 8), UNTOUCHED)[..., :5]
    launch(routing, made._replace(d=d), d_is_padded=True)
    assert torch.equal(d, expected_of(routing, made))
    assert gpu.launched[0].d_map.address == d.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sanitizer_cases.GROUPED_FAMILIES)
@pytest.mark.parametrize("limit", [None, 1])
def test_every_family_is_launched_rightly(layout, name, limit):
    config = sanitizer_cases.GROUPED_FAMILIES[name]
    shapes = sanitizer_cases.shapes_of(config)
    for (_, n, k), counts in zip(shapes, sanitizer_cases.COUNTS, strict=True):
        routing = routing_of(layout, counts)
        with emulated(config) as gpu:
            kernels.set_num_sms(limit)
            launch_and_compare(routing, operands(routing, n, k))
        (launched,) = gpu.launched
        assert launched.config == config


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["two CTAs on an SM", "weights are rows", "multicast"])
def test_pairs_of_tiles_are_walked_whole_also_the_last(layout, family):
    routing = routing_of(layout, (300, 0, 1, 65, 8, 64 * 6))
    with emulated(sanitizer_cases.GROUPED_FAMILIES[family]) as gpu:
        launch_and_compare(routing, operands(routing, 200, 48))
    assert len(gpu.launched) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expected_m_changes_no_result(gpu, layout):
    routing = routing_of(layout, (70, 0, 1, 130))
    made = operands(routing, 136, 272)
    for expected_m in (1, 2, 8, 16, 33, 64, 65, 128, 200, 1000, 100_000):
        launch_and_compare(routing, made, None, expected_m)
        limit = 128 if layout == GroupLayout.ROWS else routing.num_tokens
        expected = min(expected_m, limit)
        assert gpu.chosen[-1] == (expected, limit, 4, 136, 272, NUM_SMS)
        launched = gpu.launched[-1]
        guessed = kernels.ceil_div(expected, launched.config.tile[0])
        assert launched.arguments.groups.expected_tiles == guessed
        assert layout_of(launched) == layout
        l2_bytes = 128 if expected_m <= 64 else 256
        assert {x.l2_bytes for x in launched.a_maps} == {l2_bytes}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [None, *sanitizer_cases.GROUPED_FAMILIES])
def test_a_launch_serves_all_routings(layout, family):
    """So may a CUDA graph: what the device is told depends on no number in `bounds`."""
    m, config = 384, sanitizer_cases.GROUPED_FAMILIES.get(family)
    routings_of_kind = {
        GroupLayout.OFFSETS: [
            by_offsets((m, 0, 0)),
            by_offsets((0, 0, m)),
            by_offsets((0, 0, 0), 0, m),
            by_offsets((1, 2, 1), 77, m - 81),
            by_offsets((127, 130, 127)),
        ],
        GroupLayout.MASKED: [
            masked((m, 0, 0)),
            masked((m, m, m)),
            masked((0, 0, 0), m),
            masked((1, 2, 200), m - 200),
        ],
        GroupLayout.ROWS: [
            by_rows([(1, m)], 3),
            by_rows([(2, 100), (0, 128), (1, 1)], 3, 127),
            by_rows([(-1, m)], 3),
            by_rows([(0, 128), (-1, 128), (0, 128)], 3),
        ],
    }
    memory = None
    with emulated(config) as gpu:
        for routing in routings_of_kind[layout]:
            fresh = (*operands(routing, 200, 144), routing.bounds_on())
            memory = memory or fresh
            for x, y in zip(memory, fresh, strict=True):
                x.copy_(y)
            *made, bounds = memory
            launch_and_compare(routing, Operands(*made), bounds)
        first, *others = gpu.launched
        assert len(others) == len(routings_of_kind[layout]) - 1
        assert all(bytes(x.arguments) == bytes(first.arguments) for x in others)
        assert {x.grid for x in others} == {first.grid}
        assert len(gpu.prepared()) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_work_nothing_is_launched(gpu, layout):
    for counts, n, k in (((0, 0), 5, 9), ((5, 1), 0, 9), ((0, 0), 0, 0)):
        routing = routing_of(layout, counts, 0)
        launch(routing, operands(routing, n, k))
    assert gpu.launched == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", GROUPED_PLACES)
def test_without_k_rows_of_groups_are_zero(gpu, layout, place):
    routing = routing_of(layout, (3, 0, 130, 1))
    made = operands(routing, 7, 0)
    d = stacked(GROUPED_PLACES[place].make, made.d)
    launch_and_compare(routing, made._replace(d=d))
    assert gpu.launched == []


def test_scales_that_want_a_gradient_record_nothing(gpu):
    routing = by_offsets((3, 0, 9))
    for k in (0, 40):
        made = operands(routing, 7, k)
        scales = GROUPED_SCALE_PLACES["odd"](made.a_scale_inv[None])[0].requires_grad_()
        launch(routing, made._replace(a_scale_inv=scales))
        assert not made.d.requires_grad


def test_num_sms_limits_the_grid():
    config = gemm_config.GemmConfig(128, 64, 0, ctas_per_sm=2, grouped=True)
    routing = by_offsets((300, 0, 400))
    made = operands(routing, 640, 128)
    most = (700 // 128 + 2 * 3) * 10
    with emulated(gemm_config.with_most_stages(config)) as gpu:
        for limit in (None, 1, 5, 1000):
            kernels.set_num_sms(limit)
            launch_and_compare(routing, made)
        assert [x.grid for x in gpu.launched] == [most, 1, 5, most]
        assert [sms for *_, sms in gpu.chosen] == [NUM_SMS, 1, 5, NUM_SMS]


def test_also_the_first_launch_is_programmatic(gpu):
    routing = by_offsets((3, 0, 9))
    launch(routing, operands(routing, 8, 16), programmatic=True)
    assert gpu.launched[0].programmatic


def test_without_groups_nothing_is_launched(gpu):
    """As on a CPU, where that is no error."""
    made = operands(by_offsets((3,)), 8, 16)
    made = made._replace(b=made.b[:0], b_scale_inv=made.b_scale_inv[:0])
    run_op(by_offsets(()), made, torch.zeros(1, dtype=torch.int32))
    assert gpu.launched == []


@pytest.mark.parametrize("programmatic", [False, True])
def test_a_launch_says_whether_it_waits_for_the_kernel_before(gpu, programmatic):
    routing = by_offsets((300, 0, 400))
    made, bounds = operands(routing, 64, 128), routing.bounds_on()
    for _ in range(2):
        launch_and_compare(routing, made, bounds, programmatic=programmatic)
    assert gpu.launched[-1].programmatic == programmatic


@pytest.mark.usefixtures("gpu")
def test_sizes_beyond_the_coordinates_are_refused():
    with torch.device("meta"):
        a, d = (
            torch.empty(2**31, n, dtype=dtype)
            for n, dtype in ((16, kernels.E4M3), (8, torch.bfloat16))
        )
        scales, bounds = torch.ones(1, 1, 1), torch.empty(2, dtype=torch.int32)
        made = Operands(a, kernels.empty_tma_aligned([2**31, 1], "meta"), a[None, :8], scales, d)
    with pytest.raises(ValueError, match=r"^op: M, N and K must be .* got 2147483648, 8 and 16"):
        launch_grouped_gemm("op", GroupLayout.OFFSETS, made, bounds)


# ---- By the public names ----


@settings(max_examples=40)
@given(routing=routings(), n=sizes(140, 1), k=sizes(300, 1), expected_m=st.integers(-3, 500))
def test_the_ops_launch_what_they_were_given(routing, n, k, expected_m):
    made, bounds = operands(routing, n, k), routing.bounds_on()
    with emulated() as gpu, only_groups_are_written(routing, made.d):
        run_op(routing, made, bounds, expected_m)
        assert torch.equal(made.d, expected_of(routing, made))
    if gpu.chosen:
        mean = kernels.ceil_div(routing.num_tokens, routing.num_groups)
        limit, num_segments = routing.num_tokens, routing.num_groups
        if routing.layout == GroupLayout.MASKED:
            mean = min(max(expected_m, 1), routing.num_tokens)
        if routing.layout == GroupLayout.ROWS:  # 128 rows at most are known to be of one group
            limit, num_segments = 128, kernels.ceil_div(routing.num_tokens, 128)
        assert gpu.chosen == [(min(mean, limit), limit, num_segments, n, k, NUM_SMS)]


def test_the_ops_check_their_arguments(gpu):
    routing = by_offsets((3, 0, 9))
    (*pairs, d), bounds = operands(routing, 8, 16), routing.bounds_on()
    a, b = pairs[:2], pairs[2:]
    with pytest.raises(ValueError, match=r"expert_offsets must be \[G \+ 1\] = \[4\], got \[3\]"):
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=bounds[:3])
    for both, came in (({}, "neither"), ({"expert_offsets": bounds}, "both")):
        layout = bounds if both else None
        with pytest.raises(ValueError, match=f"got {came}"):
            m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, **both)
    routing = masked((3, 9))
    *pairs, d = operands(routing, 8, 16)
    with pytest.raises(TypeError, match="masked_m must be int32, got int64"):
        m_grouped_fp8_gemm_nt_masked(pairs[:2], pairs[2:], d, routing.bounds_on().long(), 4)
    assert gpu.launched == []


# ---- What is kept ----


def test_addresses_are_looked_at_in_each_call(gpu):
    routing = by_offsets((5, 0, 9))
    made = operands(routing, 48, 256)
    rows = flat(made.a.numel() + 16, made.a)
    for start in (0, 3, 16):
        moved = rows[start : start + made.a.numel()].view(made.a.shape).copy_(made.a)
        launch_and_compare(routing, made._replace(a=moved))
    assert len(gpu.chosen) == 1


def test_whatever_decides_a_launch_is_in_its_key(gpu):
    routing = by_offsets((2, 0, 4))
    made, bounds = operands(routing, 48, 256), routing.bounds_on()
    wide = stacked(GROUPED_PLACES["aligned columns"].make, made.a)
    apart = GROUPED_PLACES["halves"].make(made.b)
    scales = GROUPED_SCALE_PLACES["halves"](made.b_scale_inv)
    fewer = made._replace(a=made.a[:5], a_scale_inv=made.a_scale_inv[:5], d=made.d[:5])
    fewer_bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    rows = torch.zeros(6, dtype=torch.int32)

    def call(made=made, bounds=bounds, layout=GroupLayout.OFFSETS, expected_m=4, **options):
        return lambda: launch_grouped_gemm("op", layout, made, bounds, expected_m, **options)

    calls = [
        call(),
        call(expected_m=5),
        call(layout=GroupLayout.ROWS, bounds=rows),
        call(programmatic=True),
        call(d_is_padded=True),
        call(made._replace(a=wide)),
        call(made._replace(b=apart)),
        call(made._replace(b_scale_inv=scales)),
        call(fewer, fewer_bounds),
    ]
    for number, each in enumerate(calls, 1):
        each()
        assert len(gpu.prepared()) == number
        assert gpu.launched[-1].programmatic == (number == 4)
    kernels.set_num_sms(3)
    calls[0]()
    assert gpu.launched[-1].grid <= max(3, gpu.launched[-1].cluster)
    assert gpu.chosen[-1][-1] == 3
    assert len(gpu.prepared()) == len(calls) + 1
    for each in calls:
        each()
        each()
    assert len(gpu.launched) == 3 * len(calls) + 1


def test_the_same_memory_may_be_of_another_kind(gpu):
    """[G + 1] offsets and [M] rows look alike where M = G + 1."""
    made = operands(by_offsets((1, 2)), 8, 16)
    bounds = torch.tensor([0, 1, 3], dtype=torch.int32)
    launch_and_compare(by_offsets((1, 2)), made, bounds)
    bounds.copy_(torch.tensor([1, 1, -1]))
    routing = by_rows([(1, 2)], 2, 1)
    launch_and_compare(routing, made, bounds)
    assert len(gpu.chosen) == 2


def test_without_a_kernel_there_is_an_error(gpu, monkeypatch):
    def fail(kernel, device_index):
        raise jit.JitError("no usable NVRTC")

    routing = by_offsets((3, 0, 9))
    made = operands(routing, 8, 16)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "load", fail)
        with pytest.raises(jit.JitError, match="no usable NVRTC"):
            launch(routing, made)
    assert bool((made.d == UNTOUCHED).all())
    launch_and_compare(routing, made)  # once the cause is gone
