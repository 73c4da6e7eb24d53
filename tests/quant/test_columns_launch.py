"""The launcher of `columns.cu` and the kernel's own text, without a GPU."""

import re

import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.common.blocks import E4M3
from moefp8.kernels.jit import compile_kernels
from moefp8.kernels.program import Codes, Place, Record, Tensor
from moefp8.quant import columns as room
from moefp8.quant.columns import columns_kernels, quantize_1x128_and_128x1, quantize_128x1
from tests import records
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.gpu import ARCH
from tests.kernels import nvdisasm
from tests.quant.columns_cases import (
    COUNTS,
    DTYPES,
    assert_same,
    awkward,
    check_both_ops,
    offsets_of,
)

KERNELS = [
    kernel
    for dtype in DTYPES
    for blocks in (False, True)
    for with_rows in (True, False)
    for vectorized in (True, False)
    for kernel in [room.kernel_of(dtype, blocks=blocks, with_rows=with_rows, vectorized=vectorized)]
]
of_blocks = pytest.mark.parametrize("blocks", [False, True], ids=["128x1", "128x128"])

# ---- The kernel's text ----


@pytest.mark.usefixtures("own_cache")
def test_every_variant_compiles_and_spills_nothing(tmp_path):
    assert len(KERNELS) == len(set(KERNELS)) == 24
    assert {*columns_kernels(records.TARGET, DTYPES[0], 8, blocks=False)} == {*KERNELS[2:4]}
    assert {*columns_kernels(records.TARGET, DTYPES[0], 12, blocks=False)} == {*KERNELS[3:4]}
    assert {*columns_kernels(records.TARGET, DTYPES[0], 12, blocks=True)} == {*KERNELS[7:8]}
    cubins = compile_kernels(KERNELS, ARCH)
    for kernel, cubin in zip(KERNELS, cubins, strict=True):
        assert cubin.problems() == []
        registers = int(re.findall(r"Used (\d+) registers", cubin.log)[-1])
        is_usual = "kFloat" not in kernel.name and kernel.name.endswith("true>")
        # Four CTAs of an SM keep their 32 KB in flight, or two their 64 KB.
        assert registers <= (64 if is_usual else 128)
    if nvdisasm.is_installed():
        # To find one scale for 128 features takes less than to find 128 scales.
        usual = [cubin.image for cubin in cubins[:8:2]]
        both, columns, both_blocks, column_blocks = map(
            len, nvdisasm.instructions_of(usual, tmp_path)
        )
        assert both_blocks < both
        assert column_blocks < columns


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("columns")
    return cuda_on_cpu.build(KERNELS, folder, with_numerics=True)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_text_gives_every_code(functions, name, dtype):
    with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(functions))) as driver:
        cases = (136, False, 0), (131, True, 0), (8, False, 3), (1, True, 2)
        for k, ue8m0, shift in cases[2:] if name == "more than threads" else cases:
            check_both_ops(name, k, dtype, "cpu", ue8m0, shift)
    names = {launch.kernel.name for launch in driver.launched}
    assert names <= {kernel.name for kernel in KERNELS}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_text_gives_every_code_of_blocks(functions, name, dtype):
    with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(functions))) as driver:
        cases = (
            (264, False, 0, True),
            (131, True, 0, False),
            (136, True, 3, True),
            (1, False, 2, True),
        )
        for k, ue8m0, shift, finite in cases[3:] if name == "more than threads" else cases:
            check_both_ops(name, k, dtype, "cpu", ue8m0, shift, blocks=True, finite=finite)
    names = {launch.kernel.name for launch in driver.launched}
    assert names <= {kernel.name for kernel in KERNELS if kernel.name.split(", ")[1] == "true"}


@of_blocks
@pytest.mark.parametrize("seed", range(4))
def test_the_kernels_text_survives_any_offsets(functions, seed, blocks):
    """It reads nothing but x, and writes nothing around what is to be written."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, low: int = -(2**31), high: int = 2**31) -> torch.Tensor:
        made = torch.randint(low, high, shape, dtype=torch.int64, generator=generator)
        return made.to(torch.int32)

    num_rows, k, num_experts, guard = 300, 136, 7, 64
    around = torch.full((num_rows + 2 * guard, k), torch.nan, dtype=torch.bfloat16)
    x = around[guard:-guard].fill_(1.0)
    num_blocks, num_scales = num_rows // 128 + num_experts, 2 if blocks else k
    with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(functions))):
        for with_rows in (True, False):
            offsets = torch.where(
                random(num_experts + 1, low=0, high=3) == 0,
                random(num_experts + 1),
                random(num_experts + 1, low=-200, high=600),
            )
            shapes = {"data": num_blocks * k * 128, "scale_inv": 4 * num_blocks * num_scales}
            if with_rows:
                shapes |= {"row_data": num_rows * k, "row_scale_inv": 4 * 2 * num_rows}
            memory = {
                name: torch.full((n + 2 * guard,), 0xFF, dtype=torch.uint8)
                for name, n in shapes.items()
            }
            made = {
                name: Tensor(shape, strides, dtype, Place(name, guard))
                for name, shape, strides, dtype in (
                    ("data", (num_blocks, k, 128), (k * 128, 128, 1), E4M3),
                    ("scale_inv", (num_blocks, num_scales), (num_scales, 1), torch.float32),
                    ("row_data", (num_rows, k), (k, 1), E4M3),
                    ("row_scale_inv", (num_rows, 2), (1, num_rows), torch.float32),
                )
            }

            def describe(r: Record, with_rows=with_rows, made=made) -> None:
                data, scale_inv, *rows = made.values()
                room.describe_columns(
                    r,
                    Tensor.of(x, "x"),
                    Codes(data, scale_inv),
                    num_rows,
                    num_experts=num_experts,
                    expert_offsets=Place("expert_offsets"),
                    row_to_token=None if with_rows else Place("row_to_token"),
                    rows=Codes(*rows) if with_rows else None,
                    min_amax=1e-4,
                    blocks=blocks,
                )

            order = None if with_rows else random(num_rows)
            # Where the allocator begins decides how x is read, and so do the codes.
            records.run(describe, x=x, expert_offsets=offsets, row_to_token=order, **memory)
            for name, found in memory.items():
                assert bool((found[:guard] == 0xFF).all()), name
                assert bool((found[-guard:] == 0xFF).all()), name
                if "data" in name:  # nothing is read that is no number: NaN would be 0x7f
                    assert not bool((found == 0x7F).any())


# ---- The launcher ----


def test_launch_says_where_everything_lies(gpu):
    x = torch.randn(200, 400).bfloat16()[::2, 16:280]
    offsets = offsets_of([40, 0, 50])
    row_data, row_scale_inv, data, scale_inv = quantize_1x128_and_128x1(x, offsets, True, 0.5)
    (launch,) = gpu.launched
    given = launch.arguments
    assert launch.kernel.name == "columns_kernel<Input::kBFloat16, false, true, true>"
    assert (launch.grid, launch.block, launch.shared_bytes) == (3 * 3, 256, 0)
    assert (launch.stream, launch.programmatic) == (7, False)
    assert (given.x, given.expert_offsets) == (x.data_ptr(), offsets.data_ptr())
    assert given.row_to_token is None
    outputs = data, scale_inv, row_data, row_scale_inv
    addresses = given.data, given.scale_inv, given.row_data, given.row_scale_inv
    assert addresses == tuple(y.data_ptr() for y in outputs)
    assert (given.pitch, given.row_pitch, given.row_bytes) == (264, 100, 1600)
    assert (given.k, given.num_tokens, given.num_rows, given.num_experts) == (264, 100, 100, 3)
    assert (given.num_k_blocks.value, given.ue8m0, given.min_amax) == (3, 1, 0.5)
    assert data.dtype == row_data.dtype == E4M3


def test_launch_for_blocks_says_where_their_scales_lie(gpu):
    x, offsets = awkward(200, 264, torch.float16), offsets_of([140, 60])
    *_, scale_inv = quantize_1x128_and_128x1(x, offsets, True, 0.5, True)
    columns = quantize_128x1(x, offsets, None, True, 0.5, True)
    assert [launch.kernel.name for launch in gpu.launched] == [
        "columns_kernel<Input::kHalf, true, true, true>",
        "columns_kernel<Input::kHalf, true, false, true>",
    ]
    for launch, scales in zip(gpu.launched, (scale_inv, columns[1]), strict=True):
        assert (launch.grid, launch.block, launch.shared_bytes) == (3 * 3, 256, 0)
        assert (launch.arguments.scale_inv, launch.arguments.pitch) == (scales.data_ptr(), 4)
        assert (scales.shape, scales.stride()) == ((3, 3), (4, 1))
        assert (launch.arguments.ue8m0, launch.arguments.min_amax) == (1, 0.5)
    assert_same(columns, quantize_128x1.overload(x, offsets, None, True, 0.5, True), offsets, 200)


def test_gathered_rows_are_as_many_as_the_map(gpu):
    x, offsets = awkward(50, 264, torch.float32), offsets_of([100, 200])
    row_to_token = torch.randint(0, 50, (300,), dtype=torch.int32)
    found = quantize_128x1(x, offsets, row_to_token, False, 1e-4)
    (launch,) = gpu.launched
    assert launch.kernel.name == "columns_kernel<Input::kFloat, false, false, true>"
    assert launch.grid == (300 // 128 + 2) * 3
    assert (launch.arguments.num_tokens, launch.arguments.num_rows) == (50, 300)
    assert launch.arguments.row_to_token == row_to_token.data_ptr()
    expected = quantize_128x1.overload(x, offsets, row_to_token, False, 1e-4)
    assert_same(found, expected, offsets, 300)


@pytest.mark.parametrize(
    ("view", "vectorized", "copied"),
    [
        (lambda x: x, True, False),
        (lambda x: x[:, 8:136], True, False),
        (lambda x: x[:, 1:129], False, False),
        (lambda x: x[:, :124], False, False),
        (lambda x: x.T, True, True),
        (lambda x: x[:1].expand(140, 400), True, False),
        (lambda x: x[:, 4:5], False, False),
        (lambda x: x.view(-1)[:400].as_strided((1, 400), (3, 1)), True, False),
    ],
)
def test_rows_are_read_as_they_lie(gpu, view, vectorized, copied):
    x = view(torch.randn(160, 400).bfloat16())
    found = quantize_1x128_and_128x1(x, None, False, 1e-4)
    assert_same(found, quantize_1x128_and_128x1.overload(x, None, False, 1e-4), None, len(x))
    (launch,) = gpu.launched
    assert launch.kernel.name.endswith(", true>" if vectorized else ", false>")
    assert (launch.arguments.x != x.data_ptr()) == copied


def test_rows_that_lie_far_apart_are_copied():
    far = torch.empty(2, 4, dtype=torch.bfloat16, device="meta").as_strided((2, 4), (2**31, 1))
    assert room.readable(far).stride() == (4, 1)
    near = torch.empty(2, 4, dtype=torch.bfloat16, device="meta").as_strided((2, 4), (2**30, 1))
    assert room.readable(near) is near
    assert room.readable(far[:1]).stride() == (2**31, 1)


def test_a_launch_is_prepared_once_and_takes_new_addresses(gpu):
    def run(x, *arguments):
        found = quantize_128x1(x, *arguments)
        rows = len(x) if arguments[1] is None else len(arguments[1])
        assert_same(found, quantize_128x1.overload(x, *arguments), arguments[0], rows)

    order = torch.arange(64, dtype=torch.int32)
    for x in torch.randn(3, 64, 256).unbind():
        for counts in ([60, 4], [1, 63]):
            run(x, offsets_of(counts), None, False, 1e-4)
    assert len(gpu.prepared()) == 1
    x = torch.randn(64, 256)
    others = [
        (x, None, None, False, 1e-4),
        (x, offsets_of([1, 2, 3]), None, False, 1e-4),
        (x, offsets_of([60, 4]), order, False, 1e-4),
        (x, offsets_of([60, 4]), order[:62].clamp(max=3), False, 1e-4),
        (x, offsets_of([60, 4]), None, True, 1e-4),
        (x, offsets_of([60, 4]), None, False, 1e-3),
        (x, offsets_of([60, 4]), None, False, 1e-4, True),
        (x.half(), offsets_of([60, 4]), None, False, 1e-4),
        (x[:, :255], offsets_of([60, 4]), None, False, 1e-4),
    ]
    for x, offsets, *rest in others:
        rows = len(x) if rest[0] is None else len(rest[0])
        run(x, None if offsets is None else offsets.clamp(max=rows), *rest)
    assert len(gpu.prepared()) == 1 + len(others)


def test_offsets_and_maps_may_have_gaps(gpu):
    x, offsets = torch.randn(40, 8), torch.tensor([[0, 1], [10, 1], [40, 1]], dtype=torch.int32)
    order = torch.randint(0, 40, (40, 3), dtype=torch.int32)
    arguments = x, offsets[:, 0], order[:, 1], False, 1e-4
    found = quantize_128x1(*arguments)
    assert len(gpu.launched) == 1
    assert_same(found, quantize_128x1.overload(*arguments), offsets[:, 0], 40)


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (0, 0)])
@pytest.mark.parametrize("offsets", [None, torch.zeros(4, dtype=torch.int32)])
def test_nothing_is_launched_for_nothing(gpu, shape, offsets):
    x = torch.zeros(shape)
    for op, more in ((quantize_128x1, (None,)), (quantize_1x128_and_128x1, ())):
        arguments = x, offsets, *more, False, 1e-4
        found, expected = op(*arguments), op.overload(*arguments)
        assert [y.shape for y in found] == [y.shape for y in expected]
    assert gpu.launched == []


def test_tokens_may_be_none_where_rows_are_some(functions):
    """Rows of no token are zeros, and x is not read."""
    x, order = torch.zeros(0, 8), torch.full((40,), -1, dtype=torch.int32)
    with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(functions))):
        data, scale_inv = quantize_128x1(x, None, order, False, 1e-4)
    assert not bool(data.view(torch.uint8)[:, :, :64].any())
    assert bool((scale_inv == torch.tensor(1e-4) / 448).all())


def test_more_tiles_than_a_kernel_counts_are_refused():
    x = Tensor((2**31, 1), (0, 1), torch.bfloat16, Place("x"))
    r, columns = (
        Record(records.TARGET, ("x",)),
        Tensor((2**24, 1, 128), (128, 128, 1), E4M3, Place("x")),
    )
    with pytest.raises(ValueError, match=r"x \[2147483648, 1\].*split the tensor"):
        room.describe_columns(r, x, Codes(columns, columns), 2**31, min_amax=1e-4)
