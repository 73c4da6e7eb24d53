"""FP8 linears of vLLM on moefp8. M tokens, K in, N out; N and K are those of a rank."""

from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)

from ...functional.linear import fp8_linear
from ..common import LINEARS
from .model import ServedModel, why_not_here


class MoEFP8LinearKernel(Fp8BlockScaledMMLinearKernel):
    """vLLM makes and loads weights and scales; they stay as they are, and `fp8_linear` takes them.

    layer.weight: e4m3 [N, K]. layer.weight_scale_inv, or of some formats weight_scale: fp32
    [ceil(N/128), ceil(K/128)].
    """

    apply_input_quant = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.served = ServedModel.current()
        self.served.add(self, LINEARS)
        if self.served.ahead is not None:
            n, k = config.weight_shape
            self.served.ahead.linear(n, k, None)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if reason := why_not_here():
            ServedModel.current().leave(LINEARS, reason)
        return reason is None, reason

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Dynamic 1x128 activations and 128x128 weights."""
        weight, activation = config.weight_quant_key.scale, config.activation_quant_key.scale
        shapes = tuple(weight.group_shape), tuple(activation.group_shape)
        reason = None
        if activation.static or shapes != ((128, 128), (1, 128)):
            reason = f"blocks are {shapes[0]} of weights and {shapes[1]} of activations"
        if reason:
            ServedModel.current().leave(LINEARS, reason)
        return reason is None, reason

    def process_weights_after_loading(self, layer: Any) -> None:
        scale_inv = _scale_inv(layer)
        if scale_inv.dtype != torch.float32:  # E8M0 is exact in FP32
            scale_inv.data = scale_inv.to(torch.float32)  # its loader takes new scales later on
        bias = getattr(layer, "bias", None)
        if bias is not None and self.served.ahead is not None:
            n, k = layer.weight.shape
            self.served.ahead.linear(n, k, bias.dtype)
        self.served.loaded(self)

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """x: [..., K] bf16 or fp16 -> [..., N] in the model's dtype. bias: [N] or None."""
        rows = x.reshape(-1, x.shape[-1])
        y = fp8_linear(rows, layer.weight, _scale_inv(layer), bias, self.batch_invariant)
        return y.view(*x.shape[:-1], y.shape[1]).to(self.config.out_dtype)

    def apply_block_scaled_mm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError  # `apply_weights` quantizes, too


def _name_of_scales(layer: Any) -> str:
    has_inv = getattr(layer, "weight_scale_inv", None) is not None
    return "weight_scale_inv" if has_inv else "weight_scale"


def _scale_inv(layer: Any) -> torch.Tensor:
    scale_inv: torch.Tensor = getattr(layer, _name_of_scales(layer))
    return scale_inv
