"""Activations of rows in memory and its gradient: the ops, the kernel's own text, and on a GPU."""

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
from moefp8.kernels.common.activation import KINDS, SWIGLU, Activation
from moefp8.kernels.jit import compile_kernels
from moefp8.quant import BlockScaled, dequantize
from moefp8.routing import RoutingPlan, build_plan
from tests import naive
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import emulated
from tests.functional.activation.cases import (
    ACTIVATIONS,
    check_quantized,
    differentiated,
    sizes_of_terms,
    slack_of,
)
from tests.gpu import ARCH, on_cpu_and_gpu, on_gpu, poison
from tests.records import TARGET
from tests.routing.cases import ids_of

SIZES = 1, 8, 100, 136, 384, 2176
KERNELS = [x for kind in KINDS for x in activation_rows_kernels(TARGET, 128, Activation(kind))]
HALF = Activation(limit=0.5)


def gate_up_of(num_rows: int, size: int, device: str = "cpu") -> torch.Tensor:
    """bf16 [R, 2, I] with NaN behind each row."""
    memory = empty_gate_up(torch.empty(0, device=device), num_rows, size)
    pitch = memory.stride(1) if size else 0
    torch.as_strided(memory, (2 * num_rows, pitch), (pitch, 1)).fill_(torch.nan)
    return memory.copy_(3 * torch.randn(num_rows, 2, size))


def assert_activates(gate_up: torch.Tensor, activation: Activation) -> None:
    found = activation_rows(gate_up, activation).cpu()
    gate, up = gate_up.cpu().double().unbind(1)
    expected = naive.activate(gate, up, activation)
    slack = slack_of(gate, up, activation)
    assert ((found - expected).abs() <= expected.abs() * 2.0**-8 + slack).all()


# ---- The kernel's text ----


@pytest.mark.usefixtures("own_cache")
def test_they_compile_and_spill_nothing():
    for cubin in compile_kernels(KERNELS, ARCH):
        assert cubin.problems() == []
        assert int(re.findall(r"Used (\d+) registers", cubin.log)[-1]) <= 40


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    return cuda_on_cpu.OnCpu(cuda_on_cpu.build(KERNELS, tmp_path_factory.mktemp("s")))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_text_is_right(library, size, activation):
    gate_up = gate_up_of(5, size)
    with emulated(library=library):
        assert_activates(gate_up, activation)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_text_lets_bad_numbers_through(library, bad, half, kind):
    activation = Activation(kind, None if math.isinf(bad) else 0.5)
    gate_up = gate_up_of(3, 40)
    gate_up[1, half, 7] = bad
    with emulated(library=library):
        found = activation_rows(gate_up, activation)
    expected = activation_rows(gate_up, activation)
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.isnan(), expected.isnan())


# ---- The ops ----


@on_cpu_and_gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_activated_is_right(size, activation, device):
    gate_up = gate_up_of(7, size, device)
    poison(device, 14 * size)
    assert_activates(gate_up, activation)
    assert_activates(gate_up.contiguous(), activation)  # may be unaligned
    assert_activates(gate_up.flip(1), activation)


@pytest.mark.parametrize("size", SIZES)
def test_the_launch_is_right(size):
    with emulated():
        assert_activates(gate_up_of(7, size), HALF)


def plan_of(kind: str, device: str) -> RoutingPlan:
    ids = ids_of(kind, 9, 3, 4)
    return build_plan(torch.where((ids < 0) | (ids > 4), 4, ids).to(device), 4)


def assert_has_gradient(
    plan: RoutingPlan, size: int, activation: Activation, dtype: torch.dtype, device: str
) -> None:
    """Against FP64; rows of choices count, and no others."""
    num_rows = len(plan.row_to_token)
    gate_up, weights = gate_up_of(num_rows, size, device), torch.rand(9, 3).to(device, dtype)
    grad = torch.randn(num_rows, size, device=device).mul(2.0**-20).bfloat16()
    has_row = (plan.row_to_token >= 0).cpu()
    grad[~has_row.to(device)] = torch.nan
    poison(device, 4 * num_rows * size)
    found = ActivationGradients(
        *activation_rows_backward(grad, gate_up, plan.token_to_row, weights, activation)
    )
    row, w = plan.token_to_row.cpu().long(), weights.cpu().double()
    of_rows = torch.stack([w[row == i].sum() for i in range(num_rows)])[:, None]
    (gate, up), dy = gate_up.cpu().double().unbind(1), grad.cpu().double()
    exact = differentiated(gate, up, activation)
    blocks = found.scale_inv.cpu().chunk(2, 1)
    codes = found.codes.cpu().chunk(2, 1)
    for i, terms in enumerate(sizes_of_terms(gate, up, activation)):
        right, sizes = ((of_rows * dy * x)[has_row] for x in (exact[i], terms))
        got = found.grad_gate_up[:, i].cpu()[has_row]
        assert ((got - right).abs() <= right.abs() * 2.0**-8 + 1e-5 * sizes.abs()).all()
        assert not codes[i].view(torch.uint8)[has_row][:, size:].any()
        check_quantized(
            codes[i].view(torch.uint8)[has_row][:, :size], blocks[i][has_row], right, sizes.abs()
        )
    products = (dy * naive.activate(gate, up, activation))[row.clamp(min=0)]
    slack = (dy * slack_of(gate, up, activation))[row.clamp(min=0)].abs()
    inexact = (1e-5 * products.abs() + slack).sum(-1)
    near = (found.grad_weights.cpu() - products.sum(-1)).abs() <= inexact
    assert near[row >= 0].all()
    assert not found.grad_weights.cpu()[row < 0].any()
    assert torch.allclose(found.weight_of_row.cpu()[has_row].double(), of_rows[has_row, 0], atol=0)
    for own, told in zip(row.tolist(), found.is_first.tolist(), strict=True):
        assert told == [float(r >= 0 and own.index(r) == j) for j, r in enumerate(own)]


@on_cpu_and_gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["distinct", "repeated", "out of range", "nowhere"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_is_right(kind, size, activation, device):
    dtype = torch.bfloat16 if activation.limit else torch.float32
    assert_has_gradient(plan_of(kind, device), size, activation, dtype, device)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["distinct", "repeated", "out of range"])
def test_the_launch_of_the_gradient_is_right(kind, size):
    plan = plan_of(kind, "cpu")
    with emulated():
        assert_has_gradient(plan, size, HALF, torch.float32, "cpu")


@on_cpu_and_gpu
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 40), (3, 0)])
def test_nothing_gives_nothing(num_tokens, size, device):
    plan = build_plan(torch.zeros(num_tokens, 2, dtype=torch.int64, device=device), 4)
    gate_up = gate_up_of(2 * num_tokens, size, device)
    assert activation_rows(gate_up, SWIGLU).shape == (2 * num_tokens, size)
    weights = torch.ones(num_tokens, 2, device=device)
    given = gate_up[:, 0], gate_up, plan.token_to_row, weights, SWIGLU
    found = ActivationGradients(*activation_rows_backward(*given))
    assert not found.grad_weights.any()


@on_gpu
@pytest.mark.parametrize("size", [100, 136])
def test_a_token_has_the_same_bits_whatever_the_others_are(size):
    gate_up = gate_up_of(300, size, "cuda")
    for kind in KINDS:
        whole = activation_rows(gate_up, Activation(kind, 2.0))
        assert torch.equal(whole[7:9], activation_rows(gate_up[7:9], Activation(kind, 2.0)))


def test_checks_and_fakes():
    gate_up, plan = gate_up_of(6, 40), build_plan(torch.zeros(3, 2, dtype=torch.int64), 4)
    tensors = gate_up[:, 0].contiguous(), gate_up, plan.token_to_row, torch.ones(3, 2)
    for op, inputs in (
        (torch.ops.moefp8.activation_rows.default, (gate_up, *SWIGLU)),
        (torch.ops.moefp8.activation_rows_backward.default, (*tensors, *Activation(limit=1.0))),
    ):
        torch.library.opcheck(op, inputs)
    with pytest.raises(ValueError, match="activation_rows: gate_up must be"):
        activation_rows(gate_up[:, :1], SWIGLU)
    with pytest.raises(TypeError, match="activation_rows: gate_up must be bfloat16"):
        activation_rows(gate_up.float(), SWIGLU)
    with pytest.raises(ValueError, match="top_k_weights must be"):
        activation_rows_backward(*tensors[:3], torch.ones(3, 3), SWIGLU)


def test_what_is_quantized_is_what_is_told_in_bf16():
    gate_up, plan = gate_up_of(8, 136), build_plan(torch.tensor([[0, 1]] * 4), 4)
    grad = torch.randn(8, 136).bfloat16()
    found = ActivationGradients(
        *activation_rows_backward(grad, gate_up, plan.token_to_row, torch.rand(4, 2), SWIGLU)
    )
    exact = torch.nn.functional.pad(found.grad_gate_up.float(), (0, 120)).flatten(1)
    told = dequantize(BlockScaled(found.codes, found.scale_inv)).float()
    assert (told - exact).norm() < 0.05 * exact.norm()
