"""A linear layer: quantize the activations, then the dense GEMM. M rows, K in, N out."""

import torch

from ..kernels.common.blocks import E4M3, empty_tma_aligned, num_blocks, round_up
from ..kernels.common.checks import (
    FLOATS,
    check_bias,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.fp8 import quantize_1x128
from ..kernels.common.prepared import Launches, layout_of
from ..kernels.common.registry import register
from ..kernels.common.tma_operands import fits
from ..kernels.gemm.dense import block_scaled_matmul
from ..kernels.gemm.dense_launch import launch_gemm, prepare_dense
from ..kernels.gemm.launch import GemmSources, Operands, check_sizes
from ..kernels.jit import Source, current_driver
from ..quant.quantize import launch_quantize_1x128
from ..quant.quantize_launch import prepare_quantize

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
    data, scale_inv = quantize_1x128(x)
    result = block_scaled_matmul(data, scale_inv, weight, weight_scale_inv)
    return y.copy_(result if bias is None else result + bias.float())


# The addresses of a call, in order; MEMORY lies between the two kernels.
_X, _WEIGHT, _SCALES, _Y, _MEMORY, _BIAS = map(Source, range(6))


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
    driver, x_address, weight_address = current_driver(), x.data_ptr(), weight.data_ptr()
    key = (
        _OP,
        layout_of(x),
        layout_of(weight),
        layout_of(weight_scale_inv),
        None if bias is None else layout_of(bias),
        x_address % 16,
        weight_address % 16,
        driver.max_sms,
    )
    found = driver.prepared().get(key)
    if found is None:
        y = _allocate(x, weight, weight_scale_inv, bias)
        found = driver.keep(key, _prepare(x, weight, weight_scale_inv, bias, y))
    if not found.launches:
        y = _allocate(x, weight, weight_scale_inv, bias)
        data, scale_inv = launch_quantize_1x128(x, False)
        launch_gemm(data, scale_inv, weight, weight_scale_inv, y, bias, programmatic=True)
        return y
    device = x.device
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=device)
    memory = driver.workspace(found.workspace_bytes, device)
    addresses = (
        x_address,
        weight_address,
        weight_scale_inv.data_ptr(),
        y.data_ptr(),
        memory.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )
    found(x.get_device(), addresses)
    return y


def _prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> Launches:
    """Both kernels; none where operands have to be copied, or there is nothing to compute."""
    (m, k), n = x.shape, weight.shape[0]
    in_order = x.stride(1) == 1 and (bias is None or bias.is_contiguous())
    if not (m and n and k and k % 16 == n % 8 == 0 and in_order and fits(weight)):
        return Launches((), 0)
    check_sizes(_OP, m, n, k)
    data_bytes = round_up(m * k, 256)
    scales = empty_tma_aligned((m, num_blocks(k)), x.device)
    scale_pitch = round_up(m, 4)
    of_data, of_scales = _MEMORY, _MEMORY._replace(plus=data_bytes)
    quantize = prepare_quantize(x, scale_pitch, False, None, (_X, of_data, of_scales))
    data = torch.empty((m, k), dtype=E4M3, device=x.device)
    gemm = prepare_dense(
        Operands(data, scales, weight, weight_scale_inv, y),
        GemmSources(of_data, of_scales, _WEIGHT, _SCALES, _Y, bias=None if bias is None else _BIAS),
        bias,
        programmatic=True,
    )
    return Launches((quantize, gemm), data_bytes + num_blocks(k) * scale_pitch * 4)


fp8_linear = register(
    f"{_OP}(Tensor x, Tensor weight, Tensor weight_scale_inv, Tensor? bias) -> Tensor",
    _body,
    _allocate,
    launch_linear,
)
"""`quantize_1x128`, then `fp8_gemm_nt`: x [M, K] bf16, fp16 or fp32; weight e4m3 [N, K] with
weight_scale_inv fp32 [ceil(N/128), ceil(K/128)]; bias [N] in bf16, fp16, fp32 or None -> bf16
[M, N]. Raises TypeError, ValueError, naming the argument, the rule and what came."""
