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
from torch.utils._pytree import tree_leaves

from ..kernels.common.activation import Activation
from ..kernels.registry import without_autocast
from ..layers import FP8Linear, GroupedExperts
from ..layers.adapter import check_no_adapters
from ..layers.parts import parts_of
from .errors import row_errors

_Map = Callable[[torch.Tensor], torch.Tensor]
MIN_GRADIENT = 2.0**-60


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
    of; with `quantize_activations`, gradients are quantized as the FP8 modules do. So master
    weights are quantized in each forward, and get gradients, which the copy adds to `.grad` of the
    model's own parameters.

    Raises:
        TypeError: `copy.deepcopy` does not take the model.
        ValueError: a module is one rank's part; compare the model before `shard`. Or it has
            adapters.
    """
    shared = {id(x): x for x in model.buffers()}
    return _copy_with_references(model, quantize_activations, copies=shared)


def teacher_forced(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """`model(*args, **kwargs)`, and the same of its reference fed with the model's own activations.

    Rounding to FP8 amplifies: where two runs differ by one BF16 rounding, now and then they choose
    different E4M3 codes, and a few layers on they differ by a percent though both are right. So
    here every FP8 module of the reference gets the inputs that it got in the model, and all else
    runs on the reference's own values: a right model matches to BF16 rounding. An error of a module
    enters the result unless all that it gives goes into other FP8 modules; see `module_errors`.

    A model may write into its arguments, its buffers and its hidden states (`h += linear(h)`): the
    reference runs on copies of what they were before.

    Raises:
        TypeError: `copy.deepcopy` does not take an argument, such as a generator, or the model.
        ValueError: as in `reference_model`.
    """
    computed = {id(x): x.clone() for x in model.buffers() if not x.is_leaf}  # deepcopy takes none
    reference = _copy_with_references(model, quantize_activations=True, copies=computed)
    own_args, own_kwargs = copied_call("teacher_forced", args, kwargs)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, FP8Linear | GroupedExperts):
                inputs = deque[Any]()
                record = module.register_forward_pre_hook(
                    lambda _, *call, inputs=inputs: inputs.append(
                        copied_call("teacher_forced", *call)
                    ),
                    with_kwargs=True,
                )
                replay = reference.get_submodule(name).register_forward_pre_hook(
                    lambda *_, inputs=inputs: inputs.popleft(), with_kwargs=True
                )
                hooks.callback(record.remove)
                hooks.callback(replay.remove)
        output = model(*args, **kwargs)
        return output, reference(*own_args, **own_kwargs)


def module_errors(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The `row_errors` of every FP8 module in `model(*args, **kwargs)`, by its name.

    Each module is compared with its reference on the inputs that it gets in the model. Modules that
    get no rows are left out.
    """
    reference, errors = reference_model(model), dict[str, list[torch.Tensor]]()
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, FP8Linear | GroupedExperts):

                def compare(_: Any, args: Any, kwargs: Any, y: Any, name: str = name) -> None:
                    expected = reference.get_submodule(name)(*args, **kwargs)
                    errors.setdefault(name, []).append(row_errors(y, expected).flatten())

                hook = module.register_forward_hook(compare, with_kwargs=True)
                hooks.callback(hook.remove)
        model(*args, **kwargs)
    rows = {name: torch.cat(calls) for name, calls in errors.items()}
    return {name: x for name, x in rows.items() if x.numel()}


def _copy_with_references(
    model: nn.Module, quantize_activations: bool, copies: dict[int, torch.Tensor]
) -> nn.Module:
    """copies: id of a buffer -> the tensor that the copy has in its place, such as itself."""
    check_no_adapters("reference_model", model, "which references know nothing of")
    memo: dict[int, Any] = {id(x): x for x in model.parameters()} | copies
    for module in model.modules():
        if isinstance(module, FP8Linear):
            memo[id(module)] = ReferenceLinear(module, quantize_activations)
        elif isinstance(module, GroupedExperts):
            memo[id(module)] = ReferenceExperts(module, quantize_activations)
        else:
            continue
        if parts_of(module):
            raise ValueError("reference_model: the model must be whole; compare it before shard")
    return _deep_copy("reference_model: the model", model, memo)


def copied_call(caller: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Deep copies of a call's arguments, for what may write into them.

    Gradients flow through the copies of tensors in tuples, lists and dicts.
    """
    memo = {id(x): x.clone() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}

    def copied(name: int | str, value: Any) -> Any:
        return _deep_copy(f"{caller}: argument {name}", value, memo)

    own_args = tuple(copied(i, x) for i, x in enumerate(args))
    return own_args, {name: copied(name, x) for name, x in kwargs.items()}


def _deep_copy(what: str, value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # the value's own methods may raise anything
        raise TypeError(
            f"{what} must be something that copy.deepcopy takes, got a {type(value).__name__} "
            f"({error}); pass a list in place of a generator, and detach() tensors that are held "
            "by other objects"
        ) from error


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
        linear = self.linear
        rows = _mapped(x.float(), there=_same, back=_to_bf16)
        if not linear.trainable:
            weight = dequantized_blocks(linear.weight, linear.weight_scale_inv)
        else:
            weight = _Rounded.apply(linear.weight)
            rows = rows.reshape(-1, rows.shape[-1])  # columns are of all rows
        with without_autocast(x.device):
            wgrad = linear.wgrad if linear.trainable else None
            y = _product(rows, weight, self.quantize_activations, wgrad)
        y = y.view(*x.shape[:-1], y.shape[-1])
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
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        *leading, hidden_size = hidden_states.shape
        x = hidden_states.reshape(math.prod(leading), hidden_size).float()
        weights = top_k_weights.float()
        terms = torch.zeros((*top_k_index.shape, x.shape[1]), device=x.device)
        for expert in range(self.experts.num_experts):
            at = torch.where(top_k_index == expert)
            if at[0].numel():
                rows = _mapped(x[at[0]], there=_same, back=_to_bf16)
                with without_autocast(x.device):
                    terms[at] = self._expert(expert, rows, weights[at])
        y = terms.sum(dim=1).bfloat16().view(hidden_states.shape)
        if addend is not None:
            y = y + addend.view(y.shape)
        return y.to(hidden_states.dtype)

    def _expert(self, expert: int, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [R, H] through one expert, times its weights [R]."""
        experts, quantizes = self.experts, self.quantize_activations
        wgrad = experts.wgrad if experts.trainable else None
        of_gate, of_up, down = self._weights(expert)
        gate, up = (_product(x, rows, quantizes, wgrad, MIN_GRADIENT) for rows in (of_gate, of_up))
        gate_up_bias, bias = (None if b is None else b[expert].float() for b in self._biases())
        if gate_up_bias is not None:
            gate_bias, up_bias = gate_up_bias.unflatten(0, (2, -1))
            gate, up = gate + gate_bias, up + up_bias
        if quantizes:
            y: torch.Tensor = _Down.apply(gate, up, weights, down, bias, experts.activation, wgrad)
            return y
        y = _activated(gate, up, experts.activation) @ down.T
        y = y if bias is None else y + bias
        return y.bfloat16().float() * weights[:, None]

    def _biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Those of gate and up, and of down, of all experts."""
        return self.experts.gate_up_proj_bias, self.experts.down_proj_bias

    def _weights(self, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those of gate, up and down of an expert, in FP32."""
        experts = self.experts
        size = experts.intermediate_size
        gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
        rows = gate_up[:size], gate_up[size:]
        if experts.trainable:
            return _Rounded.apply(rows[0]), _Rounded.apply(rows[1]), _Rounded.apply(down)
        scales = experts.gate_up_proj_scale_inv[expert].chunk(2) if size else (down, down)
        return (
            dequantized_blocks(rows[0], scales[0]),
            dequantized_blocks(rows[1], scales[1]),
            dequantized_blocks(down, experts.down_proj_scale_inv[expert]),
        )


def _activated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    kind, limit, alpha = activation
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if kind == "gpt_oss":
        return gate * ((1.702 if alpha is None else alpha) * gate).sigmoid() * (up + 1)
    if kind == "swiglu":
        return nn.functional.silu(gate) * up
    return nn.functional.gelu(gate, approximate="tanh" if kind == "geglu_tanh" else "none") * up


class _Down(torch.autograd.Function):
    """The activation, down [H, I] and the weights of choices, rounded as kernels do."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        weights: torch.Tensor,
        down: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
        wgrad: str | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(gate.bfloat16(), up.bfloat16(), weights, down, bias)
        ctx.activation, ctx.wgrad = activation, wgrad
        y = rounded_to_fp8(_activated(gate, up, activation)) @ down.T
        y = y if bias is None else y + bias
        return y.bfloat16().float() * weights[:, None]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, weights, down, bias = ctx.saved_tensors
        with torch.enable_grad():
            gate, up = (x.float().requires_grad_() for x in saved)
            activated = _activated(gate, up, ctx.activation)
        rounded = _gradient_to_fp8(grad)
        grad_activated = _to_bf16(rounded @ down)
        weighted = grad_activated * weights[:, None]
        grad_gate, grad_up = torch.autograd.grad(activated, (gate, up), weighted)
        grad_weights = (grad_activated * activated).sum(-1)
        grad_down = grad_bias = None
        if bias is not None:
            grad_weights = grad_weights + rounded @ bias
            grad_bias = weights @ rounded
        if ctx.needs_input_grad[3]:
            grad_down = _of_weight(grad, weights[:, None] * activated.detach(), ctx.wgrad)
        return grad_gate, grad_up, grad_weights, grad_down, grad_bias, None, None


class _Rounded(torch.autograd.Function):
    """A master weight [N, K], or a part of one, in blocks of E4M3 and back; its gradient passes."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return rounded_to_blocks(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.dtype)


class _Product(torch.autograd.Function):
    """Rows [R, K] times a weight [N, K] that was rounded: all three products of FP8 operands."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, wgrad: str, min_amax: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wgrad, ctx.min_amax = wgrad, min_amax
        return rounded_to_fp8(x) @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = _gradient_to_fp8(grad) @ weight, None
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight(grad, x, ctx.wgrad, ctx.min_amax)
        return of_x, of_weight, None, None


def _of_weight(
    grad: torch.Tensor, x: torch.Tensor, wgrad: str, min_amax: float = MIN_GRADIENT
) -> torch.Tensor:
    """dY^T X of the rows of one expert: [R, N] and [R, K] -> [N, K]."""
    if wgrad == "bf16":
        return _to_bf16(grad).T @ _to_bf16(x)
    of_y = rounded_to_fp8(grad.T, MIN_GRADIENT)
    if wgrad == "128x128":
        return of_y @ rounded_to_blocks(x, min_amax)
    return of_y @ rounded_to_fp8(x.T, min_amax).T


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


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    quantizes: bool,
    wgrad: str | None = None,
    min_amax: float = 1e-4,
) -> torch.Tensor:
    """`x @ weight.T`, of which `quantizes` quantizes x and the gradient of the product.

    wgrad: how the weight has a gradient; None: it has none. min_amax: of x for that.
    """
    if not quantizes:
        return x @ weight.T
    if wgrad is not None:
        of_master: torch.Tensor = _Product.apply(x, weight, wgrad, min_amax)
        return of_master
    y = _mapped(x, there=rounded_to_fp8, back=_same) @ weight.T
    return _mapped(y, there=_same, back=_gradient_to_fp8)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _gradient_to_fp8(grad: torch.Tensor) -> torch.Tensor:
    return rounded_to_fp8(grad, MIN_GRADIENT)


@torch.no_grad()
def dequantized_blocks(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """fp32 [N, K] of e4m3 [N, K] with one scale per 128x128 block; one block at a time."""
    result = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            block = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            result[block] = weight[block].float() * scale_inv[i, j]
    return result


def rounded_to_blocks(x: torch.Tensor, min_amax: float = 1e-4) -> torch.Tensor:
    """fp32 [N, K]: every 128x128 block of `x` quantized to E4M3 and back."""
    result = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for i in range(math.ceil(x.shape[0] / 128)):
        for j in range(math.ceil(x.shape[1] / 128)):
            block = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            values = x[block].float()
            result[block] = _rounded(values, values.abs().amax(), min_amax)
    return result


def _rounded(block: torch.Tensor, amax: torch.Tensor, min_amax: float) -> torch.Tensor:
    """E4M3 and back, with a scale that makes `amax` the largest code."""
    amax = amax.clamp(min=min_amax)
    scale = amax / torch.full_like(amax, 448)  # a GPU divides by numbers through reciprocals
    return (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def rounded_to_fp8(x: torch.Tensor, min_amax: float = 1e-4) -> torch.Tensor:
    """fp32 [..., K]: every 1x128 block of `x` quantized to E4M3 and back."""
    result = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for j in range(math.ceil(x.shape[-1] / 128)):
        block = x[..., j * 128 : (j + 1) * 128].float()
        amax = block.abs().amax(dim=-1, keepdim=True)
        result[..., j * 128 : (j + 1) * 128] = _rounded(block, amax, min_amax)
    return result
