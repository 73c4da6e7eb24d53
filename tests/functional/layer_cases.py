"""Small layers of every kind whose gradients need transposed weights, on a GPU."""

from typing import NamedTuple

import torch
from torch import nn

from moefp8 import FP8Linear, GroupedExperts
from moefp8.functional.grouped_linear import grouped_linear
from moefp8.layers.moe import SharedExperts
from moefp8.quant import quantize_128x128
from tests.functional.cases import tokens_of

T, H, I, E, K = 24, 512, 400, 4, 2


class Grouped(nn.Module):
    """`grouped_linear` as a layer."""

    def __init__(self, size: int, keep_transposed: bool | None) -> None:
        super().__init__()
        self.keep_transposed = keep_transposed
        weight, scales = quantize_128x128(torch.randn(E, size, H, device="cuda") / H**0.5)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        offsets = torch.arange(E + 1, dtype=torch.int32, device="cuda") * T // E
        self.register_buffer("offsets", offsets)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weight, self.weight_scale_inv
        return grouped_linear("Grouped", x, *weights, self.offsets, self.keep_transposed)


class Experts(GroupedExperts):
    """`GroupedExperts` whose tokens choose experts in turn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(x.shape[0] * K, device=x.device).view(-1, K) % E
        return super().forward(x, ids, torch.full(ids.shape, 0.7, device=x.device))


def make_layer(kind: str, keeps: bool | None, size: int = I) -> nn.Module:
    if kind == "linear":
        return FP8Linear(H, size, device="cuda", keep_transposed=keeps)
    if kind == "grouped linear":
        return Grouped(size, keeps)
    if kind == "experts":
        return Experts(E, H, size, device="cuda", keep_transposed=keeps)
    layer = SharedExperts(H, size, device="cuda")
    layer.down_proj.keep_transposed = keeps
    return layer


KINDS = "linear", "grouped linear", "experts", "shared experts"


class Pass(NamedTuple):
    """A token batch and the gradient of what a layer gives."""

    x: torch.Tensor
    grad: torch.Tensor

    def gradient(self, layer: nn.Module) -> torch.Tensor:
        """Forward and backward."""
        x = self.x.detach().requires_grad_()
        return torch.autograd.grad(layer(x), x, self.grad)[0]


def pass_of(kind: str, size: int = I) -> Pass:
    return Pass(tokens_of(T, H, "cuda"), tokens_of(T, size if "linear" in kind else H, "cuda"))


def codes_of(layer: nn.Module) -> list[nn.Parameter]:
    return [x for x in layer.parameters() if x.dtype == torch.float8_e4m3fn]


@torch.no_grad()
def change(weight: torch.Tensor) -> None:
    """Other codes, in place."""
    weight.copy_(weight.view(torch.uint8).flip(-1).view(weight.dtype))
