"""All GEMMs as they are launched, without a GPU: see `tests/fakes/emulator.py`."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels import jit
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.operands import Operands
from moefp8.kernels.gemm.sm90 import heuristic
from moefp8.testing import sizes
from tests.fakes.emulator import emulated
from tests.gpu import NUM_SMS
from tests.kernels.gemm.cases import (
    BIASES,
    GROUPED_PLACES,
    GROUPED_SCALE_PLACES,
    Placement,
    filled,
    flat,
    placements,
    stacked,
)
from tests.kernels.gemm.grouped_cases import (
    LAYOUTS,
    UNTOUCHED,
    Routing,
    all_routings,
    bias_of,
    dense,
    expected_of,
    launch,
    launch_and_compare,
    only_groups_are_written,
    operands,
    routing_of,
    run_op,
)
from tests.kernels.gemm.sm90 import families

DENSE_AND_GROUPED = (None, GroupLayout.OFFSETS)


# ---- Where operands lie ----


@settings(max_examples=300)
@given(
    routing=all_routings(),
    n=sizes(300, 1),
    k=sizes(500, 1),
    placement=placements(),
    bias=st.sampled_from(BIASES),
    step=st.sampled_from((1, 2)),
    expected_m=st.sampled_from((1, 40, 64, 65, 5000)),
)
def test_every_layout_is_addressed_rightly(routing, n, k, placement, bias, step, expected_m):
    """step: how far apart numbers of the bounds and of a bias lie in memory."""
    made, bounds = placement.of(operands(routing, n, k)), routing.bounds_on()
    bias = None if routing.layout else bias_of(bias, n)
    bounds, bias = (x if x is None else x.repeat_interleave(step)[::step] for x in (bounds, bias))
    with emulated() as gpu:
        launch_and_compare(routing, made, bounds, expected_m, bias)
    assert len(gpu.gemms) == (made.d.numel() > 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", GROUPED_PLACES)
def test_what_tma_can_address_is_not_copied(gpu, layout, place):
    routing = routing_of(layout, (5, 0, 9))
    made = operands(routing, 48, 256)
    made = Placement(place, "as quantized", place, "as quantized", place).of(made)
    launch_and_compare(routing, made)
    (launched,) = gpu.gemms
    maps = launched.a_maps[0], launched.b_maps[0], launched.d_map
    for x, its_map in zip((made.a, made.b, made.d), maps, strict=True):
        # What is at odd steps is copied if there are two.
        fits = GROUPED_PLACES[place].fits or (place == "odd steps" and x.ndim == 2)
        assert (its_map.address == x.data_ptr()) == fits
    assert launched.scale_map.address == made.a_scale_inv.data_ptr()
    assert launched.arguments.weight_scales == made.b_scale_inv.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("place", "copied"),
    [
        ("as quantized", False), ("wider", False), ("halves", False), ("rows in turn", False),
        ("K innermost", True), ("odd", True), ("steps of 2", True),
    ],
)  # fmt: skip
def test_scales_are_copied_only_if_they_must(gpu, layout, place, copied):
    routing = routing_of(layout, (5, 0, 9))
    made = operands(routing, 48, 512)
    a_scale_inv, b_scale_inv = (
        stacked(GROUPED_SCALE_PLACES[place], x) for x in (made.a_scale_inv, made.b_scale_inv)
    )
    launch_and_compare(routing, made._replace(a_scale_inv=a_scale_inv, b_scale_inv=b_scale_inv))
    (launched,) = gpu.gemms
    assert (launched.scale_map.address != a_scale_inv.data_ptr()) == copied
    assert launched.arguments.weight_scales == b_scale_inv.data_ptr()


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
    (launched,) = gpu.gemms
    maps = launched.a_maps[0], launched.scale_map, launched.b_maps[0], launched.d_map
    tensors = made.a, made.a_scale_inv, made.b, made.d
    assert [x.address for x in maps] == [x.data_ptr() for x in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_padded_d_is_not_copied(gpu, layout):
    routing = routing_of(layout, (5, 0, 9), 5)
    made = operands(routing, 5, 40)
    d = made.d.new_full((*made.d.shape[:-1], 8), UNTOUCHED)[..., :5]
    launch(routing, made._replace(d=d), d_is_padded=True)
    assert torch.equal(d, expected_of(routing, made))
    assert gpu.gemms[0].d_map.address == d.data_ptr()


# ---- Configurations ----

FAMILIES = {name: (None, config) for name, config in families.FAMILIES.items()}
FAMILIES |= {
    f"{layout.name}: {name}": (layout, config)
    for layout in GroupLayout
    for name, config in families.GROUPED_FAMILIES.items()
}


# With one SM, two of five, all grouped configs in one layout or another.
ON_ONE_SM = [family for i, family in enumerate(FAMILIES) if i % 5 in (0, 2)]


@pytest.mark.parametrize(
    ("limit", "family"), [*((None, x) for x in FAMILIES), *((1, x) for x in ON_ONE_SM)]
)
def test_every_family_is_launched_rightly(family, limit):
    layout, config = FAMILIES[family]
    shapes = families.shapes_of(config)
    for (m, n, k), counts, bias in zip(shapes, families.COUNTS, BIASES, strict=False):
        routing = routing_of(layout, counts) if layout else dense(m)
        with emulated(config) as gpu:
            kernels.set_num_sms(limit)
            bias = None if layout else bias_of(bias, n)
            launch_and_compare(routing, operands(routing, n, k), bias=bias)
        (launched,) = gpu.gemms
        assert launched.config == config


@pytest.mark.parametrize("layout", DENSE_AND_GROUPED)
def test_num_sms_limits_the_grid(layout):
    config = filled(128, 64, ctas_per_sm=2, grouped=layout is not None)
    routing = routing_of(layout, (300, 0, 400), 0)
    made = operands(routing, 640, 128)
    most = (700 // 128 + 2 * 3 if layout else 6) * 10
    with emulated(config) as gpu:
        for limit in (None, 1, 5, 1000):
            kernels.set_num_sms(limit)
            launch_and_compare(routing, made)
        assert [x.grid for x in gpu.launched] == [most, 1, 5, most]


@pytest.mark.parametrize("layout", DENSE_AND_GROUPED)
def test_configurations_are_chosen_for_the_sms_that_may_be_busy(gpu, layout):
    routing = routing_of(layout, (300, 0, 400), 0)
    made, found = operands(routing, 1024, 128), []
    for limit in (None, 1, 20, 1000):
        kernels.set_num_sms(limit)
        launch(routing, made, expected_m=300)
        num_sms = min(limit or NUM_SMS, NUM_SMS)
        sms = num_sms, num_sms == NUM_SMS
        if layout:
            found.append(heuristic.choose_grouped_config(300, 700, 3, 1024, 128, *sms))
        else:
            found.append(heuristic.choose_config(700, 1024, 128, *sms))
    assert [x.config for x in gpu.launched] == found
    assert len(set(found)) > 1


@pytest.mark.usefixtures("gpu")
def test_num_sms_is_checked_and_told(monkeypatch):
    for bad in (0, -3):
        with pytest.raises(ValueError, match=f"num_sms must be at least 1, .* got {bad}"):
            kernels.set_num_sms(bad)
    for bad in (1.5, True, "1"):
        with pytest.raises(TypeError, match=f"num_sms must be an int, .* got {bad!r}"):
            kernels.set_num_sms(bad)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert kernels.get_num_sms() == NUM_SMS
    kernels.set_num_sms(20)
    assert kernels.get_num_sms() == 20
    kernels.set_num_sms(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="there is no GPU"):
        kernels.get_num_sms()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("programmatic", [False, True])
def test_a_launch_says_whether_it_waits_for_the_kernel_before(gpu, layout, programmatic):
    routing = routing_of(layout, (300, 0, 400))
    made, bounds = operands(routing, 64, 128), routing.bounds_on()
    for _ in range(2):
        launch_and_compare(routing, made, bounds, programmatic=programmatic)
    expected = [programmatic]
    if layout == GroupLayout.SEGMENTS:  # the GEMM may start while its segments are found
        expected = [programmatic, True]
    assert [x.programmatic for x in gpu.launched] == expected * 2


# ---- Without work, and without a kernel ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_work_nothing_is_launched(gpu, layout):
    for counts, n, k in (((0, 0), 5, 9), ((5, 1), 0, 9), ((0, 0), 0, 0)):
        routing = routing_of(layout, counts, 0)
        for bias in (None,) if layout else BIASES:
            launch(routing, operands(routing, n, k), bias=bias_of(bias, n))
    assert gpu.launched == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", GROUPED_PLACES)
def test_without_k_rows_of_groups_are_zero_or_the_bias(gpu, layout, place):
    routing = routing_of(layout, (3, 0, 130, 1))
    made = operands(routing, 7, 0)
    made = made._replace(d=stacked(GROUPED_PLACES[place].make, made.d))
    for bias in (None,) if layout else BIASES:
        launch_and_compare(routing, made, bias=bias_of(bias, 7))
    assert gpu.launched == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("layout", DENSE_AND_GROUPED)
@pytest.mark.parametrize("k", [0, 40])
def test_what_wants_a_gradient_records_nothing(layout, k):
    routing = routing_of(layout, (3, 0, 9))
    made = operands(routing, 7, k)
    scales = stacked(GROUPED_SCALE_PLACES["odd"], made.a_scale_inv).requires_grad_()
    bias = None if layout else torch.randn(7, requires_grad=True)
    launch(routing, made._replace(a_scale_inv=scales), bias=bias)
    assert not made.d.requires_grad


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("layout", DENSE_AND_GROUPED)
def test_sizes_beyond_the_coordinates_are_refused(layout):
    routing = Routing(layout, 1, 2**31, [], [])
    with torch.device("meta"):
        a, d = (
            torch.empty(2**31, n, dtype=dtype)
            for n, dtype in ((16, kernels.E4M3), (8, torch.bfloat16))
        )
        b = a[:8].expand(*routing.matrices_of_b(), 8, 16)
        scales, bounds = torch.ones(*b.shape[:-2], 1, 1), torch.empty(2, dtype=torch.int32)
        made = Operands(a, kernels.empty_tma_aligned([2**31, 1], "meta"), b, scales, d)
    with pytest.raises(ValueError, match=r"M, N and K must be at most .* got 2147483648, 8 and 16"):
        launch(routing, made, bounds)


@pytest.mark.parametrize("layout", DENSE_AND_GROUPED)
@pytest.mark.parametrize(
    "error", [jit.JitError("no usable NVRTC"), torch.cuda.OutOfMemoryError("no memory")]
)
def test_without_a_kernel_there_is_an_error(gpu, monkeypatch, layout, error):
    def fail(kernel, device_index):
        raise error

    routing = routing_of(layout, (3, 0, 9))
    made = operands(routing, 8, 16)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "load", fail)
        with pytest.raises(type(error), match=str(error)):
            launch(routing, made)
    assert bool((made.d == UNTOUCHED).all())
    launch_and_compare(routing, made)  # once the cause is gone
    assert len(gpu.launched) == 1


# ---- What is kept ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_addresses_are_looked_at_in_each_call(gpu, layout):
    routing = routing_of(layout, (5, 0, 9), 0)
    made = operands(routing, 48, 256)
    rows = flat(made.a.numel() + 16, made.a)
    for start in (0, 3, 16):
        moved = rows[start : start + made.a.numel()].view(made.a.shape).copy_(made.a)
        launch_and_compare(routing, made._replace(a=moved))
    assert len(gpu.prepared()) == 1


@pytest.mark.parametrize("layout", DENSE_AND_GROUPED)
def test_whatever_decides_a_launch_is_in_its_key(gpu, layout):
    routing = routing_of(layout, (2, 0, 4), 0)
    made, bounds = operands(routing, 48, 256), routing.bounds_on()
    elsewhere = Placement(*["every other row", "wider"] * 2, "every other row").of(made)
    fewer = made._replace(a=made.a[:5], a_scale_inv=made.a_scale_inv[:5], d=made.d[:5])
    fewer_bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    call = partial(launch, routing, made, bounds)
    calls = [
        call,
        partial(call, programmatic=True),
        partial(call, d_is_padded=True),
        *(
            partial(launch, routing, made._replace(**{name: x}), bounds)
            for name, x in elsewhere._asdict().items()
        ),
        partial(launch, routing, fewer, fewer_bounds),
    ]
    if layout:
        rows = torch.zeros(6, dtype=torch.int32)
        by_rows = routing._replace(layout=GroupLayout.ROWS)
        calls += [partial(call, expected_m=5), partial(launch, by_rows, made, rows)]
    else:
        calls += [partial(call, bias=torch.zeros(48, dtype=dtype)) for dtype in BIASES[1:]]
    for number, each in enumerate(calls, 1):
        each()
        assert len(gpu.prepared()) == number
    kernels.set_num_sms(3)
    call()
    assert gpu.launched[-1].grid <= max(3, gpu.launched[-1].cluster)
    assert len(gpu.prepared()) == len(calls) + 1
    for each in calls:
        each()
        each()
    assert len(gpu.launched) == 3 * len(calls) + 1


# ---- By the public names ----


@settings(max_examples=50)
@given(routing=all_routings(), n=sizes(140, 1), k=sizes(300, 1), expected_m=st.integers(-3, 500))
def test_the_ops_launch_what_they_were_given(routing, n, k, expected_m):
    made, bounds = operands(routing, n, k), routing.bounds_on()
    with emulated() as gpu, only_groups_are_written(routing, made.d):
        run_op(routing, made, bounds, expected_m)
        assert torch.equal(made.d, expected_of(routing, made))
    if routing.num_tokens == 0:
        return
    mean = kernels.ceil_div(routing.num_tokens, routing.num_groups)
    limit, num_segments = routing.num_tokens, routing.num_groups
    if routing.layout == GroupLayout.MASKED:
        mean = min(max(expected_m, 1), routing.num_tokens)
    if routing.layout == GroupLayout.ROWS:  # 128 rows at most are known to be of one group
        limit, num_segments = 128, kernels.ceil_div(routing.num_tokens, 128)
    if routing.layout == GroupLayout.SEGMENTS:  # half of a group's last block is padding
        mean = max(mean, 128) - 64
        num_segments = min(num_segments, kernels.ceil_div(routing.num_tokens, 128))
    if routing.layout is None:
        config = heuristic.choose_config(mean, n, k, NUM_SMS)
    else:
        shape = min(mean, limit), limit, num_segments, n, k, NUM_SMS
        config = heuristic.choose_grouped_config(*shape)
    assert [x.config for x in gpu.gemms] == [config]
