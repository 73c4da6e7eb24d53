"""The launcher of `transpose.cu` and the kernel's own text, without a GPU."""

import re

import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.common.blocks import E4M3
from moefp8.kernels.jit import compile_kernels
from moefp8.kernels.program import Place, Record, Tensor
from moefp8.quant import transpose as room
from moefp8.quant.transpose import transpose_codes, transpose_codes_into
from tests import records
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.gpu import ARCH, same_bits
from tests.quant.transpose_cases import LAYOUTS, SHAPES, codes, run_into

KERNELS = list(room.transpose_kernels(records.TARGET, 16))

# ---- The kernel's text ----


@pytest.mark.usefixtures("own_cache")
def test_every_variant_compiles_and_spills_nothing():
    assert len(KERNELS) == 2
    assert {*room.transpose_kernels(records.TARGET, 24)} == {*KERNELS[1:]}
    for cubin in compile_kernels(KERNELS, ARCH):
        assert cubin.problems() == []
        registers = int(re.findall(r"Used (\d+) registers", cubin.log)[-1])
        assert registers <= 40  # six CTAs of an SM keep their 16 KB in flight


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    return cuda_on_cpu.build(KERNELS, tmp_path_factory.mktemp("transpose"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernels_text_moves_every_code(functions, layout):
    with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(functions))) as driver:
        for shape in SHAPES:
            for parts in (1, 2):
                if shape[-2] % parts == 0:
                    run_into(codes(*shape), parts, layout)
    names = {launch.kernel.name for launch in driver.launched}
    assert len(names) == (1 if layout == "at odd places" else 2)


@pytest.mark.parametrize("shift", [0, 1, 16])
def test_the_kernels_text_reads_any_pitch(functions, shift):
    with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(functions))) as driver:
        for w in (codes(3, 7, 192, 64), codes(3, 5, 192, 59)):
            run_into(w[:, 1, ::2, shift : shift + 32], 2, "aligned")
    vectorized, other = (x.kernel.name == "transpose_kernel<true>" for x in driver.launched)
    assert (vectorized, other) == (shift % 16 == 0, False)


# ---- The launcher ----


def test_launch_says_where_everything_lies(gpu):
    w = codes(3, 300, 528)[:, :200, 16:160]
    out = codes(3, 144, 400)[..., 16:272]
    transpose_codes_into(w, 2, out)
    (launch,) = gpu.launched
    x = launch.arguments
    assert launch.kernel.name == "transpose_kernel<true>"
    assert (launch.grid, launch.block, launch.shared_bytes) == (3 * 2 * 1 * 2, 256, 128 * 128)
    assert (launch.stream, launch.programmatic) == (7, False)
    assert (x.w, x.out) == (w.data_ptr(), out.data_ptr())
    assert (x.w_matrix_pitch, x.w_part_pitch, x.w_row_pitch) == (300 * 528, 100 * 528, 528)
    assert (x.out_matrix_pitch, x.out_row_pitch) == (144 * 400, 400)
    assert (x.num_rows, x.k, x.width) == (100, 144, 128)
    assert (x.num_k_tiles.value, x.num_row_tiles.value, x.num_parts.value) == (2, 1, 2)


def test_a_launch_is_prepared_once_and_takes_new_addresses(gpu):
    for w in (*codes(2, 32, 48).unbind(), codes(32, 48)):
        assert_right(w)
    assert len(gpu.prepared()) == 1
    others = (codes(16, 48), 1), (codes(32, 49)[:, 1:], 1), (codes(32, 48), 2)
    for arguments in others:
        assert_right(*arguments)
    assert len(gpu.prepared()) == 1 + len(others)


def assert_right(w: torch.Tensor, parts: int = 1) -> None:
    expected = transpose_codes(w, parts)  # launched
    found = torch.empty_like(expected)
    transpose_codes_into.overload(w, parts, found)
    assert same_bits(found, expected)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0), (0, 4, 16), (2, 0, 16), (2, 4, 0)])
def test_nothing_is_launched_for_nothing(gpu, shape):
    assert transpose_codes(codes(*shape), 2).shape[-2] == shape[-1]
    assert gpu.launched == []


def test_a_single_row_or_matrix_has_no_pitch(gpu):
    """Their strides say nothing, and spoil no alignment."""
    matrix = codes(16 * 48).as_strided((1, 16, 48), (7, 48, 1))
    row = codes(51)[:48].as_strided((1, 48), (51, 1))
    column = codes(16, 16)[:, :1].as_strided((16, 1), (1, 1))
    for w in (matrix, row):
        assert_right(w)
    assert_right(column)
    assert [x.kernel.name[17:] for x in gpu.launched] == ["true>", "true>", "false>"]


def test_weights_of_no_rows_give_zeros(gpu):
    run_into(codes(2, 0, 48), 1, "aligned")
    assert len(gpu.launched) == 1


def test_a_launch_may_lie_among_others(gpu):
    """In memory that a call tells, and as early as a stream allows."""
    w, memory = codes(96, 48), torch.zeros(32 + 48 * 112, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    out = Tensor((48, 96), (112, 1), E4M3, Place("memory", 16))

    def describe(r: Record) -> None:
        room.describe_transpose(r, Tensor.of(w, "w"), 1, out, programmatic=True)

    records.run(describe, memory=memory, w=w)
    found = memory[16 : 16 + 48 * 112].view(48, 112)
    assert torch.equal(found[:, :96], w.view(torch.uint8).T)
    assert not found[:, 96:].any()
    assert gpu.launched[0].programmatic
    assert gpu.launched[0].kernel.name == "transpose_kernel<true>"


def test_more_tiles_than_a_kernel_counts_are_refused():
    w = Tensor((1, 2**31), (2**31, 1), E4M3, Place("w"))
    with pytest.raises(ValueError, match=r"got \[1, 2147483648\].*split the tensor"):
        room.describe_transpose(Record(records.TARGET, ("w",)), w, 1, w.mT)
