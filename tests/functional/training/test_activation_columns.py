"""The gradient of SwiGLU in codes of rows and of columns: op, kernels' text, launch, and GPU."""

import math
import re
import shutil
from itertools import cycle

import pytest
import torch

from moefp8.functional.activation import activation_backward_kernel_of
from moefp8.functional.activation_rows import ActivationGradients, activation_rows_backward
from moefp8.functional.training import activation_columns as room
from moefp8.functional.training.activation_columns import (
    ActivationColumnsGradients,
    ActivationColumnsInputs,
    activation_columns_backward,
)
from moefp8.kernels import jit
from moefp8.kernels.common.activation import KINDS, SWIGLU, Activation
from moefp8.kernels.common.blocks import E4M3
from moefp8.kernels.jit import compile_kernels
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver, emulated
from tests.functional.activation.cases import ACTIVATIONS
from tests.functional.training.activation_columns_cases import (
    CASES,
    Case,
    assert_blocks_change_activated_alone,
    assert_same,
    assert_untouched,
    blocks_of,
    check,
    cpu,
    make,
    run,
)
from tests.gpu import ARCH, on_cpu_and_gpu, on_gpu, poison
from tests.sampling import ALL_KERNELS

DTYPES = torch.bfloat16, torch.float16, torch.float32
SAVED_DTYPES = torch.bfloat16, E4M3
KERNELS = [
    *map(room.weights_kernel_of, DTYPES),
    *(
        room.kernel_of(Activation(kind), is_fp8=dtype == E4M3, blocks=blocks)
        for kind in KINDS
        for blocks in ((False, True) if ALL_KERNELS or kind == "swiglu" else (False,))
        for dtype in SAVED_DTYPES
    ),
    room.sums_kernel_of(),
]
HALF = Activation(limit=0.5)


def op(made: ActivationColumnsInputs) -> ActivationColumnsGradients:
    return ActivationColumnsGradients(*activation_columns_backward(*made))


# ---- The op ----


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_is_right(name, fp8, activation):
    made = make(CASES[name], torch.bfloat16 if activation.limit else torch.float32, fp8, activation)
    check(made, op(made))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fp8", [False, True])
def test_blocks_are_right(name, fp8):
    made = make(CASES[name], torch.float32, fp8, HALF, blocks=True)
    found = op(made)
    check(made, found)
    assert_blocks_change_activated_alone(made, found, op(made._replace(blocks=False)))


def test_rows_of_scales_are_multiples_of_16_bytes_apart():
    for size, expected in ((1, 4), (512, 4), (513, 8)):
        made = make(Case([130], 2, size), torch.float32, False, SWIGLU, blocks=True)
        assert op(made).activated_scale_inv.stride() == (expected, 1)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_op_without_columns(name):
    made = make(CASES[name], torch.float32, False, HALF)
    grad, gate_up, _, _, token_to_row, weights, activation, _ = made
    token_to_row = token_to_row.masked_fill(token_to_row >= len(grad), -1).clamp(min=-1)
    rows = ActivationGradients(
        *activation_rows_backward(
            grad.nan_to_num(), gate_up.nan_to_num(), token_to_row, weights, activation
        )
    )
    found = op(made)
    for block in blocks_of(made):
        ours, theirs = (x.codes.view(torch.uint8)[block.rows] for x in (found, rows))
        assert torch.equal(ours, theirs)
        assert torch.equal(found.scale_inv[block.rows], rows.scale_inv[block.rows])
    assert torch.equal(found.grad_weights, rows.grad_weights)
    assert torch.equal(found.is_first, rows.is_first)


@on_cpu_and_gpu
@pytest.mark.parametrize(("counts", "size"), [([0, 0], 40), ([3, 2], 0)])
def test_nothing_gives_nothing(counts, size, device):
    made = make(Case(counts, 2, 40), torch.float32, False, SWIGLU, device)
    made = made._replace(grad=made.grad[:, :size], gate_up=made.gate_up[..., :size])
    for blocks, num_scales in ((False, size), (True, -(-size // 128))):
        found = op(made._replace(blocks=blocks))
        num_columns = sum(counts) // 128 + 2
        assert found.gate_up_columns.shape == (num_columns, 2 * size, 128)
        assert found.activated_scale_inv.shape == (num_columns, num_scales)
        assert not found.grad_weights.any()
        assert not found.is_first.any()


def test_the_op_keeps_the_rules_of_torch():
    overload = torch.ops.moefp8.activation_columns_backward.default
    checks = "test_autograd_registration", "test_faketensor"
    for fp8, blocks in ((False, False), (True, True)):
        made = make(Case([3], 2, 8), torch.float32, fp8, Activation(limit=1.0), blocks=blocks)
        flat = *made[:6], *made.activation, made.blocks
        torch.library.opcheck(overload, flat, test_utils=checks)


def test_bad_input_is_named():
    made = make(Case([3, 70], 2, 40), torch.float32, True, Activation(limit=1.0))
    for change, error, message in (
        ({"grad": made.grad.float()}, TypeError, "grad must be bfloat16"),
        ({"gate_up": made.gate_up[1:]}, ValueError, r"gate_up must be \[2 R, I\]"),
        ({"gate_up_scale_inv": made.gate_up_scale_inv[1:]}, ValueError, "gate_up_scale_inv must"),
        ({"gate_up_scale_inv": None}, TypeError, "gate_up must be bfloat16"),
        ({"expert_offsets": made.expert_offsets[:1]}, ValueError, r"expert_offsets must be \[E"),
        ({"expert_offsets": made.expert_offsets.long()}, TypeError, "expert_offsets must be int32"),
        ({"token_to_row": made.token_to_row[0]}, ValueError, "token_to_row must have 2"),
        ({"top_k_weights": made.top_k_weights[1:]}, ValueError, "top_k_weights must be"),
    ):
        with pytest.raises(error, match=f"activation_columns_backward: .*{message}"):
            op(made._replace(**change))


# ---- The kernels' text ----


@pytest.mark.usefixtures("own_cache")
def test_every_variant_compiles_and_spills_nothing():
    assert len(KERNELS) == (20 if ALL_KERNELS else 14)
    for cubin in compile_kernels(KERNELS, ARCH):
        assert cubin.problems() == []
        registers = int(re.findall(r"Used (\d+) registers", cubin.log)[-1])
        assert registers <= 128  # two CTAs of an SM


@pytest.mark.usefixtures("own_cache")
def test_shared_memory_is_as_large_as_the_kernel_takes_it(tmp_path):
    kernel = room.sums_kernel_of()
    shutil.copytree(kernel.source.parent, tmp_path, dirs_exist_ok=True)
    text = kernel.source.read_text()
    for is_fp8 in (False, True):
        size = room.shared_bytes_of(is_fp8=is_fp8)
        text += f"\nstatic_assert(sizeof(Memory<{str(is_fp8).lower()}>) == {size});"
    (tmp_path / "sizes.cu").write_text(text)
    jit.compile_kernel(jit.Kernel(tmp_path / "sizes.cu", kernel.name), ARCH)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("activation_columns")
    return cuda_on_cpu.build(KERNELS, folder, with_numerics=True)


@pytest.fixture
def launched(on_cpu):
    with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(on_cpu))) as driver:
        yield driver


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fp8", [False, True])
def test_the_kernels_text_is_right(launched, name, fp8):
    for activation, dtype in zip(ACTIVATIONS, cycle(DTYPES), strict=False):
        made = make(CASES[name], dtype, fp8, activation)
        found = run(made)
        check(made, found)
        assert_untouched(made, found)
        if name in ("blocks begin and end anywhere", "more experts than threads"):
            break  # these take long


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fp8", [False, True])
def test_the_kernels_text_is_right_with_blocks(launched, name, fp8):
    made = make(CASES[name], torch.float32, fp8, HALF if fp8 else SWIGLU, blocks=True)
    found = run(made)
    check(made, found)
    assert_untouched(made, found)
    assert_blocks_change_activated_alone(made, found, run(made._replace(blocks=False)))


@pytest.mark.parametrize("name", ["odd", "rows that choices share"])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_op_launches_the_kernels(launched, name, fp8):
    """What lies otherwise is copied before."""
    made = make(CASES[name], torch.float32, fp8, HALF)
    expected = op(made)
    names = [x.kernel.name.removeprefix("activation_columns_") for x in launched.launched]
    assert [name.split("<")[0] for name in names] == ["weights_kernel", "kernel", "sums_kernel"]
    check(made, expected)
    other = made._replace(
        grad=made.grad.T.contiguous().T,
        gate_up=made.gate_up.flip(0).contiguous().flip(0),
        token_to_row=made.token_to_row.T.contiguous().T,
    )
    assert_same(made, op(other), expected)
    made = made._replace(blocks=True)
    found = op(made)
    assert launched.launched[-2].kernel == room.kernel_of(SWIGLU, is_fp8=fp8, blocks=True)
    check(made, found)
    assert_blocks_change_activated_alone(made, found, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_the_emulator_is_right(name, fp8, blocks):
    made = make(CASES[name], torch.float16, fp8, HALF, blocks=blocks)
    with emulated():
        found = run(made)
    check(made, found)
    assert_untouched(made, found)


def test_the_kernels_rows_are_those_of_the_kernel_without_columns(launched, tmp_path):
    made = make(CASES["rows that choices share"], torch.float32, False, HALF)
    found = run(made)
    kernel = activation_backward_kernel_of(SWIGLU, torch.float32, is_fp8=False)
    other = cuda_on_cpu.build([kernel], tmp_path)
    with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(other))):
        assert_rows_are_those_without_columns(made, found)


def assert_rows_are_those_without_columns(
    made: ActivationColumnsInputs, found: ActivationColumnsGradients
) -> None:
    """Choices have no rows but those of experts, and each of these has one."""
    grad, gate_up, _, _, token_to_row, weights, activation, _ = made
    rows = ActivationGradients(
        *activation_rows_backward(grad, gate_up, token_to_row, weights, activation)
    )
    has_choice = torch.isin(torch.arange(len(grad)), token_to_row.cpu())
    ours, theirs = (x.codes.view(torch.uint8).cpu()[has_choice] for x in (found, rows))
    assert torch.equal(ours, theirs)
    ours, theirs = (x.scale_inv.cpu()[has_choice] for x in (found, rows))
    assert torch.equal(ours, theirs)


BAD_OFFSETS = [0, 2**31 - 1, 5], [7, 3, 200], [-(2**31), -1, 300], [130, 130, 0], [2**31 - 1] * 3


@pytest.mark.parametrize("offsets", BAD_OFFSETS)
def test_whatever_the_offsets_are_nothing_outside_is_written(launched, offsets):
    made = make(Case([70, 80], 2, 40), torch.float32, False, SWIGLU)
    run(made._replace(expert_offsets=torch.tensor(offsets, dtype=torch.int32)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["grad", "gate", "up", "weight"])
@pytest.mark.parametrize("blocks", [False, True])
def test_the_kernels_text_keeps_bad_numbers_in_their_blocks(launched, bad, where, blocks):
    assert_bad_numbers_stay(bad, where, blocks, "cpu", run)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["grad", "gate", "up", "weight"])
@pytest.mark.parametrize("blocks", [False, True])
def test_the_op_keeps_bad_numbers_in_their_blocks(bad, where, blocks):
    assert_bad_numbers_stay(bad, where, blocks, "cpu", op)


def assert_bad_numbers_stay(
    bad: float, where: str, has_blocks: bool, device: str, gradients
) -> None:
    """A bad number of a row of the second expert's second block."""
    case = Case([20, 140, 3], 2, 136)
    made = make(case, torch.float32, False, SWIGLU, device, blocks=has_blocks)
    clean, row, column = cpu(gradients(made)), 20 + 130, 129
    if where == "weight":
        made.top_k_weights[made.token_to_row == row] = bad
    else:
        place = made.grad[row] if where == "grad" else made.gate_up[row, int(where == "up")]
        place[column] = bad
    found = cpu(gradients(made))
    others = torch.arange(len(made.grad)) != row
    assert torch.equal(found.codes[others], clean.codes[others])
    assert torch.equal(found.scale_inv[others], clean.scale_inv[others])
    assert not found.scale_inv[row].isfinite().all()
    has_bad = torch.zeros(len(found.gate_up_columns), dtype=torch.bool)
    for block in blocks_of(made):
        is_hit = block.rows.start <= row < block.rows.stop
        has_bad[block.index] = is_hit
        end = -(-block.count // 32) * 32
        for i in (2, 4):
            ours, theirs = (x[i][block.index, :, :end] for x in (found, clean))
            scales, clean_scales = (x[i + 1][block.index] for x in (found, clean))
            same = torch.ones(len(ours), dtype=torch.bool)
            if is_hit:
                same = torch.full_like(same, False) if where == "weight" else same
                same[column::136] = False
            same_scales = same
            if i == 4 and has_blocks:
                same[128:] = bool(same[column])
                same_scales = same[::128]
            assert torch.equal(ours[same], theirs[same])
            assert torch.equal(scales[same_scales], clean_scales[same_scales])
            assert i == 2 or where == "grad" or not scales[~same_scales].isfinite().any()
            assert not ours[:, block.count :].any()
    assert has_bad.sum() == 1
    assert not found.gate_up_scale_inv[has_bad].isfinite().all()
    is_row = made.token_to_row.cpu() == row
    assert torch.equal(found.grad_weights[~is_row], clean.grad_weights[~is_row])
    assert where == "weight" or not found.grad_weights[is_row].isfinite().any()


# ---- On a GPU ----


@on_gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("blocks", [False, True])
def test_gpu_is_right(name, fp8, activation, blocks):
    for dtype in DTYPES:
        made = make(CASES[name], dtype, fp8, activation, "cuda", blocks=blocks)
        found = run(made)
        check(made, found)
        assert_untouched(made, found)
        if blocks:
            without = run(made._replace(blocks=False))
            assert_blocks_change_activated_alone(made, found, without)
        sizes = [x.untyped_storage().nbytes() for x in op(made)]
        poison("cuda", *sizes)
        assert_same(made, op(made), found)


@on_gpu
@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gpu_rows_are_those_of_the_kernel_without_columns(kind, activation):
    case = Case([300, 0, 1000, 77, 128], 6, 1032, kind)
    made = make(case, torch.bfloat16, False, activation, "cuda")
    token_to_row = made.token_to_row
    made = made._replace(
        token_to_row=token_to_row.masked_fill(token_to_row >= len(made.grad), -1).clamp(min=-1)
    )
    found = op(made)
    assert_rows_are_those_without_columns(made, found)
    check(made, found)
    assert_same(made, op(made), found)


@on_gpu
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["grad", "gate", "up", "weight"])
@pytest.mark.parametrize("blocks", [False, True])
def test_gpu_keeps_bad_numbers_in_their_blocks(bad, where, blocks):
    assert_bad_numbers_stay(bad, where, blocks, "cuda", op)
