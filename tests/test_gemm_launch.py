"""The dense GEMM without a GPU: its launcher, which body runs, and the linear layer's launches.

`Emulator` stands for libcuda.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import sanitizer_cases
import torch
from gemm_cases import (
    BIASES,
    NAN,
    PLACES,
    SCALE_PLACES,
    Emulator,
    emulated,
    expected_of,
    flat,
    nothing_around_is_written,
    operands,
    within,
)
from gpu_cases import NUM_SMS
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels import fp8_gemm_nt, gemm_config, jit, linear, registry
from moefp8.kernels import gemm_launch as room
from moefp8.quant import quantize_1x128, quantize_128x128
from moefp8.testing import gemm_shapes


@pytest.fixture
def gpu() -> Iterator[Emulator]:
    with emulated() as made:
        yield made


# ---- The launcher ----


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
    maps = [made.row_map, made.col_map]
    if made.config.weights_are_rows:
        maps.reverse()
    for x, its_map in zip((a, b, d), (*maps, made.d_map), strict=True):
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
    assert {x.address for x in (made.row_map, made.col_map)} == {a.data_ptr(), b.data_ptr()}
    assert (made.d_map.address, made.scale_map.address) == (d.data_ptr(), a_scale_inv.data_ptr())


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
    monkeypatch.setattr(room, "_band", lambda *shape: band)
    with emulated(gemm_config.with_most_stages(gemm_config.GemmConfig(64, 32, 0))) as gpu:
        made = operands(m, n, 48)
        room.launch_gemm(*made)
        assert torch.equal(made[4], expected_of(*made))
        assert gpu.launched[0].arguments.band == band


@pytest.mark.parametrize(
    ("config", "m", "k", "band"),
    [
        ({"rows": 128, "cols": 128}, 4096, 6144, 32),  # 24 MiB of tokens
        ({"rows": 128, "cols": 128}, 4096, 6145, 4),
        ({"rows": 192, "cols": 128}, 4096, 6145, 2),
        ({"rows": 128, "cols": 128}, 65536, 128, 128),
        ({"rows": 64, "cols": 8, "weights_are_rows": True}, 8, 512, 1),
    ],
)
def test_how_many_tokens_are_walked_together(config, m, k, band):
    assert room._band(gemm_config.GemmConfig(stages=4, **config), m, k) == band


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
    (prepared,) = room._launches.values()
    arguments[4].fill_(NAN)
    room.launch_gemm(*arguments)
    assert len(gpu.launched) == 2
    assert (len(gpu.maps), num_maps) == (4, 4)
    assert list(room._launches.values()) == [prepared]
    assert len(gpu.chosen) == 1
    assert bool(arguments[4].isfinite().all())


def test_new_addresses_cost_their_own_maps_only(gpu):
    a, *others, _, _ = operands(5, 48, 256)
    alive = [(a.clone(), torch.empty(5, 48, dtype=torch.bfloat16)) for _ in range(3)]
    for x, d in alive:
        room.launch_gemm(x, *others, d, None)
    kept = [made.row_map for made in gpu.launched], [made.col_map for made in gpu.launched]
    weights = kept[0] if gpu.launched[0].config.weights_are_rows else kept[1]
    assert {x.address for x in weights} == {others[1].data_ptr()}
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
        assert len(room._launches) == number
    monkeypatch.setattr(room, "current_stream", lambda device_index: 8)
    calls[0]()
    assert gpu.launched[-1].stream == 8
    kernels.set_num_sms(3)
    calls[0]()
    assert gpu.launched[-1].grid <= max(3, gpu.launched[-1].cluster)
    assert len(room._launches) == len(calls) + 2
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
    monkeypatch.setattr(room, "_MAX_KEPT", 3)
    for m in range(1, 9):
        room.launch_gemm(*operands(m, 8, 16))
        assert max(len(room._launches), len(room._plans)) <= 3
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
        room._plan((*huge, d, None), (), None)


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
        patch.setattr(room, "load", fail)
        with pytest.raises(type(error), match=str(error)):
            room.launch_gemm(*arguments)
    assert bool(arguments[4].isnan().all())
    room.launch_gemm(*arguments)  # once the cause is gone
    assert len(gpu.launched) == 1


# ---- The linear layer, and which body runs ----


@given(
    shape=gemm_shapes(),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    bias=st.sampled_from(BIASES),
)
def test_linear_is_two_launches(shape, dtype, bias):
    m, n, k = shape
    x, weight = torch.randn(m, k).to(dtype), quantize_128x128(torch.randn(n, k))
    bias = None if bias is None else torch.randn(n).to(bias)
    expected = linear.fp8_linear(x, *weight, bias)
    with emulated() as made:
        assert torch.equal(linear.launch_linear(x, *weight, bias), expected)
    copied = (k % 16 and max(m, n) > 1) or n % 8  # which may come in between
    if 0 not in shape:
        assert [x.programmatic for x in made.launched] == [False, not copied]


def test_linear_equals_its_parts():
    x, weight, bias = torch.randn(5, 300), quantize_128x128(torch.randn(130, 300)), torch.randn(130)
    d = torch.empty(5, 130, dtype=torch.bfloat16)
    for b in (None, bias):
        fp8_gemm_nt(quantize_1x128(x), weight, d, bias=b)
        assert torch.equal(linear.fp8_linear(x, *weight, b), d)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 300, dtype=torch.int64)}, "x must be bfloat16 or .* got int64"),
        ({"x": torch.zeros(2, 5, 300)}, r"x must have 2 dimensions, got shape \[2, 5, 300\]"),
        ({"x": torch.zeros(5, 299)}, "K must be equal in x and weight, got 299 and 300"),
        ({"weight": torch.zeros(130, 300)}, "weight must be float8_e4m3fn, got float32"),
        ({"weight_scale_inv": torch.ones(2, 2)}, r"\[ceil\(N/128\), .* = \[2, 3\], got \[2, 2\]"),
        ({"bias": torch.zeros(5)}, r"bias must be \[N\] = \[130\], got \[5\]"),
        ({"x": torch.zeros(5, 300, device="meta")}, "x on meta, weight on cpu"),
    ],
)
def test_linear_names_what_is_wrong(change, message):
    weight = quantize_128x128(torch.randn(130, 300))
    good = {"x": torch.zeros(5, 300), "weight": weight.data, "weight_scale_inv": weight.scale_inv}
    arguments = {**good, "bias": None, **change}
    for body in (linear.fp8_linear, linear.launch_linear):
        with pytest.raises((TypeError, ValueError), match=f"^fp8_linear: .*{message}"):
            body(*arguments.values())


def test_linear_agrees_with_its_fake_body():
    weight = quantize_128x128(torch.randn(130, 300))
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    op = torch.ops.moefp8.fp8_linear
    for bias in (None, torch.randn(130)):
        torch.library.opcheck(op, (torch.randn(5, 300), *weight, bias), test_utils=checks)


def test_which_body_runs(monkeypatch):
    ran = []
    bodies = [lambda x: ran.append("portable"), lambda x: ran.append("hopper")]
    x = SimpleNamespace(device=torch.device("cpu"), get_device=lambda: 0)
    on_gpu = registry._on_gpu("some_op", *bodies)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA {index}")
    for hip, capability, expected in (
        (None, (9, 0), "hopper"),
        (None, (8, 0), "portable"),
        (None, (10, 0), "portable"),
        ("7.0", (9, 4), "portable"),
    ):
        registry.runs_our_kernels.cache_clear()
        registry._announce_portable.cache_clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i, c=capability: c)
        if expected == "portable":
            with pytest.warns(UserWarning, match="some_op runs its portable .* NVIDIA 0"):
                on_gpu(x)
        on_gpu(x)
        assert ran[-1] == expected
    registry._announce_portable.cache_clear()
    monkeypatch.setenv("MOEFP8_STRICT", "1")
    with pytest.raises(RuntimeError, match="MOEFP8_STRICT=1 forbids that"):
        on_gpu(x)
    registry._announce_portable.cache_clear()
    registry.runs_our_kernels.cache_clear()


# ---- DeepGEMM's names ----


def test_deep_gemm_names():
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(130, 200, 300)
    expected = expected_of(a, a_scale_inv, b, b_scale_inv, d, None)
    kernels.gemm_fp8_fp8_bf16_nt((a, a_scale_inv), (b, b_scale_inv), d)
    assert torch.equal(d, expected)
    layout = torch.zeros(130, dtype=torch.int32)
    d.fill_(NAN)
    kernels.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(
        (a, a_scale_inv), (b[None], b_scale_inv[None]), d, layout
    )
    assert torch.equal(d, expected)
    d.fill_(NAN)
    kernels.m_grouped_gemm_fp8_fp8_bf16_nt_masked(
        (a[None], a_scale_inv[None]),
        (b[None], b_scale_inv[None]),
        d[None],
        torch.tensor([130], dtype=torch.int32),
        130,
    )
    assert torch.equal(d, expected)
    assert [kernels.get_tma_aligned_size(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert kernels.get_tma_aligned_size(17, 1) == 32
    with pytest.raises(ValueError, match="element_size must divide 16, got 3"):
        kernels.get_tma_aligned_size(5, 3)


@pytest.mark.parametrize("shape", [(5, 3), (1, 3), (4, 1), (2, 5, 3), (3, 1, 2)])
@pytest.mark.parametrize(
    "align", [kernels.get_mn_major_tma_aligned_tensor, kernels.get_col_major_tma_aligned_tensor]
)
def test_scales_are_brought_into_the_order_of_tma(shape, align):
    x = torch.randn(shape)
    aligned = align(x)
    assert torch.equal(aligned, x)
    assert aligned.stride() == kernels.empty_tma_aligned(shape, "cpu").stride()
    assert align(aligned) is aligned
    with pytest.raises(TypeError, match="sf must be float32, got float64"):
        align(x.double())
    with pytest.raises(ValueError, match="2 or 3 dimensions"):
        align(x.view(1, 1, *shape))
