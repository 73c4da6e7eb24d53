"""What the tests of the codes of master weights share."""

import torch
from torch import nn

from moefp8.functional.training.weights import WeightCodes, codes_of
from tests.fakes.emulator import FakeDriver
from tests.gpu import same_bits
from tests.quant import both_cases


class ThroughData(torch.optim.Optimizer):
    """Subtracts gradients in a way that no version counts."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for x in group["params"]:
                x.data.sub_(x.grad)


class OfCopies(torch.optim.SGD):
    """Steps with FP32 copies, which its owner writes back, as Megatron-LM's does."""


def make_weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape or (140, 72)).to(dtype))


def num_made(gpu: FakeDriver) -> int:
    return sum(x.kernel.name.startswith("both") for x in gpu.launched)


def bits(x: torch.Tensor) -> torch.Tensor:
    """What is in memory now."""
    return x.view(torch.uint8).clone()


def expected_of(weight: torch.Tensor, parts: int = 1) -> WeightCodes:
    return both_cases.expected_of(weight.detach(), parts)


def assert_right(weight: torch.Tensor, parts: int = 1, **options: bool) -> None:
    found = codes_of(weight, parts, **options)
    for ours, theirs in zip(found, expected_of(weight, parts), strict=True):
        assert same_bits(ours, theirs)
        assert ours.stride() == theirs.stride()


def change(weight: torch.Tensor) -> None:
    """In a way that no version counts."""
    weight.data.mul_(-3)
