"""Calls of ops and layers, each with tensors of its own and what it should give."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from moefp8 import FP8Linear, GroupedExperts
from moefp8.functional.experts import experts
from moefp8.functional.linear import fp8_linear
from moefp8.kernels.common.activation import SWIGLU
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.quant import numerics
from tests.kernels.gemm import grouped_cases
from tests.layers.cases import assert_matches_up_to_codes


class Sample(NamedTuple):
    """num_kernels: how many it launches. is_exact: not if the order of its sums is free."""

    call: Callable[[], torch.Tensor]
    expected: torch.Tensor
    num_kernels: int = 1
    is_exact: bool = True

    def check(self) -> None:
        y = self.call()
        if self.is_exact:
            assert torch.equal(y, self.expected)
        else:
            assert_matches_up_to_codes(y, self.expected)


def gemm(layout: GroupLayout | None) -> Callable[[int], Sample]:
    def sample(m: int) -> Sample:
        routing = grouped_cases.routing_of(layout, (m, 0, 9))
        made, bounds = grouped_cases.operands(routing, 48, 256), routing.bounds_on()
        bias = None if layout else grouped_cases.bias_of(torch.float32, 48)

        def call() -> torch.Tensor:
            grouped_cases.run_op(routing, made, bounds, bias=bias)
            return made.d

        num_kernels = 2 if layout == GroupLayout.SEGMENTS else 1
        return Sample(call, grouped_cases.expected_of(routing, made, bias), num_kernels)

    return sample


def linear(m: int) -> Sample:
    x, bias = torch.randn(m, 256).bfloat16(), torch.randn(48)
    weight = numerics.quantize_128x128(torch.randn(48, 256), False)
    expected = fp8_linear.overload(x, *weight, bias)
    return Sample(lambda: fp8_linear(x, *weight, bias), expected, 2)


def linear_layer(m: int) -> Sample:
    module, x = FP8Linear(256, 48).requires_grad_(False), torch.randn(m, 256).bfloat16()
    weights = module.weight, module.weight_scale_inv, module.bias
    return Sample(lambda: module(x), fp8_linear.overload(x, *weights), 2)


def expert_layer(layout: str) -> Callable[[int], Sample]:
    def sample(m: int) -> Sample:
        module, x = GroupedExperts(4, 256, 128, layout=layout), torch.randn(m, 256).bfloat16()
        ids, scores = torch.randint(0, 5, (m, 2)), torch.rand(m, 2)
        names = "gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"
        weights = [getattr(module, name).detach() for name in names]
        expected = experts.overload(x, ids, scores, *weights, *SWIGLU, layout == "masked")
        return Sample(lambda: module(x, ids, scores), expected, 4, False)

    return sample


OPS = {
    **{x.name.lower() if x else "dense": gemm(x) for x in grouped_cases.LAYOUTS},
    "linear": linear,
    "linear layer": linear_layer,
    "experts, contiguous": expert_layer("contiguous"),
    "experts, masked": expert_layer("masked"),
}
