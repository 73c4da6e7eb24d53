"""The launcher of the dense GEMM without a GPU: `Emulator` stands for libcuda."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels import jit
from moefp8.kernels.gemm import config as gemm_config
from moefp8.kernels.gemm import dense_launch as room
from moefp8.kernels.gemm import launch as gemm_plan
from moefp8.testing import gemm_shapes
from tests.fakes.emulator import emulated
from tests.gpu import NUM_SMS
from tests.kernels import sanitizer as sanitizer_cases
from tests.kernels.gemm.cases import (
    BIASES,
    NAN,
    PLACES,
    SCALE_PLACES,
    expected_of,
    flat,
    nothing_around_is_written,
    operands,
    within,
)


@settings(max_examples=150)
@given(
    shape=gemm_shapes(),
    places=st.tuples(*[st.sampled_from(sorted(PLACES))] * 3),
    scale_places=st.tuples(*[st.sampled_from(sorted(SCALE_PLACES))] * 2),
    bias=st.sampled_from(BIASES),
    bias_step=st.sampled_from((1, 2)),
)
def test_every_layout_is_addressed_rightly(shape, places, scale_places, bias, bias_step):
    a, a_scale_inv, b, b_scale_inv, d, bias = operands(*shape, bias)
    expected = expected_of(a, a_scale_inv, b, b_scale_inv, d, bias)
    a, b, d = (PLACES[place].make(x) for place, x in zip(places, (a, b, d), strict=True))
    a_scale_inv, b_scale_inv = (
        SCALE_PLACES[place](x)
        for place, x in zip(scale_places, (a_scale_inv, b_scale_inv), strict=True)
    )
    if bias is not None:
        bias = bias.repeat_interleave(bias_step)[::bias_step]
    with emulated() as made, nothing_around_is_written(d):
        room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, bias)
        assert torch.equal(d, expected)
    assert len(made.launched) == (0 not in shape)


@pytest.mark.parametrize("place", PLACES)
def test_what_tma_can_address_is_not_copied(gpu, place):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(5, 48, 256)
    a, b, d = (PLACES[place].make(x) for x in (a, b, d))
    room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, None)
    (made,) = gpu.launched
    for x, its_map in zip((a, b, d), (made.a_maps[0], made.b_maps[0], made.d_map), strict=True):
        assert (its_map.address == x.data_ptr()) == PLACES[place].fits
    assert made.scale_map.address == a_scale_inv.data_ptr()


@pytest.mark.parametrize(
    ("place", "copied"),
    [("as quantized", False), ("wider", False), ("K innermost", True), ("odd", True)],
)
def test_scales_are_copied_only_if_they_must(gpu, place, copied):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(5, 48, 512)
    a_scale_inv, b_scale_inv = (SCALE_PLACES[place](x) for x in (a_scale_inv, b_scale_inv))
    room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, None)
    (made,) = gpu.launched
    assert (made.scale_map.address != a_scale_inv.data_ptr()) == copied
    assert made.arguments.weight_scales == b_scale_inv.data_ptr()


@pytest.mark.parametrize("stride", [0, 1, 7, 2**50])
def test_what_one_row_says_of_its_stride_is_void(gpu, stride):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(1, 8, 112)
    expected = expected_of(a, a_scale_inv, b, b_scale_inv, d, None)
    a, d = (x.as_strided(x.shape, (stride, 1)) for x in (a, d))
    a_scale_inv = a_scale_inv.as_strided((1, 1), (stride, stride))
    room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, None)
    assert torch.equal(d, expected)
    (made,) = gpu.launched
    maps = made.a_maps[0], made.scale_map, made.b_maps[0], made.d_map
    assert [x.address for x in maps] == [x.data_ptr() for x in (a, a_scale_inv, b, d)]


def test_addresses_are_looked_at_in_each_call(gpu):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(5, 48, 256)
    expected = expected_of(a, a_scale_inv, b, b_scale_inv, d, None)
    rows = flat(a.numel() + 16, a)
    for start in (0, 3, 16):
        moved = rows[start : start + a.numel()].view(a.shape).copy_(a)
        room.launch_gemm(moved, a_scale_inv, b, b_scale_inv, d.fill_(NAN), None)
        assert torch.equal(d, expected)
    assert len(gpu.chosen) == 1


@pytest.mark.parametrize("name", sanitizer_cases.FAMILIES)
@pytest.mark.parametrize("limit", [None, 1])
def test_every_family_is_launched_rightly(name, limit):
    config = sanitizer_cases.FAMILIES[name]
    for i, shape in enumerate(sanitizer_cases.shapes_of(config)):
        arguments = operands(*shape, BIASES[i])
        with emulated(config) as made:
            kernels.set_num_sms(limit)
            room.launch_gemm(*arguments)
        assert torch.equal(arguments[4], expected_of(*arguments))
        (launched,) = made.launched
        assert launched.config == config


@pytest.mark.parametrize(("m", "n"), [(320, 96), (290, 200), (513, 31)])
@pytest.mark.parametrize("band", [1, 3, 5])
def test_bands_of_tiles_are_walked_whole_also_the_last(m, n, band, monkeypatch):
    monkeypatch.setattr(gemm_plan, "band", lambda *shape: band)
    with emulated(gemm_config.with_most_stages(gemm_config.GemmConfig(64, 32, 0))) as gpu:
        made = operands(m, n, 48)
        room.launch_gemm(*made)
        assert torch.equal(made[4], expected_of(*made))
        assert gpu.launched[0].arguments.band == band


@pytest.mark.parametrize(
    ("config", "m", "k", "band"),
    [
        ({"wgmma_m": 128, "wgmma_n": 128}, 4096, 6144, 32),  # 24 MiB of tokens
        ({"wgmma_m": 128, "wgmma_n": 128}, 4096, 6145, 4),
        ({"wgmma_m": 192, "wgmma_n": 128}, 4096, 6145, 2),
        ({"wgmma_m": 128, "wgmma_n": 128}, 65536, 128, 128),
        ({"wgmma_m": 64, "wgmma_n": 8, "swap_ab": True}, 8, 512, 1),
    ],
)
def test_how_many_tokens_are_walked_together(config, m, k, band):
    assert gemm_plan.band(gemm_config.GemmConfig(stages=4, **config), m, k) == band


def test_rows_that_overlap_are_copied(gpu):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(9, 40, 160)
    for view in (a[:1].expand(9, 160), flat(400, a).copy_(a.flatten()[:400])):
        if view.ndim == 1:
            view = view.as_strided((9, 160), (16, 1))
        expected = expected_of(view, a_scale_inv, b, b_scale_inv, d, None)
        room.launch_gemm(view, a_scale_inv, b, b_scale_inv, d, None)
        assert torch.equal(d, expected)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d[:1].expand(9, 40), None)


@pytest.mark.parametrize("bias", BIASES)
def test_nothing_is_launched_without_work(gpu, bias):
    for shape in ((0, 5, 9), (5, 0, 9), (0, 0, 0)):
        room.launch_gemm(*operands(*shape, bias))
    *arguments, d, bias = operands(5, 7, 0, bias)
    room.launch_gemm(*arguments, d, bias)
    expected = torch.zeros(5, 7) if bias is None else bias.float().expand(5, 7)
    assert torch.equal(d, expected.bfloat16())
    assert gpu.launched == []


def test_a_bias_that_wants_a_gradient_records_nothing(gpu):
    *arguments, d, bias = operands(5, 7, 0, torch.float32)
    room.launch_gemm(*arguments, d, bias.requires_grad_())
    assert not d.requires_grad


def test_a_second_call_is_one_call_of_the_driver(gpu):
    arguments = operands(5, 48, 256)
    room.launch_gemm(*arguments)
    num_maps = len(gpu.maps)
    (prepared,) = room._launches.prepared.values()
    arguments[4].fill_(NAN)
    room.launch_gemm(*arguments)
    assert len(gpu.launched) == 2
    assert (len(gpu.maps), num_maps) == (4, 4)
    assert list(room._launches.prepared.values()) == [prepared]
    assert len(gpu.chosen) == 1
    assert bool(arguments[4].isfinite().all())


def test_new_addresses_cost_their_own_maps_only(gpu):
    a, *others, _, _ = operands(5, 48, 256)
    alive = [(a.clone(), torch.empty(5, 48, dtype=torch.bfloat16)) for _ in range(3)]
    for x, d in alive:
        room.launch_gemm(x, *others, d, None)
    assert {made.b_maps[0].address for made in gpu.launched} == {others[1].data_ptr()}
    assert len(gpu.chosen) == len(gpu.kernels) == 1
    assert len(gpu.maps) == 3 * 2 + 2  # weights and scales are found


def test_whatever_decides_a_launch_is_in_its_key(gpu, monkeypatch):
    a, a_scale_inv, b, b_scale_inv, d, bias = operands(6, 48, 256, torch.float32)
    wide = within(16, 16)(a)
    halves = torch.cat([b_scale_inv, b_scale_inv], 1)
    calls = [
        lambda: room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, None),
        lambda: room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, bias),
        lambda: room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, bias.view(torch.int32).float()),
        lambda: room.launch_gemm(a, a_scale_inv, b, b_scale_inv, d, None, programmatic=True),
        lambda: room.launch_gemm(wide, a_scale_inv, b, b_scale_inv, d, None),
        lambda: room.launch_gemm(a, a_scale_inv.clone(), b, b_scale_inv, d, None),
        lambda: room.launch_gemm(a, a_scale_inv, b, halves[:, :2], d, None),
        lambda: room.launch_gemm(a[:5], a_scale_inv[:5], b, b_scale_inv, d[:5], None),
    ]
    for number, call in enumerate(calls, 1):
        call()
        assert len(room._launches.prepared) == number
    monkeypatch.setattr(gemm_plan, "current_stream", lambda device_index: 8)
    calls[0]()
    assert gpu.launched[-1].stream == 8
    kernels.set_num_sms(3)
    calls[0]()
    assert gpu.launched[-1].grid <= max(3, gpu.launched[-1].cluster)
    assert len(room._launches.prepared) == len(calls) + 2
    for call in calls:
        call()
        call()
    assert len(gpu.launched) == 3 * len(calls) + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": lambda x: x.view(torch.uint8)}, "a must be float8_e4m3fn, got uint8"),
        ({"b": lambda x: x.view(torch.float8_e5m2)}, "b must be float8_e4m3fn, got float8_e5m2"),
        ({"d": lambda x: x.view(torch.float16)}, "d must be bfloat16, got float16"),
        ({"a_scale_inv": lambda x: x.view(torch.int32)}, "a_scale_inv must be float32"),
        ({"b_scale_inv": lambda x: x.view(torch.int32)}, "b_scale_inv must be float32"),
        ({"bias": lambda x: x.view(torch.int32)}, "bias must be bfloat16 or float16 or float32"),
        ({"d": lambda x: x.view(48, 6)}, r"d must be \[M, N\] = \[6, 48\], got \[48, 6\]"),
        ({"a": lambda x: x.as_strided((6, 256), (1, 6))}, "last dimension of a must be contig"),
        ({"bias": lambda x: x[:47]}, r"bias must be \[N\] = \[48\], got \[47\]"),
    ],
)
def test_what_was_checked_once_is_no_excuse(gpu, change, message):
    names = "a", "a_scale_inv", "b", "b_scale_inv", "d", "bias"
    arguments = dict(zip(names, operands(6, 48, 256, torch.float32), strict=True))
    room.launch_gemm(**arguments)
    ((name, view),) = change.items()
    with pytest.raises((TypeError, ValueError), match=f"^fp8_gemm_nt: .*{message}"):
        room.launch_gemm(**{**arguments, name: view(arguments[name])})
    assert len(gpu.launched) == 1


def test_what_is_kept_does_not_grow_for_ever(gpu, monkeypatch):
    monkeypatch.setattr(gemm_plan.Launches, "max_kept", 3)
    for m in range(1, 9):
        room.launch_gemm(*operands(m, 8, 16))
        assert max(len(room._launches.prepared), len(room._launches.plans)) <= 3
    assert len(gpu.launched) == 8


def test_num_sms_limits_the_grid(gpu):
    arguments = operands(700, 640, 128)
    config = gemm_config.with_most_stages(gemm_config.GemmConfig(128, 64, 0, ctas_per_sm=2))
    with emulated(config) as made:
        for limit in (None, 1, 5, 1000):
            kernels.set_num_sms(limit)
            room.launch_gemm(*arguments)
        assert [x.grid for x in made.launched] == [60, 1, 5, 60]
        assert [sms for *_, sms in made.chosen] == [NUM_SMS, 1, 5, NUM_SMS]


def test_num_sms_is_checked_and_told(gpu, monkeypatch):
    for bad in (0, -3):
        with pytest.raises(ValueError, match=f"num_sms must be at least 1, .* got {bad}"):
            kernels.set_num_sms(bad)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.get_num_sms() == NUM_SMS
    kernels.set_num_sms(20)
    assert kernels.get_num_sms() == 20
    kernels.set_num_sms(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="there is no GPU"):
        kernels.get_num_sms()


def test_sizes_beyond_the_coordinates_are_refused():
    rows = torch.zeros(1, 16, dtype=torch.float8_e4m3fn).expand(2**31, 16)
    huge = rows, torch.zeros(1, 1).expand(2**31, 1), rows[:8], torch.zeros(1, 1)
    d = torch.zeros(1, 8, dtype=torch.bfloat16).expand(2**31, 8)
    with pytest.raises(ValueError, match=r"M, N and K must be at most .* got 2147483648, 8 and 16"):
        room._plan(gemm_plan.Operands(*huge, d), None, ())


def test_the_device_is_made_current(gpu, monkeypatch):
    made_current = []

    @contextmanager
    def device(index):
        made_current.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", device)
    room.launch_gemm(*operands(3, 8, 16))
    assert made_current == [-1]


@pytest.mark.parametrize(
    "error", [jit.JitError("no usable NVRTC"), torch.cuda.OutOfMemoryError("no memory")]
)
def test_without_a_kernel_there_is_an_error(gpu, monkeypatch, error):
    def fail(kernel, device_index):
        raise error

    arguments = operands(3, 8, 16)
    with monkeypatch.context() as patch:
        patch.setattr(gemm_plan, "load", fail)
        with pytest.raises(type(error), match=str(error)):
            room.launch_gemm(*arguments)
    assert bool(arguments[4].isnan().all())
    room.launch_gemm(*arguments)  # once the cause is gone
    assert len(gpu.launched) == 1
