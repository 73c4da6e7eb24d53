"""A linear layer: quantize the activations, then the dense GEMM. M rows, K in, N out."""

import torch

from ..kernels.common.blocks import E4M3, num_blocks
from ..kernels.common.checks import (
    FLOATS,
    check_bias,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.registry import register
from ..kernels.gemm.dense import block_scaled_matmul
from ..kernels.gemm.dense_launch import launch_gemm
from ..quant.quantize import launch_quantize_1x128, quantize_1x128

_OP = "fp8_linear"


def _allocate(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Check, then allocate the result. Also the fake body."""
    check_same_device(_OP, x=x, weight=weight, weight_scale_inv=weight_scale_inv, bias=bias)
    check_tensor(_OP, "x", x, FLOATS, 2)
    check_tensor(_OP, "weight", weight, (E4M3,), 2)
    check_tensor(_OP, "weight_scale_inv", weight_scale_inv, (torch.float32,), 2)
    (m, k), (n, weight_k) = x.shape, weight.shape
    if k != weight_k:
        raise ValueError(f"{_OP}: K must be equal in x and weight, got {k} and {weight_k}")
    shape = [num_blocks(n), num_blocks(k)]
    rule = "[ceil(N/128), ceil(K/128)]"
    check_shape(_OP, "weight_scale_inv", weight_scale_inv, shape, rule)
    check_rows_contiguous(_OP, "weight", weight)
    check_bias(_OP, bias, n)
    return x.new_empty((m, n), dtype=torch.bfloat16)


def _body(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    y = _allocate(x, weight, weight_scale_inv, bias)
    data, scale_inv = quantize_1x128(x, False)
    result = block_scaled_matmul(data, scale_inv, weight, weight_scale_inv)
    return y.copy_(result if bias is None else result + bias.float())


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`fp8_linear` on a Hopper GPU: two kernels on the current stream; nothing waits for them.

    The second starts while the first ends, and loads weights and bias meanwhile. That is right
    after our own kernel, which lets it start only once what came before is complete, and writes
    neither.
    """
    y = _allocate(x, weight, weight_scale_inv, bias)
    data, scale_inv = launch_quantize_1x128(x, False)
    launch_gemm(data, scale_inv, weight, weight_scale_inv, y, bias, programmatic=True)
    return y


fp8_linear = register(
    f"{_OP}(Tensor x, Tensor weight, Tensor weight_scale_inv, Tensor? bias) -> Tensor",
    _body,
    _allocate,
    launch_linear,
)
"""`quantize_1x128`, then `fp8_gemm_nt`: x [M, K] bf16, fp16 or fp32; weight e4m3 [N, K] with
weight_scale_inv fp32 [ceil(N/128), ceil(K/128)]; bias [N] in bf16, fp16, fp32 or None -> bf16
[M, N]. Raises TypeError, ValueError, naming the argument, the rule and what came."""
