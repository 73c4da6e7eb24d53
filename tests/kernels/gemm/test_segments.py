"""Segments of `grouped_layout`: the kernel's own text on the CPU, and how it is launched."""

import pytest
import torch

from moefp8.kernels import jit, m_grouped_fp8_gemm_nt_contiguous
from moefp8.kernels.gemm import segments
from moefp8.kernels.gemm.grouped import finds_segments
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.program import Place
from tests.fakes import cuda_on_cpu
from tests.fakes.emulated_gemm import layout_of as layout_of_gemm
from tests.fakes.emulated_gemm import list_of_segments
from tests.fakes.emulator import FakeDriver
from tests.gpu import ARCH
from tests.kernels.gemm.grouped_cases import by_rows, expected_of, operands, run_op
from tests.kernels.gemm.segments_cases import (
    LAYOUTS,
    NUM_GROUPS,
    layout_of,
    list_of,
    random_layout,
)
from tests.records import run

THREADS = 1024, 64, 32  # of fewer, a CTA takes more than one round for few rows


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    kernels = [segments.kernel_of(threads) for threads in THREADS]
    return cuda_on_cpu.build(kernels, tmp_path_factory.mktemp("segments"))


def found_by_the_text(functions, threads, group_of_row, num_groups) -> list[int]:
    """The list, in memory of NaN; nothing is written behind it."""
    rows = torch.tensor([99, *group_of_row], dtype=torch.int32)[1:]  # at no multiple of 8 bytes
    size = segments.list_bytes(len(rows)) // 4
    written = torch.full((size + 4,), -1, dtype=torch.int32)
    assert written.data_ptr() % 16 == 0
    places, shape = (Place("rows"), Place("list")), (len(rows), num_groups)
    options = {"programmatic": False, "num_threads": threads}
    with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(functions))) as driver:
        run(
            lambda r: segments.describe_segments(r, *places, *shape, **options),
            rows=rows,
            list=written,
        )
        assert len(driver.launched) == 1
    assert written[size:].tolist() == [-1] * 4
    return written[:size].tolist()


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_kernels_text_finds_the_segments(functions, name, threads):
    found = found_by_the_text(functions, threads, LAYOUTS[name], NUM_GROUPS)
    assert found == list_of(LAYOUTS[name], NUM_GROUPS)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("num_blocks", [31, 32, 33, 64, 65, 127, 129, 200, 321])
def test_the_kernels_text_merges_over_warps_and_rounds(functions, num_blocks, threads):
    for seed, num_groups in enumerate((1, 3, 40)):
        rows = random_layout(num_blocks, num_groups, seed)
        assert found_by_the_text(functions, threads, rows, num_groups) == list_of(rows, num_groups)
    rows = layout_of([(0, 128)] * num_blocks, 77)
    assert found_by_the_text(functions, threads, rows, 1) == list_of(rows, 1)


def test_more_blocks_than_a_cta_takes_at_once(functions):
    for rows in (random_layout(2100, 9, 5), layout_of([(i // 2, 128) for i in range(1026)])):
        assert found_by_the_text(functions, 1024, rows, 600) == list_of(rows, 600)


@pytest.mark.parametrize("threads", THREADS)
def test_rows_that_break_the_rules_give_segments_within_the_tensors(functions, threads):
    rows = torch.randint(-1, 2, (128 * 70 + 5,)).tolist()
    found = found_by_the_text(functions, threads, rows, 2)
    entries = [found[i : i + 4] for i in range(4, len(found), 4)]
    assert 0 < found[0] <= len(entries)
    for begin, end, group, _ in entries[: found[0]]:
        assert 0 <= begin < end <= len(rows)
        assert rows[begin:end] == [group] * (end - begin)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_emulator_finds_the_same(name):
    assert list_of_segments(LAYOUTS[name], NUM_GROUPS) == list_of(LAYOUTS[name], NUM_GROUPS)


@pytest.mark.usefixtures("own_cache")
def test_the_kernel_compiles_and_spills_nothing():
    assert jit.compile_kernel(segments.kernel_of(), ARCH).problems() == []


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "expected"),
    [
        (1032, 8, False),
        (2047, 3, False), (2048, 3, True),
        (2696, 16, True),
        (4104, 32, False),  # a block for each
        (11912, 64, True),
        (40000, 256, False),
    ],
)  # fmt: skip
def test_segments_are_found_where_groups_have_several_blocks(num_rows, num_groups, expected):
    assert finds_segments(num_rows, num_groups) == expected


@pytest.mark.parametrize("spare", [-1, 0])
def test_many_rows_have_their_segments_found(gpu, spare):
    """By the op's own choice."""
    num_rows, runs = 2048 + spare, [(1, 700), (0, 1024), (1, 90), (2, 1)]
    routing = by_rows(runs, 3, num_rows - by_rows(runs, 3).num_tokens)
    made, bounds = operands(routing, 72, 144), routing.bounds_on()
    for _ in range(4):  # the last ones by a graph
        made.d.fill_(77)
        m_grouped_fp8_gemm_nt_contiguous(made[:2], made[2:4], made.d, bounds)
        assert torch.equal(made.d, expected_of(routing, made))
    names = [x.kernel.source.stem for x in gpu.launched]
    assert names == (["gemm"] if spare < 0 else ["segments", "gemm"]) * 4
    layout = GroupLayout.ROWS if spare < 0 else GroupLayout.SEGMENTS
    assert {layout_of_gemm(x) for x in gpu.gemms} == {layout}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", [(), (72,)])
def test_weights_of_too_few_dimensions_are_named_when_launched(shape):
    routing = by_rows([(0, 130)], 1)
    made = operands(routing, 72, 144)
    weights = torch.zeros(shape, dtype=torch.float8_e4m3fn), made.b_scale_inv
    with pytest.raises(ValueError, match="must have 3 dimensions"):
        m_grouped_fp8_gemm_nt_contiguous(made[:2], weights, made.d, routing.bounds_on())


def test_the_list_is_memory_of_each_call(gpu):
    routing = by_rows([(0, 130), (1, 5)], 2)._replace(layout=GroupLayout.SEGMENTS)
    made, bounds = operands(routing, 72, 144), routing.bounds_on()
    for _ in range(4):
        run_op(routing, made, bounds)
    assert [x.numel() for x in gpu.workspaces] == [segments.list_bytes(routing.num_tokens)] * 4
    addresses = {x.arguments.list for x in gpu.launched[::2]}
    assert addresses == {x.arguments.groups.bounds for x in gpu.gemms}
    assert len(gpu.prepared()) == 1
