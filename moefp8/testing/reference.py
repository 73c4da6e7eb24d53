"""Slow models of the FP8 modules, in plain PyTorch, that share no code with them.

What is dequantized is multiplied in FP32, one expert after the other; results are rounded to BF16
where the FP8 modules round them.
"""

import copy
import math
from collections import deque
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..kernels.common.registry import without_autocast
from ..layers import FP8Linear, GroupedExperts
from ..layers.adapter import check_no_adapters
from ..layers.parts import parts_of


def reference_model(model: nn.Module, quantize_activations: bool = True) -> nn.Module:
    """A copy of `model` whose FP8 modules are replaced by slow references on the same weights.

    Args:
        model: any model; the copy shares its weights and takes no memory for others.
        quantize_activations: with it, the reference answers *are the kernels right*: it computes
            with the same FP8 operands, and only the order of sums differs. Between two FP8 GEMMs
            that can, in about one row of a thousand, round an activation to the neighbouring
            E4M3 code, 2**-4 of it off (see `teacher_forced`). Without it, *what do FP8
            activations cost*: dequantized weights, unquantized activations.

    Raises:
        ValueError: a module is one rank's part; compare the model before `shard`. Or it has
            adapters.
    """
    check_no_adapters("reference_model", model, "which references know nothing of")
    memo: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        if isinstance(module, FP8Linear):
            memo[id(module)] = ReferenceLinear(module, quantize_activations)
        elif isinstance(module, GroupedExperts):
            memo[id(module)] = ReferenceExperts(module, quantize_activations)
        else:
            continue
        if parts_of(module):
            raise ValueError("reference_model: the model must be whole; compare it before shard")
    return copy.deepcopy(model, memo)


def teacher_forced(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """`model(*args, **kwargs)`, and the same of its reference fed with the model's own activations.

    Rounding to FP8 amplifies: where two runs differ by one BF16 rounding, now and then they choose
    different E4M3 codes, and a few layers on they differ by a percent though both are right. So
    here every FP8 module of the reference gets the inputs that it got in the model, and all else
    runs on the reference's own values: each module's error enters the result once, and a right
    model matches to BF16 rounding.
    """
    reference = reference_model(model)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, FP8Linear | GroupedExperts):
                inputs = deque[Any]()
                record = module.register_forward_pre_hook(
                    lambda _, *given, inputs=inputs: inputs.append(given), with_kwargs=True
                )
                replay = reference.get_submodule(name).register_forward_pre_hook(
                    lambda *_, inputs=inputs: inputs.popleft(), with_kwargs=True
                )
                hooks.callback(record.remove)
                hooks.callback(replay.remove)
        return model(*args, **kwargs), reference(*args, **kwargs)


class ReferenceLinear(nn.Module):
    """`FP8Linear` in FP32."""

    def __init__(self, linear: FP8Linear, quantize_activations: bool) -> None:
        super().__init__()
        self.linear, self.quantize_activations = linear, quantize_activations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = dequantized_blocks(self.linear.weight, self.linear.weight_scale_inv)
        values = rounded_to_fp8(x) if self.quantize_activations else x.float()
        with without_autocast(x.device):
            y = values @ weight.T
        if self.linear.bias is not None:
            y = y + self.linear.bias.float()
        return y.bfloat16().to(x.dtype)


class ReferenceExperts(nn.Module):
    """`GroupedExperts` in FP32, one expert after the other."""

    def __init__(self, experts: GroupedExperts, quantize_activations: bool) -> None:
        super().__init__()
        self.experts, self.quantize_activations = experts, quantize_activations

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        shape = *top_k_index.shape, hidden_states.shape[1]
        terms = torch.zeros(shape, device=hidden_states.device)
        for expert in range(self.experts.num_experts):
            tokens, choices = torch.where(top_k_index == expert)
            if tokens.numel():
                with without_autocast(hidden_states.device):
                    terms[tokens, choices] = self._expert(expert, hidden_states[tokens])
        held_here = top_k_index < self.experts.num_experts
        terms = terms * top_k_weights.float().where(held_here, 0.0)[:, :, None]
        return terms.sum(dim=1).bfloat16().to(hidden_states.dtype)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        experts, size = self.experts, self.experts.intermediate_size
        rounded = rounded_to_fp8 if self.quantize_activations else torch.Tensor.float
        scale_rows = experts.gate_up_proj_scale_inv[expert].chunk(2)
        weight_rows = experts.gate_up_proj[expert].split(size) if size else ()
        gate, up = (
            rounded(x) @ dequantized_blocks(rows, scales).T
            for rows, scales in zip(weight_rows, scale_rows, strict=True)
        )
        if experts.swiglu_limit is not None:
            gate = gate.clamp(max=experts.swiglu_limit)
            up = up.clamp(min=-experts.swiglu_limit, max=experts.swiglu_limit)
        down = dequantized_blocks(experts.down_proj[expert], experts.down_proj_scale_inv[expert])
        return (rounded(nn.functional.silu(gate) * up) @ down.T).bfloat16().float()


def dequantized_blocks(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """fp32 [N, K] of e4m3 [N, K] with one scale per 128x128 block; one block at a time."""
    result = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            block = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            result[block] = weight[block].float() * scale_inv[i, j]
    return result


def rounded_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """fp32 [..., K]: every 1x128 block of `x` quantized to E4M3 and back."""
    result = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for j in range(math.ceil(x.shape[-1] / 128)):
        block = x[..., j * 128 : (j + 1) * 128].float()
        scale = block.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) / 448
        codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        result[..., j * 128 : (j + 1) * 128] = codes.float() * scale
    return result
