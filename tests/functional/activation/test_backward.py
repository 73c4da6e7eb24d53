"""The kernel of the gradient of activations: its own text on a CPU, its launch, and on a GPU."""

import math
import re

import pytest
import torch

from moefp8.functional.activation import activation_backward_kernel_of
from moefp8.kernels import jit
from moefp8.kernels.common.activation import KINDS, SWIGLU, Activation
from moefp8.kernels.common.blocks import E4M3
from moefp8.kernels.jit import compile_kernels
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver, emulated
from tests.functional.activation.cases import ACTIVATIONS, CASES, Made, check, make, run
from tests.gpu import ARCH, on_gpu
from tests.sampling import ALL_KERNELS

DTYPES = torch.bfloat16, torch.float16, torch.float32
KERNELS = [
    activation_backward_kernel_of(Activation(kind), dtype, is_fp8=fp8)
    for kind in KINDS
    for dtype in (DTYPES if ALL_KERNELS or kind == "swiglu" else DTYPES[:1])
    for fp8 in (False, True)
]
INF = math.inf
HALF = Activation(limit=0.5)


# ---- Its kernel's text ----


@pytest.mark.usefixtures("own_cache")
def test_every_variant_compiles_and_spills_nothing():
    for cubin in compile_kernels(KERNELS, ARCH):
        assert cubin.problems() == []
        registers = int(re.findall(r"Used (\d+) registers", cubin.log)[-1])
        assert registers <= 48  # ten CTAs of an SM


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    return cuda_on_cpu.build(KERNELS, tmp_path_factory.mktemp("activation_backward"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_text_is_right(functions, name, fp8, activation):
    for dtype in DTYPES if activation.kind == "swiglu" else DTYPES[:1]:
        made = make(name, dtype, fp8, activation)
        with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(functions))):
            check(made, run(made))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fp8", [False, True])
def test_the_emulator_is_right(name, fp8):
    for activation in ACTIVATIONS:
        made = make(name, torch.float32, fp8, activation)
        with emulated():
            check(made, run(made))


def test_checks_know_that_rounding_is_all_that_is_left_where_the_slope_of_silu_is_zero():
    """`a single element` near -1.28 is a block of its own, whose scale follows from rounding."""
    made = make("a single element", torch.float32, True, SWIGLU)
    made.saved.view(torch.uint8)[::2] = torch.tensor([448.0]).to(E4M3).view(torch.uint8)
    made.saved_scales[::2] = -1.2784645 / 448
    with emulated():
        found = run(made)
    check(made, found)
    of_gate, of_up = found.row_scales[:2, : len(made.grad)]
    of_gate *= 1.01
    check(made, found)
    of_up *= 1.01
    with pytest.raises(AssertionError):
        check(made, found)


def of_tokens(made: Made) -> Made:
    """Each row has a token, and no weight."""
    rows = made.token_to_row[made.token_to_row >= 0]
    assert len(rows) == len(made.grad)
    return made._replace(token_to_row=None, weights=None)


@pytest.mark.parametrize("name", ["one block", "a CTA goes round", "a single element"])
def test_the_kernels_text_takes_rows_without_choices(functions, name):
    made = of_tokens(make(name, torch.float32, False, HALF))
    for library in (cuda_on_cpu.OnCpu(functions), None):
        with jit.using(FakeDriver(library=library)):
            check(made, run(made))


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("where", ["grad", "gate", "up"])
def test_the_kernels_text_keeps_bad_numbers_in_their_blocks(functions, bad, where):
    with jit.using(FakeDriver(library=cuda_on_cpu.OnCpu(functions))):
        assert_bad_numbers_stay(bad, where, "cpu")


def assert_bad_numbers_stay(bad: float, where: str, device: str) -> None:
    """A bad number of row 1 is in block 2 of 17, of both gate and up."""
    made = make("a CTA goes round", torch.float32, False, SWIGLU, device)
    clean = run(made)
    place = made.grad[1] if where == "grad" else made.saved[1, int(where == "up")]
    place[300] = bad
    found = run(made)
    assert torch.equal(found.rows[0], clean.rows[0])
    assert torch.equal(found.row_scales[:, 0], clean.row_scales[:, 0])
    of_gate_up = torch.arange(34).remainder(17) != 2
    codes, clean_codes = (x.rows[1].view(34, 128).cpu() for x in (found, clean))
    scales, clean_scales = (x.row_scales[:, 1].cpu() for x in (found, clean))
    assert torch.equal(codes[of_gate_up], clean_codes[of_gate_up])
    assert torch.equal(scales[of_gate_up], clean_scales[of_gate_up])
    assert not scales[2].isfinite()
    each = found.of_weights[:2].cpu(), clean.of_weights[:2].cpu(), made.token_to_row.flatten().cpu()
    for ours, theirs, row in zip(*each, strict=True):
        assert ours.isfinite() == (row == 0)
        assert row == 1 or ours == theirs


# ---- On a GPU ----


@on_gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gpu_is_right(name, fp8, activation):
    for dtype in DTYPES:
        made = make(name, dtype, fp8, activation, "cuda")
        check(made, run(made))
    if CASES[name][-1] == "distinct" and not fp8:
        made = of_tokens(made)
        check(made, run(made))


@on_gpu
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("where", ["grad", "gate", "up"])
def test_gpu_keeps_bad_numbers_in_their_blocks(bad, where):
    assert_bad_numbers_stay(bad, where, "cuda")
