"""The launchers of `quantize.cu`, without a GPU."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moefp8.kernels.common.divisor import Divisor
from moefp8.kernels.jit import Kernel, compile_kernels
from moefp8.quant import quantize_launch as room
from moefp8.quant.quantize import launch_quantize_1x128, launch_quantize_128x128
from moefp8.quant.quantize_launch import Cut
from tests.gpu import NUM_SMS, assert_arguments_fit

DTYPES = torch.bfloat16, torch.float16, torch.float32

# ---- Compiling ----


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_compiles_and_spills_nothing(dtype):
    kernels = room.kernels_of(dtype)
    for kernel, cubin in zip(kernels, compile_kernels(kernels), strict=True):
        assert cubin.problems() == []
        registers = int(re.findall(r"Used (\d+) registers", cubin.log)[-1])
        if dtype.itemsize == 2 and kernel.name.endswith("true>"):
            assert registers <= 64, kernel.name  # 1024 threads of an SM keep their bytes in flight


@pytest.mark.usefixtures("own_cache")
def test_arguments_lie_in_memory_as_the_kernel_reads_them(tmp_path):
    kernel = Kernel(room._SOURCE, "quantize_128x128_kernel<Input::kFloat, true>")
    assert_arguments_fit(room._Arguments, kernel, tmp_path)


# ---- The launcher ----


@given(n=st.integers(0, 2**31 - 1), value=st.integers(1, 2**31 - 1))
@example(n=2**31 - 1, value=1)
@example(n=2**31 - 1, value=2**31 - 1)
@example(n=2**31 - 2, value=3)
def test_divisor_divides(n, value):
    divisor = Divisor.of(value)
    assert n * divisor.magic >> divisor.shift == n // value
    assert divisor.value == value
    assert n * divisor.magic < 2**64


@given(num_rows=st.integers(1, 100_000), num_k_blocks=st.integers(1, 200))
def test_few_rows_are_spread_over_the_sms(num_rows, num_k_blocks):
    cut = room.cut_1x128(num_rows, num_k_blocks, NUM_SMS)
    num_threads = -(-num_rows // cut.rows) * num_k_blocks * cut.lanes
    assert cut.threads % 32 == 0
    assert 32 <= cut.threads <= 256
    assert 128 % (8 * cut.lanes) == 0
    assert cut.threads >= cut.lanes >= cut.rows  # one lane stores the scale of one row
    if num_threads >= NUM_SMS * 32 and cut.rows == 1:
        assert -(-num_threads // cut.threads) >= NUM_SMS // 2


@pytest.fixture
def launches(monkeypatch) -> list[SimpleNamespace]:
    """What would be launched, for tensors on the CPU; prepared anew for each test."""
    made: list[SimpleNamespace] = []

    class Recorder:
        def __init__(self, function, grid, block, arguments, *, stream, programmatic):
            known = SimpleNamespace(kernel=function.name, grid=grid, block=block)
            self.known, self.arguments = known, arguments
            known.stream, known.programmatic, known.launch = stream, programmatic, self

        def on(self, device_index):
            assert device_index == -1  # that of tensors on the CPU
            (arguments,) = self.arguments
            copy = type(arguments).from_buffer_copy(arguments)
            made.append(SimpleNamespace(**vars(self.known), arguments=copy))

    properties = SimpleNamespace(multi_processor_count=NUM_SMS)
    monkeypatch.setattr(room, "Launch", Recorder)
    monkeypatch.setattr(room, "load", lambda kernel, device_index: kernel)
    monkeypatch.setattr(room, "current_stream", lambda device_index: 7)
    monkeypatch.setattr(room, "_of_thread", room._OfThread())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return made


def test_launch_says_where_everything_lies(launches):
    x = torch.zeros(3, 10, 1024, dtype=torch.bfloat16)[:, :9, :520]
    data, scale_inv = launch_quantize_1x128(x, True, programmatic=True, cut=Cut(4, 8, 64))
    (launch,) = launches
    arguments = launch.arguments
    assert launch.kernel == "quantize_1x128_kernel<Input::kBFloat16, 4, 8, true>"
    assert (launch.grid, launch.block) == (-(-3 * 3 * 5 * 8 // 64), 64)
    assert (launch.stream, launch.programmatic) == (7, True)
    assert arguments.x == x.data_ptr()
    assert arguments.data == data.data_ptr()
    assert arguments.scale_inv == scale_inv.data_ptr()
    assert (arguments.matrix_bytes, arguments.row_bytes) == (2 * 10 * 1024, 2 * 1024)
    assert (arguments.num_matrices, arguments.num_rows, arguments.k) == (3, 9, 520)
    assert arguments.pitch == scale_inv.stride(-1) == 12
    assert (arguments.num_k_blocks.value, arguments.num_row_tiles.value) == (5, 3)
    assert arguments.ue8m0 == 1


def test_all_matrices_go_in_one_launch(launches):
    w = torch.zeros(2, 2, 200, 260)
    data, scale_inv = launch_quantize_128x128(w, False)
    (launch,) = launches
    assert launch.kernel == "quantize_128x128_kernel<Input::kFloat, false>"
    assert (launch.grid, launch.block) == (2 * 2 * 2 * 3, 256)
    assert (launch.arguments.num_matrices, launch.arguments.num_rows) == (4, 200)
    assert (data.shape, scale_inv.shape) == ((2, 2, 200, 260), (2, 2, 2, 3))


def test_a_launch_is_prepared_once_and_takes_new_addresses(launches):
    x, y = torch.zeros(2, 16, 256).unbind()
    kept = [launch_quantize_1x128(x, False), launch_quantize_1x128(y, False)]
    assert launches[0].launch is launches[1].launch
    for launch, source, (data, scale_inv) in zip(launches, (x, y), kept, strict=True):
        addresses = launch.arguments.x, launch.arguments.data, launch.arguments.scale_inv
        assert addresses == (source.data_ptr(), data.data_ptr(), scale_inv.data_ptr())
    launch_quantize_1x128(x, True)
    launch_quantize_1x128(x[:8], False)
    launch_quantize_1x128(x.bfloat16(), False)
    assert len({launch.launch for launch in launches}) == 4


def test_what_is_prepared_does_not_grow_for_ever(launches, monkeypatch):
    monkeypatch.setattr(room, "_MAX_PREPARED", 3)
    for m in range(1, 9):
        launch_quantize_1x128(torch.zeros(m, 8), False)
        assert len(room._of_thread.prepared) <= 3
    assert len(launches) == 8


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (2, 0, 5), (0,), (2, 3, 0)])
def test_nothing_is_launched_for_nothing(launches, shape):
    expected = torch.ops.moefp8.quantize_1x128(torch.zeros(shape), False)
    ours = launch_quantize_1x128(torch.zeros(shape), False)
    assert [t.shape for t in ours] == [t.shape for t in expected]
    if len(shape) > 1:
        launch_quantize_128x128(torch.zeros(shape), False)
    assert launches == []


@pytest.mark.parametrize(
    ("make", "vectorized", "copied"),
    [
        (lambda: torch.zeros(6, 128), True, False),
        (lambda: torch.zeros(6, 136)[:, 4:132], True, False),  # 16 B on in rows 32 B apart
        (lambda: torch.zeros(6, 136)[:, 1:129], False, False),
        (lambda: torch.zeros(6, 130)[:, :128], False, False),
        (lambda: torch.zeros(6, 124), False, False),  # a row of codes ends in the middle of 8
        (lambda: torch.zeros(1, 128).expand(6, 128), True, False),
        (lambda: torch.zeros(128, 6).T, True, True),
        (lambda: torch.zeros(6, 4, 128)[:, :3], True, False),
        (lambda: torch.zeros(4, 6, 128).transpose(0, 1), True, False),
        (lambda: torch.zeros(2, 3, 6, 256)[..., :128], True, False),
        (lambda: torch.zeros(2, 3, 6, 128).transpose(0, 1), True, True),
        (lambda: torch.zeros(128), True, False),
        (lambda: torch.zeros(6, 5)[:, 2:3], False, False),
    ],
)
def test_strides_are_read_as_they_are(launches, make, vectorized, copied):
    x = make()
    launch_quantize_1x128(x, False)
    (launch,) = launches
    assert launch.kernel.endswith(", true>" if vectorized else ", false>")
    assert (launch.arguments.x != x.data_ptr()) == copied


def test_more_tiles_than_a_kernel_counts_are_refused(launches):
    x = torch.zeros(1, 1, dtype=torch.bfloat16).expand(2**31, 1)
    scale_inv = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"got \[1, 2147483648, 1\].*split the tensor"):
        room._prepare(x, scale_inv, False, False, None, 0)
