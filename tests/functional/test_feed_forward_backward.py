"""The gradient of shared experts: its launches without a GPU, its checks, its fake bodies."""

from contextlib import nullcontext

import pytest
import torch

from moefp8.functional.feed_forward import feed_forward, feed_forward_saving
from moefp8.functional.feed_forward_backward import feed_forward_backward
from moefp8.kernels.common.activation import SWIGLU, Activation
from moefp8.kernels.registry import as_in_schema
from moefp8.layers.moe import SharedExperts
from moefp8.testing import assert_matches_reference
from tests.fakes.emulator import emulated
from tests.functional.cases import run_body, tokens_of
from tests.functional.experts.backward_cases import contiguous_when_saved
from tests.functional.test_feed_forward import SIZES, operands
from tests.layers.cases import assert_matches_up_to_codes

KERNELS = ["transpose", "transpose", "transpose", "quantize", "gemm", "activation", "gemm"]
MORE_SIZES = [(140, 128, 256), (300, 128, 128), (5, 100, 36), (4, 129, 257), (3, 3, 5)]


def names_of(launched) -> list[str]:
    return [made.kernel.name.split("_")[0] for made in launched]


def gradient_of(t: int, h: int) -> torch.Tensor:
    """Its amax is small: that of activations would be 1e-4 at least."""
    return tokens_of(t, h) * 2.0**-24


def launched(made, grad: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """What is saved, and the gradient, checked against the bodies."""
    y, gate_up = feed_forward_saving(*made, activation)
    assert torch.equal(y, feed_forward(*made, activation))
    assert_matches_reference(gate_up, run_body(feed_forward_saving, *made, activation)[1])
    arguments = grad, gate_up, *made[1:], activation, None
    dx = feed_forward_backward(*arguments)
    assert_matches_up_to_codes(dx, run_body(feed_forward_backward, *arguments))
    return gate_up, dx


@pytest.mark.parametrize("activation", [SWIGLU, Activation("geglu", 0.3)])
@pytest.mark.parametrize(("t", "h", "i"), [*SIZES, *MORE_SIZES])
def test_launches_compute_what_the_body_does(t, h, i, activation):
    made, grad = operands(t, h, i), gradient_of(t, h)
    with emulated() as gpu:
        for _ in range(3):
            gpu.launched.clear()
            _, dx = launched(made, grad, activation)
            assert dx.any()
            assert names_of(gpu.launched) == ["quantize", "gemm", "gemm"] * 2 + KERNELS
    saving, *_ = gpu.gemms
    assert saving.config.saves_gate_up
    assert [x.programmatic for x in gpu.launched[-4:]] == [False, True, True, True]
    activation = gpu.launched[-2].arguments
    assert (activation.token_to_row, activation.num_choices, activation.size) == (None, t, i)


def test_other_layers_of_one_layout_prepare_nothing():
    first, *others = (operands(5, 256, 264) for _ in range(3))
    with emulated() as gpu:
        launched(first, gradient_of(5, 256), SWIGLU)
        prepared = len(gpu.prepared())
        for made in others:
            launched(made, gradient_of(5, 256), SWIGLU)
        assert len(gpu.prepared()) == prepared
        launched(first, gradient_of(5, 256), Activation(limit=0.3))
        assert len(gpu.prepared()) > prepared


def test_a_gradient_may_lie_anywhere():
    made, grad = operands(6, 256, 264), gradient_of(6, 256)
    with emulated():
        gate_up, expected = launched(made, grad, SWIGLU)
        wide = torch.empty(12, 259).bfloat16()[::2, 3:]
        for place in (grad.T.contiguous().T, wide.copy_(grad)):
            dx = feed_forward_backward(place, gate_up, *made[1:], SWIGLU, None)
            assert torch.equal(dx, expected)
        for expanded in (grad[:1].expand(6, -1), grad[:1, :1].expand(6, 256)):
            arguments = gate_up, *made[1:], SWIGLU, None
            expected = feed_forward_backward(expanded.contiguous(), *arguments)
            assert torch.equal(feed_forward_backward(expanded, *arguments), expected)


@pytest.mark.parametrize("at", [2, 4, 6])
def test_one_number_may_be_the_scale_of_all_blocks(at):
    made = operands(5, 256, 264)
    made[at] = torch.full((1, 1), 0.01).expand(made[at].shape)
    with emulated():
        launched(made, gradient_of(5, 256), SWIGLU)


@pytest.mark.parametrize(("t", "h", "i"), [(0, 128, 128), (3, 128, 0), (3, 0, 128)])
def test_nothing_to_do(t, h, i):
    made = operands(max(t, 1), max(h, 1), max(i, 1))
    made = [made[0][:t, :h], made[1][:i, :h], made[2], made[3][:i, :h], made[4], made[5][:h, :i]]
    scales = [torch.ones(-(-x.shape[0] // 128), -(-x.shape[1] // 128)) for x in made[1::2]]
    x, gate, _, up, _, down = made
    weights = gate, scales[0], up, scales[1], down, scales[2]
    with emulated() as gpu:
        _, gate_up = feed_forward_saving(x, *weights, SWIGLU)
        dx = feed_forward_backward(torch.ones(t, h), gate_up, *weights, SWIGLU, None)
        assert torch.equal(dx, torch.zeros(t, h).bfloat16())
        assert gpu.gemms == []


def test_a_layer_differentiates(gpu):
    layer, x = SharedExperts(256, 264), torch.randn(2, 3, 256, requires_grad=True)
    y = layer(x)
    gpu.launched.clear()
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert names_of(gpu.launched) == KERNELS
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
    assert bool(dx.any())


def test_what_is_saved_may_have_been_offloaded(gpu):
    """Hooks that do so may drop the gaps between rows."""
    layer, x, found = SharedExperts(144, 260), tokens_of(5, 144).requires_grad_(), []
    for hook in (nullcontext(), contiguous_when_saved()):
        with hook:
            y = layer(x)
        found += torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (0, lambda x: x.double(), "grad must be"),
        (0, lambda x: x[:, 1:], r"grad must be \[T, H\]"),
        (1, lambda x: x.float(), "gate_up must be"),
        (1, lambda x: x[1:], r"gate_up must be \[T, 2, I\]"),
        (0, lambda x: x.to("meta"), "grad on meta"),
    ],
)
def test_bad_input_is_named(at, wrong, message):
    made = operands(4, 256, 128)
    arguments = [gradient_of(4, 256), torch.zeros(4, 2, 128).bfloat16(), *made[1:], SWIGLU, None]
    arguments[at] = wrong(arguments[at])
    with pytest.raises((TypeError, ValueError), match=f"feed_forward_backward: .*{message}"):
        feed_forward_backward(*arguments)


def test_ops_are_well_formed():
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    made, ops = operands(4, 256, 100), torch.ops.moefp8
    torch.library.opcheck(ops.feed_forward_saving.default, (*made, *SWIGLU), test_utils=checks)
    _, gate_up = feed_forward_saving(*made, SWIGLU)
    arguments = gradient_of(4, 256), gate_up, *made[1:], SWIGLU, None
    torch.library.opcheck(
        ops.feed_forward_backward.default, as_in_schema(arguments), test_utils=checks
    )
