"""The dense GEMM as it is launched, without a GPU: see `tests/fakes/emulator.py`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels import jit
from moefp8.kernels.gemm import config as gemm_config
from moefp8.kernels.gemm import launch as gemm_launch
from moefp8.kernels.gemm.dense import DenseInputs, launch_dense
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
    run_gemm,
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
        run_gemm(a, a_scale_inv, b, b_scale_inv, d, bias)
        assert torch.equal(d, expected)
    assert len(made.launched) == (0 not in shape)


@pytest.mark.parametrize("place", PLACES)
def test_what_tma_can_address_is_not_copied(gpu, place):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(5, 48, 256)
    a, b, d = (PLACES[place].make(x) for x in (a, b, d))
    run_gemm(a, a_scale_inv, b, b_scale_inv, d)
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
    run_gemm(a, a_scale_inv, b, b_scale_inv, d)
    (made,) = gpu.launched
    assert (made.scale_map.address != a_scale_inv.data_ptr()) == copied
    assert made.arguments.weight_scales == b_scale_inv.data_ptr()


@pytest.mark.parametrize("stride", [0, 1, 7, 2**50])
def test_what_one_row_says_of_its_stride_is_void(gpu, stride):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(1, 8, 112)
    expected = expected_of(a, a_scale_inv, b, b_scale_inv, d, None)
    a, d = (x.as_strided(x.shape, (stride, 1)) for x in (a, d))
    a_scale_inv = a_scale_inv.as_strided((1, 1), (stride, stride))
    run_gemm(a, a_scale_inv, b, b_scale_inv, d)
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
        run_gemm(moved, a_scale_inv, b, b_scale_inv, d.fill_(NAN), None)
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
            run_gemm(*arguments)
        assert torch.equal(arguments[4], expected_of(*arguments))
        (launched,) = made.launched
        assert launched.config == config


@pytest.mark.parametrize(("m", "n"), [(320, 96), (290, 200), (513, 31)])
@pytest.mark.parametrize("band", [1, 3, 5])
def test_bands_of_tiles_are_walked_whole_also_the_last(m, n, band, monkeypatch):
    monkeypatch.setattr(gemm_launch, "band", lambda *shape: band)
    with emulated(gemm_config.with_most_stages(gemm_config.GemmConfig(64, 32, 0))) as gpu:
        made = operands(m, n, 48)
        run_gemm(*made)
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
    assert gemm_launch.band(gemm_config.GemmConfig(stages=4, **config), m, k) == band


def test_rows_that_overlap_are_copied(gpu):
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(9, 40, 160)
    for view in (a[:1].expand(9, 160), flat(400, a).copy_(a.flatten()[:400])):
        if view.ndim == 1:
            view = view.as_strided((9, 160), (16, 1))
        expected = expected_of(view, a_scale_inv, b, b_scale_inv, d, None)
        run_gemm(view, a_scale_inv, b, b_scale_inv, d, None)
        assert torch.equal(d, expected)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        run_gemm(a, a_scale_inv, b, b_scale_inv, d[:1].expand(9, 40), None)


@pytest.mark.parametrize("bias", BIASES)
def test_nothing_is_launched_without_work(gpu, bias):
    for shape in ((0, 5, 9), (5, 0, 9), (0, 0, 0)):
        run_gemm(*operands(*shape, bias))
    *arguments, d, bias = operands(5, 7, 0, bias)
    run_gemm(*arguments, d, bias)
    expected = torch.zeros(5, 7) if bias is None else bias.float().expand(5, 7)
    assert torch.equal(d, expected.bfloat16())
    assert gpu.launched == []


def test_a_bias_that_wants_a_gradient_records_nothing(gpu):
    *arguments, d, bias = operands(5, 7, 0, torch.float32)
    run_gemm(*arguments, d, bias.requires_grad_())
    assert not d.requires_grad


def test_whatever_decides_a_launch_is_in_its_key(gpu):
    a, a_scale_inv, b, b_scale_inv, d, bias = operands(6, 48, 256, torch.float32)
    wide = within(16, 16)(a)
    halves = torch.cat([b_scale_inv, b_scale_inv], 1)
    pairs = a, a_scale_inv, b, b_scale_inv
    calls = [
        lambda: run_gemm(*pairs, d),
        lambda: run_gemm(*pairs, d, bias),
        lambda: run_gemm(*pairs, d, bias.bfloat16()),
        lambda: launch_dense(DenseInputs(*pairs, d, None), programmatic=True),
        lambda: launch_dense(DenseInputs(*pairs, d, None), d_is_padded=True),
        lambda: run_gemm(wide, *pairs[1:], d),
        lambda: run_gemm(*pairs[:3], halves[:, :2], d),
        lambda: run_gemm(a[:5], a_scale_inv[:5], b, b_scale_inv, d[:5]),
    ]
    for number, call in enumerate(calls, 1):
        call()
        assert len(gpu.prepared()) == number
    kernels.set_num_sms(3)
    calls[0]()
    assert gpu.launched[-1].grid <= max(3, gpu.launched[-1].cluster)
    assert len(gpu.prepared()) == len(calls) + 1
    for call in calls:
        call()
        call()
    assert len(gpu.launched) == 3 * len(calls) + 1


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
    run_gemm(**arguments)
    ((name, view),) = change.items()
    with pytest.raises((TypeError, ValueError), match=f"^fp8_gemm_nt: .*{message}"):
        run_gemm(**{**arguments, name: view(arguments[name])})
    assert len(gpu.launched) == 1


def test_num_sms_limits_the_grid():
    arguments = operands(700, 640, 128)
    config = gemm_config.with_most_stages(gemm_config.GemmConfig(128, 64, 0, ctas_per_sm=2))
    with emulated(config) as gpu:
        for limit in (None, 1, 5, 1000):
            kernels.set_num_sms(limit)
            run_gemm(*arguments)
        assert [x.grid for x in gpu.launched] == [60, 1, 5, 60]
        assert [sms for *_, sms in gpu.chosen] == [NUM_SMS, 1, 5, NUM_SMS]


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


@pytest.mark.usefixtures("gpu")
def test_sizes_beyond_the_coordinates_are_refused():
    a, d = (
        torch.empty(2**31, n, dtype=dtype, device="meta")
        for n, dtype in ((16, kernels.E4M3), (8, torch.bfloat16))
    )
    a_scale_inv, b_scale_inv = (kernels.empty_tma_aligned([rows, 1], "meta") for rows in (2**31, 1))
    with pytest.raises(ValueError, match=r"M, N and K must be at most .* got 2147483648, 8 and 16"):
        launch_dense(DenseInputs(a, a_scale_inv, a[:8], b_scale_inv, d, None))


@pytest.mark.parametrize(
    "error", [jit.JitError("no usable NVRTC"), torch.cuda.OutOfMemoryError("no memory")]
)
def test_without_a_kernel_there_is_an_error(gpu, monkeypatch, error):
    def fail(kernel, device_index):
        raise error

    arguments = operands(3, 8, 16)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "load", fail)
        with pytest.raises(type(error), match=str(error)):
            run_gemm(*arguments)
    assert bool(arguments[4].isnan().all())
    run_gemm(*arguments)  # once the cause is gone
    assert len(gpu.launched) == 1
