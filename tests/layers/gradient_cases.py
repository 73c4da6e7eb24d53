"""What the tests of gradients share: leaves, backward passes, and how they are judged."""

from collections.abc import Callable
from typing import Any

import torch

from moefp8 import GroupedExperts
from moefp8.layers.experts import WEIGHTS
from tests import naive
from tests.functional.cases import tokens_of
from tests.layers.cases import assert_close, assert_matches_up_to_codes

Found = tuple[torch.Tensor, ...]  # the result, then the gradient of each float argument
E, H, I, K = 5, 144, 200, 2


def differentiated(
    run: Callable[..., torch.Tensor], *arguments: torch.Tensor, grad: torch.Tensor
) -> Found:
    """`run(*arguments)`, whose gradient is `grad`, and what each float argument gets of it."""
    leaves = [
        x.detach().clone().requires_grad_(x.is_floating_point() and x.dtype.itemsize > 1)
        for x in arguments
    ]
    y = run(*leaves)
    y.backward(grad.to(y.dtype))
    return y.detach(), *(x.grad for x in leaves if x.requires_grad)


def experts_of(device: str = "cpu", num_experts=E, h=H, i=I, **options: Any) -> GroupedExperts:
    """Experts whose gate and up are of several magnitudes."""
    layer = GroupedExperts(num_experts, h, i, **options)
    layer.gate_up_proj_scale_inv.mul_(3.0)
    return layer.to(device)


def flat(x: torch.Tensor) -> torch.Tensor:
    """All of x as one row, for what may cancel in a row of its own."""
    return x.reshape(1, -1)


def gradient_of(num_tokens: int, size: int, device: str = "cpu") -> torch.Tensor:
    """bf16 [T, N]; they are small, and differ from token to token."""
    return tokens_of(num_tokens, size, device) * 2.0**-12


def on(device: str, *tensors: Any) -> list[Any]:
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in tensors]


def expected_of(
    layer: GroupedExperts, *arguments: torch.Tensor, grad: torch.Tensor
) -> naive.Gradients:
    weights = [getattr(layer, name).detach() for name in WEIGHTS]
    given = on("cpu", grad, *arguments, *weights)
    return naive.fp8_experts_grad(
        *given, layer.activation, layer.saved_dtype == torch.float8_e4m3fn
    )


def assert_gradients_right(found: Found, expected: naive.Gradients, size: int) -> None:
    """Of hidden states up to codes; of top_k_weights where that which cancels is seen too.

    size: I. On a GPU sums have fewer bits, so that more codes flip.
    """
    _, of_x, of_weights = (x.cpu() for x in found)
    if found[0].is_cuda:
        assert_close(of_x, expected.hidden_states, size)
    else:
        assert_matches_up_to_codes(of_x, expected.hidden_states)
    errors = (of_weights - expected.top_k_weights).abs()
    rounding = torch.finfo(of_weights.dtype).eps * expected.top_k_weights.abs()
    bound = (2e-3 + 2**-4 / size) * expected.sizes  # one code of I may flip
    assert bool((errors <= bound + rounding).all()), (errors / expected.sizes).max()
