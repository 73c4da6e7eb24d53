"""A linear layer: quantize the activations, then the dense GEMM. M rows, K in, N out."""

from typing import NamedTuple

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
from ..kernels.common.prepared import Launches, layout_of
from ..kernels.common.registry import register_inputs
from ..kernels.common.tma_operands import fits
from ..kernels.gemm.dense import DenseInputs, block_scaled_matmul, launch_dense
from ..kernels.gemm.launch import GemmSources, prepare_gemm
from ..kernels.gemm.operands import Operands, check_sizes
from ..kernels.gemm.tuned import config_source_of
from ..kernels.jit import Source, current_driver
from ..quant.numerics import quantize_1x128
from ..quant.quantize import launch_quantize_1x128
from ..quant.quantize_launch import prepare_quantize

_OP = "fp8_linear"


class LinearInputs(NamedTuple):
    """What `fp8_linear` takes.

    x: [M, K] bf16, fp16 or fp32; it is quantized to 1x128.
    weight: e4m3 [N, K]. weight_scale_inv: fp32 [ceil(N/128), ceil(K/128)].
    bias: [N] in bf16, fp16, fp32 or None.
    """

    x: torch.Tensor
    weight: torch.Tensor
    weight_scale_inv: torch.Tensor
    bias: torch.Tensor | None


def _allocate(inputs: LinearInputs) -> torch.Tensor:
    """Check, then allocate the result; this is also the fake body."""
    x, weight, weight_scale_inv, bias = inputs
    check_same_device(_OP, **inputs._asdict())
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


def _body(inputs: LinearInputs) -> torch.Tensor:
    y = _allocate(inputs)
    x, weight, weight_scale_inv, bias = inputs
    result = block_scaled_matmul(*quantize_1x128(x), weight, weight_scale_inv)
    return y.copy_(result if bias is None else result + bias.float())


# The addresses of a call, in order; the first kernel fills MEMORY for the second.
_X, _WEIGHT, _SCALES, _Y, _BIAS, _MEMORY = map(Source, range(6))


def _launch(inputs: LinearInputs) -> torch.Tensor:
    """`fp8_linear` on a Hopper GPU: two kernels on the current stream; nothing waits for them.

    The second starts while the first ends, and loads weights and bias meanwhile. That is safe
    after our own kernel, which lets it start only once what came before is complete, and writes
    neither.
    """
    x, weight, weight_scale_inv, bias = inputs
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
        _allocate(inputs)
        found = driver.keep(key, _prepare(inputs))
    (m, _), n = x.shape, weight.shape[0]
    y = torch.empty_strided((m, n), (n, 1), dtype=torch.bfloat16, device=x.device)
    if not found.launches:
        data, scale_inv = launch_quantize_1x128(x, False)
        launch_dense(
            DenseInputs(data, scale_inv, weight, weight_scale_inv, y, bias), programmatic=True
        )
        return y
    bias_address = 0 if bias is None else bias.data_ptr()
    addresses = (x_address, weight_address, weight_scale_inv.data_ptr(), y.data_ptr(), bias_address)
    found(x.get_device(), addresses)
    return y


def _prepare(inputs: LinearInputs) -> Launches:
    """The launches of both kernels; none where operands must be copied or nothing is to be done."""
    x, weight, weight_scale_inv, bias = inputs
    (m, k), n = x.shape, weight.shape[0]
    in_order = x.stride(1) == 1 and (bias is None or bias.is_contiguous())
    if not (m and n and k and k % 16 == n % 8 == 0 and in_order and fits(weight)):
        return Launches((), 0)
    check_sizes(_OP, m, n, k)
    data_bytes, scale_pitch = round_up(m * k, 256), round_up(m, 4)
    of_data, of_scales = _MEMORY, _MEMORY._replace(plus=data_bytes)
    quantize = prepare_quantize(x, scale_pitch, False, None, (_X, of_data, of_scales))
    configs, meta = config_source_of(x.get_device()), torch.device("meta")
    gemm = prepare_gemm(
        configs.dense(m, n, k),
        Operands(
            torch.empty((m, k), dtype=E4M3, device=meta),
            empty_tma_aligned((m, num_blocks(k)), meta),
            weight,
            weight_scale_inv,
            torch.empty((m, n), dtype=torch.bfloat16, device=meta),
        ),
        GemmSources(of_data, of_scales, _WEIGHT, _SCALES, _Y, bias=None if bias is None else _BIAS),
        configs.sms,
        m,
        bias=None if bias is None else bias.dtype,
    )
    return Launches((quantize, gemm), data_bytes + num_blocks(k) * scale_pitch * 4)


fp8_linear = register_inputs(_OP, LinearInputs, "Tensor", cpu=_body, fake=_allocate, hopper=_launch)
"""`quantize_1x128`, then `fp8_gemm_nt`: `LinearInputs` -> bf16 [M, N]. Raises TypeError,
ValueError, naming the argument, the rule and what came."""
