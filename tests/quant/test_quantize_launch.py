"""The launchers of `quantize.cu`, without a GPU."""

import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moefp8.kernels.common.blocks import E4M3, divisor_of
from moefp8.kernels.jit import compile_kernels
from moefp8.kernels.program import Codes, Place, Record, Tensor
from moefp8.quant import quantize as room
from moefp8.quant.quantize import (
    QuantizeCut,
    launch_quantize_1x128,
    quantize_1x128,
    quantize_128x128,
    quantize_gradient_1x128,
)
from tests import records
from tests.gpu import ARCH, NUM_SMS, same_bits

DTYPES = torch.bfloat16, torch.float16, torch.float32

# ---- Compiling ----


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_compiles_and_spills_nothing(dtype):
    kernels = list(dict.fromkeys(room.quantize_kernels(records.TARGET, dtype, 2**20, 128)))
    kernels += [room.kernel_of(room.BLOCK_ROWS, dtype, vectorized) for vectorized in (True, False)]
    assert len(kernels) == 6
    for kernel, cubin in zip(kernels, compile_kernels(kernels, ARCH), strict=True):
        assert cubin.problems() == []
        registers = int(re.findall(r"Used (\d+) registers", cubin.log)[-1])
        if dtype.itemsize == 2 and kernel.name.endswith("true>"):
            assert registers <= 64, kernel.name  # 1024 threads of an SM keep their bytes in flight


# ---- The launcher ----


@given(n=st.integers(0, 2**31 - 1), value=st.integers(1, 2**31 - 1))
@example(n=2**31 - 1, value=1)
@example(n=2**31 - 1, value=2**31 - 1)
@example(n=2**31 - 2, value=3)
def test_divisor_divides(n, value):
    divisor = divisor_of(value)
    assert n * divisor["magic"] >> divisor["shift"] == n // value
    assert divisor["value"] == value
    assert n * divisor["magic"] < 2**64


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


def test_launch_says_where_everything_lies(gpu):
    x = torch.randn(3, 10, 1024).bfloat16()[:, :9, :520]
    data, scale_inv = launch_quantize_1x128(x, True, cut=QuantizeCut(4, 8, 64))
    (launch,) = gpu.launched
    arguments = launch.arguments
    assert launch.kernel.name == "quantize_1x128_kernel<Input::kBFloat16, 4, 8, true>"
    assert (launch.grid, launch.block) == (-(-3 * 3 * 5 * 8 // 64), 64)
    assert launch.stream == 7
    assert (arguments.x, arguments.data) == (x.data_ptr(), data.data_ptr())
    assert arguments.scale_inv == scale_inv.data_ptr()
    assert (arguments.matrix_bytes, arguments.row_bytes) == (2 * 10 * 1024, 2 * 1024)
    assert (arguments.num_matrices, arguments.num_rows, arguments.k) == (3, 9, 520)
    assert arguments.pitch == scale_inv.stride(-1) == 12
    assert (arguments.num_k_blocks.value, arguments.num_row_tiles.value) == (5, 3)
    assert arguments.ue8m0 == 1


def test_all_matrices_go_in_one_launch(gpu):
    data, scale_inv = quantize_128x128(torch.zeros(2, 2, 200, 260), False)
    (launch,) = gpu.launched
    assert launch.kernel.name == "quantize_128x128_kernel<Input::kFloat, false>"
    assert (launch.grid, launch.block) == (2 * 2 * 2 * 3, 256)
    assert (launch.arguments.num_matrices, launch.arguments.num_rows) == (4, 200)
    assert (data.shape, scale_inv.shape) == ((2, 2, 200, 260), (2, 2, 2, 3))


def test_a_launch_is_prepared_once_and_takes_new_addresses(gpu):
    for x in torch.randn(2, 16, 256).unbind():
        assert_right(x)
    assert len(gpu.prepared()) == 1
    others = (x[:8], False), (x.bfloat16(), False), (x[:, 1:], False), (x, True)
    for arguments in others:
        assert_right(*arguments)
    assert len(gpu.prepared()) == 1 + len(others)


def test_gradients_with_the_layout_of_activations_have_a_floor_of_their_own(gpu):
    x = 1e-6 * torch.randn(16, 256)
    assert_right(x)
    of_gradient = quantize_gradient_1x128(x), quantize_gradient_1x128.overload(x)
    assert all(map(same_bits, *of_gradient))
    assert_right(x)


def assert_right(x: torch.Tensor, ue8m0: bool = False) -> None:
    assert all(map(same_bits, quantize_1x128(x, ue8m0), quantize_1x128.overload(x, ue8m0)))


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (2, 0, 5), (0,), (2, 3, 0)])
def test_nothing_is_launched_for_nothing(gpu, shape):
    for op in (quantize_1x128, quantize_128x128)[: len(shape)]:
        ours, expected = (f(torch.zeros(shape), False) for f in (op, op.overload))
        assert [x.shape for x in ours] == [x.shape for x in expected]
    assert gpu.launched == []


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
def test_strides_are_read_as_they_are(gpu, make, vectorized, copied):
    x = make().uniform_() if 0 not in make().stride() else make()
    assert_right(x)
    (launch,) = gpu.launched
    assert launch.kernel.name.endswith(", true>" if vectorized else ", false>")
    assert (launch.arguments.x != x.data_ptr()) == copied


def test_more_tiles_than_a_kernel_counts_are_refused():
    x = Tensor((2**31, 1), (0, 1), torch.bfloat16, Place("x"))
    r, out = Record(records.TARGET, ("x", "out")), Tensor((2**31, 1), (1, 1), E4M3, Place("out"))
    with pytest.raises(ValueError, match=r"got \[1, 2147483648, 1\].*split the tensor"):
        room.describe_quantize(r, x, Codes(out, out), None)
