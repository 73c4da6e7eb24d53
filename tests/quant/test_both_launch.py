"""The launcher of `both.cu` and the kernel's own text, without a GPU."""

import re

import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.common.blocks import E4M3
from moefp8.kernels.jit import compile_kernels
from moefp8.kernels.program import Codes, Place, Record, Tensor
from moefp8.quant import both as room
from moefp8.quant.both import empty_both, quantize_128x128_both, quantize_128x128_both_into
from tests import records
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.gpu import ARCH
from tests.kernels import nvdisasm
from tests.quant.both_cases import DTYPES, SHAPES, assert_same, expected_of, run_into, weights


def kernels_of(dtype: torch.dtype, k: int) -> list[jit.Kernel]:
    return list(dict.fromkeys(room.both_kernels(records.TARGET, dtype, k)))


KERNELS = [kernel for dtype in DTYPES for kernel in kernels_of(dtype, 16)]

# ---- The kernel's text ----


@pytest.mark.usefixtures("own_cache")
def test_every_variant_compiles_and_spills_nothing(tmp_path):
    assert len(KERNELS) == 6
    assert kernels_of(torch.float32, 12) == [KERNELS[-1]]
    cubins = compile_kernels(KERNELS, ARCH)
    for kernel, cubin in zip(KERNELS, cubins, strict=True):
        assert cubin.problems() == []
        registers = int(re.findall(r"Used (\d+) registers", cubin.log)[-1])
        if kernel.name.endswith("true>"):
            # Five CTAs of an SM have 32 KB of BF16 in flight each, or three 64 KB of FP32.
            assert registers <= (80 if "kFloat" in kernel.name else 48), kernel.name
    if nvdisasm.is_installed():
        # A thread has 64 weights. An H200 issues 27 instructions of an element while its 4 bytes
        # move: 2 are read and 2 written.
        vectorized = [cubin.image for cubin in cubins[::2]]
        for instructions in nvdisasm.instructions_of(vectorized, tmp_path):
            assert len(instructions) < 13 * 64


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    return cuda_on_cpu.build(KERNELS, tmp_path_factory.mktemp("both"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_text_writes_every_code(functions, dtype):
    driver = FakeDriver(library=cuda_on_cpu.OnCpu(functions))
    for shape in SHAPES:
        for parts in (1, 2):
            if shape[-2] % parts == 0:
                w = weights(*shape, dtype=dtype)
                expected = expected_of(w, parts)
                with jit.using(driver):
                    assert_same(quantize_128x128_both(w, parts), expected)
    assert {launch.kernel.name for launch in driver.launched} == {
        room.kernel_of(dtype, vectorized=flag).name for flag in (True, False)
    }


@pytest.mark.parametrize("where", [(0, 0, 0), (16, 32, 16), (3, 2, 1)])
def test_the_kernels_text_writes_nothing_else(functions, where):
    driver = FakeDriver(library=cuda_on_cpu.OnCpu(functions))
    for shape, parts in (((2, 96, 48), 2), ((131, 136), 1), ((3, 7, 160), 1)):
        for dtype in (torch.bfloat16, torch.float32):
            run_into(weights(*shape, dtype=dtype), parts, *where, jit.using(driver))
    is_aligned = [x.kernel.name.endswith("true>") for x in driver.launched]
    assert any(is_aligned) == (where[0] != 3)


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_the_kernels_text_reads_any_pitch(functions, shift):
    for w in (weights(3, 6, 200, 64), weights(3, 5, 200, 59)):
        strided = w[:, 1, ::2, shift : shift + 32]
        expected = expected_of(strided, 2)
        with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(functions))) as driver:
            assert_same(quantize_128x128_both(strided, 2), expected)
        (launch,) = driver.launched
        is_aligned = w.shape[-1] == 64 and shift % 8 == 0
        assert launch.kernel.name == room.kernel_of(w.dtype, vectorized=is_aligned).name


# ---- The launcher ----


def test_launch_says_where_everything_lies(gpu):
    w = weights(3, 300, 528)[:, :200, 16:160]
    made = empty_both(w, 2)
    quantize_128x128_both_into(w, 2, *made)
    (launch,) = gpu.launched
    x = launch.arguments
    assert launch.kernel.name == "both_kernel<Input::kBFloat16, true>"
    assert (launch.grid, launch.block, launch.shared_bytes) == (3 * 2 * 1 * 2, 256, 128 * 128 + 32)
    assert (launch.stream, launch.programmatic) == (7, False)
    assert (x.w, x.data, x.scale_inv, x.transposed) == (
        w.data_ptr(),
        *(y.data_ptr() for y in made),
    )
    assert (x.w_matrix_pitch, x.w_part_pitch, x.w_row_pitch) == (2 * 158400, 2 * 52800, 2 * 528)
    assert (x.transposed_matrix_pitch, x.transposed_row_pitch) == (144 * 256, 256)
    assert (x.num_rows, x.k, x.width) == (100, 144, 128)
    assert (x.num_k_tiles.value, x.num_row_tiles.value, x.num_parts.value) == (2, 1, 2)


def assert_right(w: torch.Tensor, parts: int = 1) -> None:
    assert_same(quantize_128x128_both(w, parts), expected_of(w, parts))


def test_a_launch_is_prepared_once_and_takes_new_addresses(gpu):
    def num_prepared() -> int:
        return len([key for key in gpu.prepared() if key[0] == "quantize_128x128_both"])

    for w in (*weights(2, 32, 48).unbind(), weights(32, 48)):
        assert_right(w)
    assert num_prepared() == 1
    others = (
        (weights(16, 48), 1),
        (weights(32, 49)[:, 1:], 1),
        (weights(32, 48), 2),
        (weights(32, 48).float(), 1),
    )
    for arguments in others:
        assert_right(*arguments)
    assert num_prepared() == 1 + len(others)


def test_weights_of_one_layout_may_be_aligned_in_any_way(gpu):
    """The emulated kernel checks that what it loads at once is aligned."""
    memory = weights(33, 48).flatten()
    for begin in (0, 1, 8, 0):
        assert_right(memory[begin:][: 32 * 48].view(32, 48))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0), (0, 4, 16), (2, 0, 16), (2, 4, 0)])
def test_nothing_is_launched_for_nothing(gpu, shape):
    assert quantize_128x128_both(weights(*shape), 2).data.shape == shape
    assert gpu.launched == []


def test_more_tiles_than_a_kernel_counts_are_refused():
    w, codes = (
        Tensor((1, 2**31), (2**31, 1), dtype, Place("w")) for dtype in (torch.float32, E4M3)
    )
    with pytest.raises(ValueError, match=r"got \[1, 2147483648\].*split the tensor"):
        room.describe_both(Record(records.TARGET, ("w",)), w, 1, Codes(codes, codes), codes.mT)
