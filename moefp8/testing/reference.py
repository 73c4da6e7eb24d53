"""Slow models of the FP8 modules, in plain PyTorch, that share no code with them.

What is dequantized is multiplied in FP32, one expert after the other; results and gradients are
rounded to BF16, or quantized, where the FP8 modules do that.
"""

import copy
import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..kernels.common.registry import without_autocast
from ..layers import FP8Linear, GroupedExperts
from ..layers.adapter import check_no_adapters
from ..layers.parts import parts_of

_Map = Callable[[torch.Tensor], torch.Tensor]


def reference_model(model: nn.Module, quantize_activations: bool = True) -> nn.Module:
    """A copy of `model` whose FP8 modules are replaced by slow references on the same weights.

    Args:
        model: any model; the copy shares its weights and takes no memory for others.
        quantize_activations: with it, the reference answers *are the kernels right*: it computes
            with the same FP8 operands, and only the order of sums differs. Between two FP8 GEMMs
            that can, in about one row of a thousand, round an activation to the neighbouring
            E4M3 code, 2**-4 of it off (see `teacher_forced`). Without it, *what do FP8
            activations cost*: dequantized weights, unquantized activations.

    Autograd runs through it. What was quantized on the way has the gradient of what it was made
    of; with `quantize_activations`, gradients are quantized as the FP8 modules do.

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


class _Reference(nn.Module):
    """A slow stand-in for an FP8 module, with its parameters, which have the names of there."""

    def __init__(self, module: nn.Module, quantize_activations: bool) -> None:
        super().__init__()
        self._parameters, self.quantize_activations = module._parameters, quantize_activations


class ReferenceLinear(_Reference):
    """`FP8Linear` in FP32."""

    linear: FP8Linear

    def __init__(self, linear: FP8Linear, quantize_activations: bool) -> None:
        super().__init__(linear, quantize_activations)
        self.__dict__["linear"] = linear  # no submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = dequantized_blocks(self.linear.weight, self.linear.weight_scale_inv)
        rows = _mapped(x.float(), there=_same, back=_to_bf16)
        with without_autocast(x.device):
            y = _product(rows, weight, self.quantize_activations)
        if self.linear.bias is not None:
            y = y + self.linear.bias.float()
        return y.bfloat16().to(x.dtype)


class ReferenceExperts(_Reference):
    """`GroupedExperts` in FP32, one expert after the other."""

    experts: GroupedExperts

    def __init__(self, experts: GroupedExperts, quantize_activations: bool) -> None:
        super().__init__(experts, quantize_activations)
        self.__dict__["experts"] = experts  # no submodule

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        x, weights = hidden_states.float(), top_k_weights.float()
        terms = torch.zeros((*top_k_index.shape, x.shape[1]), device=x.device)
        for expert in range(self.experts.num_experts):
            at = torch.where(top_k_index == expert)
            if at[0].numel():
                rows = _mapped(x[at[0]], there=_same, back=_to_bf16)
                with without_autocast(x.device):
                    terms[at] = self._expert(expert, rows, weights[at])
        return terms.sum(dim=1).bfloat16().to(hidden_states.dtype)

    def _expert(self, expert: int, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [R, H] through one expert, times its weights [R]."""
        experts, quantizes = self.experts, self.quantize_activations
        size = experts.intermediate_size
        scale_rows = experts.gate_up_proj_scale_inv[expert].chunk(2)
        weight_rows = experts.gate_up_proj[expert].split(size) if size else ()
        gate, up = (
            _product(x, dequantized_blocks(rows, scales), quantizes)
            for rows, scales in zip(weight_rows, scale_rows, strict=True)
        )
        down = dequantized_blocks(experts.down_proj[expert], experts.down_proj_scale_inv[expert])
        if quantizes:
            y: torch.Tensor = _Down.apply(gate, up, weights, down, experts.swiglu_limit)
            return y
        y = _swiglu(gate, up, experts.swiglu_limit) @ down.T
        return y.bfloat16().float() * weights[:, None]


def _swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return nn.functional.silu(gate) * up


class _Down(torch.autograd.Function):
    """SwiGLU, the down projection [H, I] and the weights of choices, as the kernels round."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        weights: torch.Tensor,
        down: torch.Tensor,
        limit: float | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(gate.bfloat16(), up.bfloat16(), weights, down)
        ctx.limit = limit
        y = rounded_to_fp8(_swiglu(gate, up, limit)) @ down.T
        return y.bfloat16().float() * weights[:, None]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, weights, down = ctx.saved_tensors
        with torch.enable_grad():
            gate, up = (x.float().requires_grad_() for x in saved)
            activated = _swiglu(gate, up, ctx.limit)
        of_activated = _to_bf16(_gradient_to_fp8(grad) @ down)
        weighted = of_activated * weights[:, None]
        of_gate, of_up = torch.autograd.grad(activated, (gate, up), weighted)
        return of_gate, of_up, (of_activated * activated).sum(-1), None, None


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: _Map, back: _Map) -> torch.Tensor:
        ctx.back = back
        return there(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(grad), None, None


def _mapped(x: torch.Tensor, there: _Map, back: _Map) -> torch.Tensor:
    """`there(x)`; the gradient of x is `back` of that of the result."""
    y: torch.Tensor = _Mapped.apply(x, there, back)
    return y


def _product(x: torch.Tensor, weight: torch.Tensor, quantizes: bool) -> torch.Tensor:
    """`x @ weight.T`, of which `quantizes` quantizes x and the gradient of the product."""
    if not quantizes:
        return x @ weight.T
    y = _mapped(x, there=rounded_to_fp8, back=_same) @ weight.T
    return _mapped(y, there=_same, back=_gradient_to_fp8)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _gradient_to_fp8(grad: torch.Tensor) -> torch.Tensor:
    return rounded_to_fp8(grad, min_amax=2.0**-60)


@torch.no_grad()
def dequantized_blocks(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """fp32 [N, K] of e4m3 [N, K] with one scale per 128x128 block; one block at a time."""
    result = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            block = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            result[block] = weight[block].float() * scale_inv[i, j]
    return result


def rounded_to_fp8(x: torch.Tensor, min_amax: float = 1e-4) -> torch.Tensor:
    """fp32 [..., K]: every 1x128 block of `x` quantized to E4M3 and back."""
    result = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for j in range(math.ceil(x.shape[-1] / 128)):
        block = x[..., j * 128 : (j + 1) * 128].float()
        amax = block.abs().amax(dim=-1, keepdim=True).clamp(min=min_amax)
        scale = amax / torch.full_like(amax, 448)  # a GPU divides by numbers through reciprocals
        codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        result[..., j * 128 : (j + 1) * 128] = codes.float() * scale
    return result
