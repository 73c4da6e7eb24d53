"""What the tests of experts share whose tokens, or their gradients, come as codes.

The module imports no more than `sanitizer` may need.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from moefp8.functional.experts import experts, experts_saving
from moefp8.functional.experts_backward import experts_backward
from moefp8.kernels import E4M3
from moefp8.quant.quantize import quantize_1x128, quantize_gradient_1x128
from tests.functional.cases import weights_of
from tests.functional.experts.backward_cases import Case, case

Pair = tuple[torch.Tensor, torch.Tensor | None]
Placed = Callable[[torch.Tensor], torch.Tensor]

# T, k, E, H, I; of a rank the first of its experts, too, and how many the model has.
SHAPES: dict[str, tuple[int, ...]] = {
    "one token": (1, 2, 4, 128, 128),
    "one choice": (9, 1, 3, 256, 144),
    "no token": (0, 2, 3, 144, 128),
    "multiples of 16": (7, 2, 5, 144, 272),
    "multiples of 8": (6, 3, 4, 136, 64),
    "multiples of 4": (30, 2, 3, 100, 36),
    "odd": (4, 3, 2, 129, 257),
    "tiny": (3, 1, 2, 3, 5),
    "a rank": (40, 3, 4, 272, 144, 3, 12),
    "the last rank": (5, 4, 2, 264, 100, 10, 12),
}


def case_of(shape: tuple[int, ...], kind: str = "distinct", device: str = "cpu") -> Case:
    """On a CPU, which refuses other ids, those "out of range" are of the model, or held nowhere."""
    num_tokens, top_k, e, h, i, *rank = shape
    first, num_global = rank or (0, None)
    made = case(num_tokens, h, top_k, weights_of(e, h, i, device), kind, rank=(first, num_global))
    if device != "cpu":
        return made
    return made._replace(ids=made.ids.clamp(0, num_global or e))


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class Codes(NamedTuple):
    """Tokens and gradients are given as codes, which lie where `place` puts them.

    place, scale_place: of codes and of their scales.
    """

    place: Placed = as_it_is
    scale_place: Placed = as_it_is

    def of_tokens(self, x: torch.Tensor) -> Pair:
        return self._placed(quantize_1x128.overload(x, False))  # a fake GPU is not asked for it

    def of_gradients(self, grad: torch.Tensor) -> Pair:
        return self._placed(quantize_gradient_1x128.overload(grad))

    def _placed(self, quantized: tuple[torch.Tensor, torch.Tensor]) -> Pair:
        data, scale_inv = quantized
        return self.place(data.view(torch.uint8)).view(E4M3), self.scale_place(scale_inv)


class Floats(NamedTuple):
    """They are given as they are."""

    def of_tokens(self, x: torch.Tensor) -> Pair:
        return x, None

    of_gradients = of_tokens


Given = Codes | Floats


def forward(
    made: Case, given: Given, masked: bool = False, addend: torch.Tensor | None = None
) -> torch.Tensor:
    x, scale_inv = given.of_tokens(made.x)
    options = made.activation, masked, *made.rank, addend, scale_inv
    return experts(x, made.ids, made.top_k_weights, *made.weights, *options)


def backward(made: Case, given: Given) -> tuple[torch.Tensor, ...]:
    """The result, gate and up of rows that there are, and both gradients."""
    choices, options = (made.ids, made.top_k_weights), (made.activation, False, *made.rank)
    x, scale_inv = given.of_tokens(made.x)
    y, gate_up = experts_saving(x, *choices, *made.weights, *options, None, scale_inv)
    rows = gate_up[: int((made.here < made.num_experts).sum())]
    grad, scale_inv = given.of_gradients(made.grad)
    args = gate_up, None, *made.weights, None, None, None, *options, scale_inv
    found = experts_backward(grad, *choices, *args)
    return y, rows, *found
