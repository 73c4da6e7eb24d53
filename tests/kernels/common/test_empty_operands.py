"""Empty tensors from numpy, whose strides are all zero: every op takes them as any other empty one.

M rows, N out, K in, E experts, I intermediate, T tokens.
"""

import numpy as np
import pytest
import torch

from moefp8 import FP8Linear, routing
from moefp8.functional.experts import experts
from moefp8.functional.feed_forward import feed_forward
from moefp8.functional.linear import fp8_linear
from moefp8.kernels.common.activation import SWIGLU
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.operands import Operands
from moefp8.quant import quantize_1x128, quantize_128x128
from tests.kernels.gemm import grouped_cases


def from_numpy(x: torch.Tensor) -> torch.Tensor:
    """x, and if it is empty, as numpy lays out such an array."""
    if x.numel():
        return x
    array = np.zeros(x.shape, dtype=f"V{x.element_size()}").view(f"i{x.element_size()}")
    found = torch.from_numpy(array).view(x.dtype)
    assert found.is_contiguous()
    assert not any(found.stride())
    return found


def weight(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = quantize_128x128(torch.randn(shape).bfloat16())
    return from_numpy(q.data), from_numpy(q.scale_inv)


def result(*shape: int) -> torch.Tensor:
    return from_numpy(torch.full(shape, 7, dtype=torch.bfloat16))


def ints(*values: int) -> torch.Tensor:
    return from_numpy(torch.tensor(values, dtype=torch.int32))


def gemm(layout: GroupLayout | None):
    def call(m: int, n: int, k: int) -> torch.Tensor:
        routing = grouped_cases.routing_of(layout, (m,), 0)
        made = Operands(*map(from_numpy, grouped_cases.operands(routing, n, k)))
        grouped_cases.run_op(routing, made, from_numpy(routing.bounds_on()))
        return made.d

    return call


def linear(m: int, n: int, k: int) -> torch.Tensor:
    return fp8_linear(result(m, k), *weight(n, k), None)


def layer(m: int, n: int, k: int) -> torch.Tensor:
    if not n or not k:
        return result(m, n).zero_()  # no such layer can be made
    return FP8Linear(k, n)(result(m, k))


def shared(m: int, n: int, k: int) -> torch.Tensor:
    return feed_forward(result(m, k), *weight(n, k), *weight(n, k), *weight(k, n), SWIGLU)


def routed(m: int, n: int, k: int) -> torch.Tensor:
    ids, weights = ints(*[0, 1] * m).view(m, 2), from_numpy(torch.ones(m, 2))
    stacks = (*weight(2, 2 * n, k), *weight(2, k, n))
    return experts(result(m, k), ids, weights, *stacks, SWIGLU, False)


OPS = [*map(gemm, grouped_cases.LAYOUTS), linear, layer, shared, routed]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0, 128, 128), (4, 0, 128), (4, 128, 0), (0, 0, 0)])
def test_gemms_and_layers(op, shape):
    """No products, so zeros, if there is anything at all."""
    assert not op(*shape).any()


@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (0, 0), (2, 0, 128)])
def test_quantization(shape):
    x = from_numpy(torch.randn(shape).bfloat16())
    for quantized in (quantize_1x128(x), quantize_128x128(x)):
        assert quantized.data.shape == shape


def test_routing():
    logits = from_numpy(torch.randn(0, 8))
    index, weights = routing.softmax_topk(logits, 2, True)
    assert index.shape == weights.shape == (0, 2)
    plan = routing.build_plan(from_numpy(index), 8)
    rows = routing.dispatch(result(0, 128), plan)
    assert rows.shape[1] == 128
    assert routing.combine(rows, plan, from_numpy(weights)).shape == (0, 128)
