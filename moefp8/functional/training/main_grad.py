"""The target of a weight's gradient: a new tensor, or `main_grad`.

Megatron-LM's convention: the attribute `main_grad` of a parameter is an FP32 tensor, to which the
GEMM of each micro-batch adds the gradient directly.
"""

import torch
from torch.autograd.graph import get_gradient_edge

from ...kernels.common.checks import check_same_device, check_shape, check_tensor


def master(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight itself, kept for a backward, if it is a leaf that needs a gradient; else None.

    A leaf may have `main_grad` and related attributes. Hooks on saved tensors, such as those of
    `torch.utils.checkpoint`, hand a backward tensors without attributes.
    """
    return weight if weight.is_leaf and weight.requires_grad else None


def is_asked_for(weight: torch.Tensor) -> bool:
    """Whether the running backward was asked for the gradient of this weight, which needs one.

    An autograd function learns only in its forward which inputs need gradients. A gradient in vain
    costs time; but `main_grad` must not change if a caller asks for gradients of inputs only.
    """
    if getattr(weight, "main_grad", None) is None or torch.compiler.is_compiling():
        return True
    try:
        node = get_gradient_edge(weight).node
        return bool(torch._C._will_engine_execute_node(node))
    except (RuntimeError, ValueError):  # `torch.autograd.grad` returns this gradient
        return True


def target(weight: torch.Tensor, *, begins: bool = True) -> tuple[torch.Tensor, bool]:
    """The tensor that takes the gradient of a weight, and whether the gradient is added to it.

    If the weight has `main_grad`, that is the tensor: the gradient is added, or written if
    `weight.overwrite_main_grad` is true and it `begins` the gradients of one call. Else it is a new
    tensor of the weight's shape and dtype, contiguous and uninitialised, to be written.

    Raises:
        TypeError: `main_grad` is not fp32.
        ValueError: `main_grad` has another shape or device than the weight, or is not contiguous.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return weight.new_empty(weight.shape), False
    _check(weight, main_grad)
    return main_grad, not (begins and overwrites(weight))


def overwrites(weight: torch.Tensor) -> bool:
    return bool(getattr(weight, "overwrite_main_grad", False))


def result(weight: torch.Tensor, d: torch.Tensor) -> torch.Tensor | None:
    """The result of a backward for a weight, once `d`, the tensor of `target`, holds its gradient.

    If d is `main_grad` and the weight has the attribute `grad_added_to_main_grad`, sets it to True,
    and returns a dummy gradient of the weight's shape and dtype, so that hooks run: zeros if
    `weight.zero_out_wgrad` is true, else uninitialised. Without the attribute, returns None.
    """
    if d is not getattr(weight, "main_grad", None):
        return d
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def _check(weight: torch.Tensor, main_grad: torch.Tensor) -> None:
    op, name = "backward", "main_grad"
    if not isinstance(main_grad, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(main_grad).__name__}")
    check_tensor(op, name, main_grad, (torch.float32,))
    check_shape(op, name, main_grad, weight.shape, "the shape of its weight")
    check_same_device(op, weight=weight, main_grad=main_grad)
    if not main_grad.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous, got strides {list(main_grad.stride())} for shape "
            f"{list(main_grad.shape)}"
        )
