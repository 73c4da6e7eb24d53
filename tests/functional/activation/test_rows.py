"""Activations of rows in memory and their gradients: the ops, the kernels' own text, on a GPU."""

import math
import re

import pytest
import torch

from moefp8.functional.activation import empty_gate_up
from moefp8.functional.activation_rows import (
    ActivationGradients,
    activation_rows,
    activation_rows_backward,
    activation_rows_grad,
    activation_rows_grad_kernels,
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
KERNELS, GRAD_KERNELS = (
    [x for kind in KINDS for x in kernels_of(TARGET, 128, Activation(kind))]
    for kernels_of in (activation_rows_kernels, activation_rows_grad_kernels)
)
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


def assert_differentiates(gate_up: torch.Tensor, activation: Activation) -> None:
    """Against FP64."""
    num_rows, _, size = gate_up.shape
    grad = torch.randn(num_rows, size, device=gate_up.device).mul(2.0**-20).bfloat16()
    poison(gate_up.device.type, 4 * num_rows * size)
    found = activation_rows_grad(grad, gate_up, activation)
    assert found.stride() == empty_gate_up(grad, num_rows, size).stride()
    (gate, up), dy = gate_up.cpu().double().unbind(1), grad.cpu().double()
    terms = zip(
        differentiated(gate, up, activation), sizes_of_terms(gate, up, activation), strict=True
    )
    for got, (exact, sizes) in zip(found.cpu().unbind(1), terms, strict=True):
        assert_near(got, dy * exact, dy * sizes)


def assert_near(found: torch.Tensor, right: torch.Tensor, sizes: torch.Tensor) -> None:
    """One rounding to BF16 away; sizes: of the terms, as `sizes_of_terms` says."""
    assert ((found - right).abs() <= right.abs() * 2.0**-8 + 1e-5 * sizes.abs()).all()


# ---- The kernels' text ----


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("kernels", "most"), [(KERNELS, 40), (GRAD_KERNELS, 48)])
def test_they_compile_and_spill_nothing(kernels, most):
    for cubin in compile_kernels(kernels, ARCH):
        assert cubin.problems() == []
        assert int(re.findall(r"Used (\d+) registers", cubin.log)[-1]) <= most


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("s")
    functions = [cuda_on_cpu.build(kernels, folder) for kernels in (KERNELS, GRAD_KERNELS)]
    return cuda_on_cpu.OnCpu(functions[0] | functions[1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_text_is_right(library, size, activation):
    gate_up = gate_up_of(5, size)
    with emulated(library=library):
        assert_activates(gate_up, activation)
        assert_differentiates(gate_up, activation)


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


@on_cpu_and_gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_of_rows_is_right(size, activation, device):
    gate_up = gate_up_of(7, size, device)
    assert_differentiates(gate_up, activation)
    assert_differentiates(gate_up.contiguous(), activation)
    assert_differentiates(gate_up.flip(1), activation)


@pytest.mark.parametrize("size", SIZES)
def test_the_launches_are_right(size):
    with emulated() as gpu:
        for activation in (HALF, SWIGLU):
            assert_activates(gate_up_of(7, size), activation)
            gpu.launched.clear()
            assert_differentiates(gate_up_of(7, size), activation)
            assert [made.arguments.rows for made in gpu.launched] == [None]


@on_cpu_and_gpu
def test_the_gradient_of_rows_may_have_any_layout(device):
    gate_up, grad = gate_up_of(6, 40, device), torch.randn(6, 40).bfloat16().to(device)
    expected = activation_rows_grad(grad, gate_up, HALF)
    wide = torch.empty(12, 43, dtype=torch.bfloat16, device=device)[::2, 3:]
    for place in (grad.T.contiguous().T, wide.copy_(grad)):
        assert torch.equal(activation_rows_grad(place, gate_up, HALF), expected)


@on_cpu_and_gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_of_rows_is_that_of_one_choice_each(activation, device):
    gate_up, grad = gate_up_of(9, 136, device), torch.randn(9, 136).bfloat16().to(device)
    rows = torch.arange(9, dtype=torch.int32, device=device)[:, None]
    given = grad, gate_up, rows, torch.ones(9, 1, device=device), activation
    of_choices = ActivationGradients(*activation_rows_backward(*given)).grad_gate_up
    assert torch.equal(activation_rows_grad(grad, gate_up, activation), of_choices)


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
        assert_near(found.grad_gate_up[:, i].cpu()[has_row], right, sizes)
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
    assert activation_rows_grad(gate_up[:, 0], gate_up, SWIGLU).shape == gate_up.shape
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
        (torch.ops.moefp8.activation_rows_grad.default, (*tensors[:2], *HALF)),
        (torch.ops.moefp8.activation_rows_backward.default, (*tensors, *Activation(limit=1.0))),
    ):
        torch.library.opcheck(op, inputs)
    with pytest.raises(ValueError, match="activation_rows: gate_up must be"):
        activation_rows(gate_up[:, :1], SWIGLU)
    with pytest.raises(TypeError, match="activation_rows: gate_up must be bfloat16"):
        activation_rows(gate_up.float(), SWIGLU)
    with pytest.raises(ValueError, match="activation_rows_grad: gate_up must be"):
        activation_rows_grad(tensors[0][1:], gate_up, SWIGLU)
    with pytest.raises(TypeError, match="activation_rows_grad: grad must be bfloat16"):
        activation_rows_grad(tensors[0].float(), gate_up, SWIGLU)
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
