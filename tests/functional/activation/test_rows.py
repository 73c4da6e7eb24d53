"""SwiGLU of rows in memory and its gradient: the ops, the kernel's own text, and on a GPU."""

import math
import re

import pytest
import torch

from moefp8.functional.activation import empty_gate_up
from moefp8.functional.activation_rows import (
    ActivationGradients,
    activation_rows,
    activation_rows_backward,
    activation_rows_kernels,
)
from moefp8.kernels.jit import compile_kernels
from moefp8.quant import BlockScaled, dequantize
from moefp8.routing import RoutingPlan, build_plan
from tests import naive
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import emulated
from tests.functional.activation.cases import check_quantized, differentiated, sizes_of_terms
from tests.gpu import on_cpu_and_gpu, on_gpu, poison
from tests.records import TARGET
from tests.routing.cases import ids_of

SIZES = 1, 8, 100, 136, 384, 2176
LIMITS = None, 0.5
KERNELS = list(activation_rows_kernels(TARGET, 128))


def gate_up_of(num_rows: int, size: int, device: str = "cpu") -> torch.Tensor:
    """bf16 [R, 2, I] with NaN behind each row."""
    memory = empty_gate_up(torch.empty(0, device=device), num_rows, size)
    pitch = memory.stride(1) if size else 0
    torch.as_strided(memory, (2 * num_rows, pitch), (pitch, 1)).fill_(torch.nan)
    return memory.copy_(3 * torch.randn(num_rows, 2, size))


def assert_activates(gate_up: torch.Tensor, limit: float | None) -> None:
    found = activation_rows(gate_up, limit).cpu()
    gate, up = gate_up.cpu().double().unbind(1)
    expected = naive.activate(gate, up, math.inf if limit is None else limit)
    assert ((found - expected).abs() <= expected.abs() * 2.0**-8).all()


# ---- The kernel's text ----


@pytest.mark.usefixtures("own_cache")
def test_it_compiles_and_spills_nothing():
    (cubin,) = compile_kernels(KERNELS)
    assert cubin.problems() == []
    assert int(re.findall(r"Used (\d+) registers", cubin.log)[-1]) <= 32  # all threads of an SM


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    return cuda_on_cpu.OnCpu(cuda_on_cpu.build(KERNELS, tmp_path_factory.mktemp("s")))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("limit", LIMITS)
def test_the_kernels_text_is_right(library, size, limit):
    gate_up = gate_up_of(5, size)
    with emulated(library=library):
        assert_activates(gate_up, limit)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("half", [0, 1])
def test_the_kernels_text_lets_bad_numbers_through(library, bad, half):
    gate_up = gate_up_of(3, 40)
    gate_up[1, half, 7] = bad
    with emulated(library=library):
        found = activation_rows(gate_up, None if math.isinf(bad) else 0.5)
    expected = activation_rows(gate_up, None if math.isinf(bad) else 0.5)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.isnan(), expected.isnan())


# ---- The ops ----


@on_cpu_and_gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_activated_is_right(size, limit, device):
    gate_up = gate_up_of(7, size, device)
    poison(device, 14 * size)
    assert_activates(gate_up, limit)
    assert_activates(gate_up.contiguous(), limit)  # may be unaligned
    assert_activates(gate_up.flip(1), limit)


@pytest.mark.parametrize("size", SIZES)
def test_the_launch_is_right(size):
    with emulated():
        assert_activates(gate_up_of(7, size), 0.5)


def plan_of(kind: str, device: str) -> RoutingPlan:
    ids = ids_of(kind, 9, 3, 4)
    return build_plan(torch.where((ids < 0) | (ids > 4), 4, ids).to(device), 4)


def assert_has_gradient(
    plan: RoutingPlan, size: int, limit: float | None, dtype: torch.dtype, device: str
) -> None:
    """Against FP64; rows of choices count, and no others."""
    num_rows = len(plan.row_to_token)
    gate_up, weights = gate_up_of(num_rows, size, device), torch.rand(9, 3).to(device, dtype)
    grad = torch.randn(num_rows, size, device=device).mul(2.0**-20).bfloat16()
    has_row = (plan.row_to_token >= 0).cpu()
    grad[~has_row.to(device)] = torch.nan
    poison(device, 4 * num_rows * size)
    found = ActivationGradients(
        *activation_rows_backward(grad, gate_up, plan.token_to_row, weights, limit)
    )
    row, w = plan.token_to_row.cpu().long(), weights.cpu().double()
    of_rows = torch.stack([w[row == i].sum() for i in range(num_rows)])[:, None]
    (gate, up), dy = gate_up.cpu().double().unbind(1), grad.cpu().double()
    bound = math.inf if limit is None else limit
    exact = differentiated(gate, up, bound)
    blocks = found.scale_inv.cpu().chunk(2, 1)
    codes = found.codes.cpu().chunk(2, 1)
    for i, terms in enumerate(sizes_of_terms(gate, up)):
        right, sizes = ((of_rows * dy * x)[has_row] for x in (exact[i], terms))
        got = found.grad_gate_up[:, i].cpu()[has_row]
        assert ((got - right).abs() <= right.abs() * 2.0**-8 + 1e-5 * sizes.abs()).all()
        assert not codes[i].view(torch.uint8)[has_row][:, size:].any()
        check_quantized(
            codes[i].view(torch.uint8)[has_row][:, :size], blocks[i][has_row], right, sizes.abs()
        )
    products = (dy * naive.activate(gate, up, bound))[row.clamp(min=0)]
    near = (found.grad_weights.cpu() - products.sum(-1)).abs() <= 1e-5 * products.abs().sum(-1)
    assert near[row >= 0].all()
    assert not found.grad_weights.cpu()[row < 0].any()
    assert torch.allclose(found.weight_of_row.cpu()[has_row].double(), of_rows[has_row, 0], atol=0)
    for own, told in zip(row.tolist(), found.is_first.tolist(), strict=True):
        assert told == [float(r >= 0 and own.index(r) == j) for j, r in enumerate(own)]


@on_cpu_and_gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["distinct", "repeated", "out of range", "nowhere"])
@pytest.mark.parametrize("limit", LIMITS)
def test_the_gradient_is_right(kind, size, limit, device):
    dtype = torch.bfloat16 if limit else torch.float32
    assert_has_gradient(plan_of(kind, device), size, limit, dtype, device)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["distinct", "repeated", "out of range"])
def test_the_launch_of_the_gradient_is_right(kind, size):
    plan = plan_of(kind, "cpu")
    with emulated():
        assert_has_gradient(plan, size, 0.5, torch.float32, "cpu")


@on_cpu_and_gpu
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 40), (3, 0)])
def test_nothing_gives_nothing(num_tokens, size, device):
    plan = build_plan(torch.zeros(num_tokens, 2, dtype=torch.int64, device=device), 4)
    gate_up = gate_up_of(2 * num_tokens, size, device)
    assert activation_rows(gate_up, None).shape == (2 * num_tokens, size)
    weights = torch.ones(num_tokens, 2, device=device)
    given = gate_up[:, 0], gate_up, plan.token_to_row, weights, None
    found = ActivationGradients(*activation_rows_backward(*given))
    assert not found.grad_weights.any()


@on_gpu
@pytest.mark.parametrize("size", [100, 136])
def test_a_token_has_the_same_bits_whatever_the_others_are(size):
    gate_up = gate_up_of(300, size, "cuda")
    assert torch.equal(activation_rows(gate_up, 2.0)[7:9], activation_rows(gate_up[7:9], 2.0))


def test_checks_and_fakes():
    gate_up, plan = gate_up_of(6, 40), build_plan(torch.zeros(3, 2, dtype=torch.int64), 4)
    given = gate_up[:, 0].contiguous(), gate_up, plan.token_to_row, torch.ones(3, 2), 1.0
    for op, inputs in (
        (torch.ops.moefp8.activation_rows.default, (gate_up, None)),
        (torch.ops.moefp8.activation_rows_backward.default, given),
    ):
        torch.library.opcheck(op, inputs)
    with pytest.raises(ValueError, match="activation_rows: gate_up must be"):
        activation_rows(gate_up[:, :1], None)
    with pytest.raises(TypeError, match="activation_rows: gate_up must be bfloat16"):
        activation_rows(gate_up.float(), None)
    with pytest.raises(ValueError, match="top_k_weights must be"):
        activation_rows_backward(*given[:3], torch.ones(3, 3), None)


def test_what_is_quantized_is_what_is_told_in_bf16():
    gate_up, plan = gate_up_of(8, 136), build_plan(torch.tensor([[0, 1]] * 4), 4)
    grad = torch.randn(8, 136).bfloat16()
    found = ActivationGradients(
        *activation_rows_backward(grad, gate_up, plan.token_to_row, torch.rand(4, 2), None)
    )
    exact = torch.nn.functional.pad(found.grad_gate_up.float(), (0, 120)).flatten(1)
    told = dequantize(BlockScaled(found.codes, found.scale_inv)).float()
    assert (told - exact).norm() < 0.05 * exact.norm()
