"""FP8 linears of SGLang on moefp8. M tokens, K in, N out; N and K are those of a rank."""

from functools import partial
from typing import Any

import torch
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import is_cpu

from ...functional.linear import fp8_linear
from ..common import why_not_on


def why_not_linear(method: Any, layer: Any) -> str | None:
    """Why a linear stays with SGLang. method: its Fp8LinearMethod."""
    if not method.is_checkpoint_fp8_serialized:
        return "its checkpoint is not FP8"
    if method.use_mxfp8 or method.weight_block_size != [128, 128]:
        return f"weight_block_size is {method.weight_block_size}"
    if method.use_marlin:
        return "Marlin is on"
    backend = get_exec().kernel.fp8_gemm_runner_backend
    if backend != "auto":
        return f"--fp8-gemm-backend is {backend}"
    if is_cpu():
        return "SGLang's CPU engine packs the weights"
    return why_not_on(layer.weight.device)


def take_linear(method: Any) -> None:
    """Let an Fp8LinearMethod call `block_linear`."""
    if not callable(getattr(method, "w8a8_block_fp8_linear", None)):
        raise RuntimeError(
            "moefp8's plug-in does not fit this SGLang, whose Fp8LinearMethod has no "
            "w8a8_block_fp8_linear; unset MOEFP8_SGLANG to serve without the plug-in"
        )
    method.w8a8_block_fp8_linear = partial(block_linear, batch_invariant=is_batch_invariant())


def is_batch_invariant() -> bool:
    """Whether the server wants the same bits of a request in every batch."""
    return bool(get_exec().deterministic.enable_deterministic_inference)


def block_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """What an Fp8LinearMethod calls: y = x dequantize(W)^T + bias, in the dtype of the input.

    input: [..., K] bf16 or fp16. weight: e4m3 [N, K]. weight_scale: fp32 [ceil(N/128),
    ceil(K/128)]. Raises ValueError for an input that is quantized already.
    """
    if input_scale is not None:
        raise ValueError(
            "block_linear: input must be bf16 or fp16, got codes and scales, which SGLang makes "
            "only for linears of its own; unset SGLANG_OPT_MOE_QUANT_ONCE"
        )
    if not torch.compiler.is_compiling():  # plain tensors spare the host the dispatcher
        weight, weight_scale = weight.data, weight_scale.data
    rows = input.reshape(-1, input.shape[-1])
    y = fp8_linear(rows, weight, weight_scale, bias, batch_invariant)
    return y.to(input.dtype).view(*input.shape[:-1], y.shape[1])
