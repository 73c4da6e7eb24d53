"""The ops of gradients: their checks, their fake bodies, and `grouped_linear`."""

import pytest
import torch

from moefp8.functional.experts import experts, experts_saving
from moefp8.functional.experts_backward import experts_backward
from moefp8.functional.feed_forward import feed_forward, feed_forward_saving
from moefp8.functional.feed_forward_backward import feed_forward_backward
from moefp8.functional.grouped_linear import grouped_linear
from moefp8.functional.linear import fp8_linear_backward
from moefp8.kernels.common.activation import SWIGLU, Activation
from moefp8.kernels.registry import as_in_schema
from moefp8.quant import quantize_1x128, quantize_128x128
from moefp8.testing import assert_matches_reference
from tests import naive
from tests.functional.cases import inputs, tokens_of, weights_of
from tests.gpu import on_cpu_and_gpu

E, H, I, K, T = 3, 144, 200, 2, 6
LIMITED = Activation(limit=1.5)


def of_linear() -> list:
    return [tokens_of(T, I), *quantize_128x128(torch.randn(I, H)), None]


def feed_forward_weights() -> list:
    weights = torch.randn(I, H), torch.randn(I, H), torch.randn(H, I)
    return [x for weight in weights for x in quantize_128x128(weight)]


def of_feed_forward() -> list:
    weights = feed_forward_weights()
    _, gate_up = feed_forward_saving(tokens_of(T, H), *weights, LIMITED)
    return [tokens_of(T, H), gate_up, *weights, LIMITED, True]


def of_experts(saved_in_fp8: bool = False) -> list:
    (x, *choice), weights = inputs(T, H, K, E), weights_of(E, H, I)
    _, gate_up = experts_saving(x, *choice, *weights, LIMITED, False)
    saved = quantize_1x128(gate_up.flatten(0, 1)) if saved_in_fp8 else (gate_up, None)
    biases = torch.randn(E, H), torch.zeros(E, 2 * I), torch.zeros(E, H)
    return [tokens_of(T, H), *choice, *saved, *weights, *biases, LIMITED, False]


OPS = {
    "linear": (fp8_linear_backward, of_linear),
    "feed-forward": (feed_forward_backward, of_feed_forward),
    "feed-forward, saving": (
        feed_forward_saving,
        lambda: [tokens_of(T, H), *feed_forward_weights(), SWIGLU],
    ),
    "experts": (experts_backward, of_experts),
    "experts, fp8": (experts_backward, lambda: of_experts(True)),
    "experts, a rank": (experts_backward, lambda: [*of_experts(), 3, 20]),
    "experts, saving": (
        experts_saving,
        lambda: [*inputs(T, H, K, E), *weights_of(E, H, I), SWIGLU, False],
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_agree_with_their_fake_bodies(name):
    op, arguments = OPS[name]
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # "test_schema" knows no FP8
    torch.library.opcheck(op.overload, as_in_schema(tuple(arguments())), test_utils=checks)


def test_saving_changes_no_bit():
    (x, *choice), weights = inputs(T, H, K, E), weights_of(E, H, I)
    for activation in (SWIGLU, LIMITED):
        arguments = x, *choice, *weights, activation, True
        assert torch.equal(experts_saving(*arguments)[0], experts(*arguments))
        arguments = x, *feed_forward_weights(), activation
        assert torch.equal(feed_forward_saving(*arguments)[0], feed_forward(*arguments))


@pytest.mark.parametrize(
    ("name", "at", "wrong", "message"),
    [
        ("linear", 0, lambda x: x[:, 1:], r"grad must be \[M, N\] for weight \[N, K\]"),
        ("linear", 0, lambda x: x.double(), "grad must be bfloat16 or .* got float64"),
        ("linear", 1, lambda x: x.float(), "weight must be float8_e4m3fn, got float32"),
        ("linear", 2, lambda x: x.to("meta"), "weight_scale_inv on meta"),
        ("feed-forward", 0, lambda x: x[:, 1:], r"grad must be \[T, H\]"),
        ("feed-forward", 1, lambda x: x[:-1], r"gate_up must be \[T, 2, I\]"),
        ("feed-forward", 1, lambda x: x.float(), "gate_up must be bfloat16"),
        ("experts", 0, lambda x: x[1:], r"grad must be \[T, H\]"),
        ("experts", 2, lambda x: x[:, 1:], r"top_k_weights must be \[T, k\]"),
        ("experts", 3, lambda x: x[1:], "gate_up must be two rows of I for each choice"),
        ("experts", 3, lambda x: x.half(), "gate_up must be bfloat16"),
        ("experts, fp8", 3, lambda x: x[1:], "gate_up must be two rows of I for each choice"),
    ],
)
def test_bad_input_is_named(name, at, wrong, message):
    op, make = OPS[name]
    arguments = make()
    arguments[at] = wrong(arguments[at])
    with pytest.raises((TypeError, ValueError), match=f"_backward: .*{message}"):
        op(*arguments)


@on_cpu_and_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(200, 144), (128, 256), (36, 5)])
def test_a_grouped_linear_has_gradients_in_rows(n, k, dtype, device):
    """Rows of no expert get zeros, whatever they hold."""
    loads = 3, 0, 4
    weight, scale_inv = quantize_128x128(torch.randn(len(loads), n, k))
    offsets = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    rows, grad = tokens_of(9, k).to(dtype), tokens_of(9, n) * 2.0**-20
    rows[7:], grad[8:] = torch.inf, torch.nan
    leaf = rows.to(device).requires_grad_()
    on_device = [x.to(device) for x in (weight, scale_inv, offsets)]
    y = grouped_linear("a layer", leaf, *on_device)
    y.backward(grad.to(device))
    assert leaf.grad.dtype == dtype
    assert not y[7:].any()
    assert not leaf.grad[7:].any()
    for begin, end, expert in ((0, 3, 0), (3, 7, 2)):
        expected = naive.through_fp8(grad[begin:end], weight[expert], scale_inv[expert])
        assert_matches_reference(leaf.grad[begin:end].cpu(), expected)
    on_device[1].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^a layer: FP8 weights"):
        grouped_linear("a layer", leaf, *on_device).sum().backward()
