"""Helpers of the autograd functions of FP8 operations.

Gradients flow to all inputs but FP8 weights. A backward that asks for the gradient of an FP8 weight
raises an error.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import _C
from torch.autograd import forward_ad

from ..kernels.registry import register


def records(layer: str, *inputs: Any) -> bool:
    """Whether autograd records a computation with these inputs.

    Raises NotImplementedError if an input has a tangent of forward-mode AD, or asks for a gradient
    through `torch.vmap`: ops would drop both.
    """
    if forward_ad._current_level >= 0 and any(map(_has_tangent, inputs)):
        raise NotImplementedError(
            f"{layer}: forward-mode AD (torch.func.jvp, jacfwd) is not supported: FP8 has no "
            "derivative; detach what goes in"
        )
    if not torch.is_grad_enabled():
        return False
    if _C._functorch.peek_interpreter_stack() is not None and any(map(_hides_gradient, inputs)):
        raise NotImplementedError(
            f"{layer}: gradients through torch.vmap are not supported; give the layer the whole "
            "batch at once, or run it under torch.no_grad()"
        )
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _hides_gradient(x: Any) -> bool:
    """Whether x needs a gradient though its `requires_grad` is False, as within `torch.vmap`."""
    if not isinstance(x, torch.Tensor) or not _C._functorch.is_batchedtensor(x):
        return False
    if torch.compiler.is_compiling():
        return True  # a trace cannot see; without fullgraph=True, torch then runs this eagerly
    while _C._functorch.is_batchedtensor(x):
        x = _C._functorch.get_unwrapped(x)
    return x.requires_grad


def _has_tangent(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _raise_no_gradient(grad: torch.Tensor, layer: str, shape: Sequence[int]) -> torch.Tensor:
    raise NotImplementedError(
        f"{layer}: FP8 weights and their scales have no gradient; freeze them (requires_grad_("
        "False)) and train adapters beside them (moefp8.adapters.add_lora), or train master "
        "weights: moefp8.unfreeze(model), or moefp8.convert(model, trainable=True) of plain modules"
    )


# This is an op, so that torch.compile can trace a backward that only fails when it runs.
_no_gradient = register(
    "no_gradient(Tensor grad, str layer, SymInt[] shape) -> Tensor",
    reference=_raise_no_gradient,
    fake=lambda grad, layer, shape: grad.new_empty(shape),
    cuda=_raise_no_gradient,
)


def no_gradients(
    grad: torch.Tensor, layer: str, needed: Sequence[bool], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients of FP8 weights: None if not needed, else a tensor whose computation raises."""
    return [
        _no_gradient(grad, layer, list(weight.shape)) if wants else None
        for wants, weight in zip(needed, weights, strict=True)
    ]


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: str, y: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.layer, ctx.weights = layer, weights
        return y.clone()  # not a view, since the caller may change it in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return None, grad, *no_gradients(grad, ctx.layer, needed, ctx.weights)


def frozen(layer: str, y: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """y, computed from `weights`; its backward raises if one of them needs a gradient."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in weights):
        y = _Frozen.apply(layer, y, *weights)
    return y


class _NoSecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *depends_on: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "moefp8: a gradient through an FP8 module cannot be differentiated again "
            "(create_graph=True); dequantize the module first: moefp8.dequantize(model)"
        )


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward: differentiating its results again raises an error.

    PyTorch's `once_differentiable` raises only if the incoming gradient requires a gradient. Here
    results also depend on saved tensors, whose second derivatives would be missing silently. In
    autograd's graph the results depend on the incoming gradient: otherwise a caller that finds no
    path to a tensor takes its second derivative for 0, as `torch.autograd.functional.hessian` does.
    """

    @wraps(backward)
    def run(ctx: Any, grad: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, grad)
        with torch.no_grad():
            gradients = backward(ctx, grad)
        return tuple(
            None if x is None else _NoSecondGradient.apply(x.detach().requires_grad_(), grad)
            for x in gradients
        )

    return run
