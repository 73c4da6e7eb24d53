"""Where the gradient of a weight goes: into a tensor of its own, or into `main_grad`.

Megatron-LM's convention: gradients of many micro-batches are summed in FP32, in a tensor that the
parameter has as its attribute `main_grad`, and the GEMM adds to it right away.
"""

import torch
from torch.autograd.graph import get_gradient_edge

from ...kernels.common.checks import check_same_device, check_shape, check_tensor


def master(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight itself, for a backward, if it is a leaf that asks for a gradient.

    That may have the attributes which tell where the gradient goes. What a backward gets of saved
    tensors has the values, but no attributes where hooks stand between, as those of
    `torch.utils.checkpoint`. Other tensors are not kept alive for that.
    """
    return weight if weight.is_leaf and weight.requires_grad else None


def is_asked_for(weight: torch.Tensor) -> bool:
    """Whether the backward that runs is to give the gradient of a weight that needs one.

    A function of autograd knows at its forward alone which inputs need gradients. That one in vain
    costs time; but `main_grad` must not change where somebody asks for gradients of inputs only.
    """
    if getattr(weight, "main_grad", None) is None or torch.compiler.is_compiling():
        return True
    try:
        node = get_gradient_edge(weight).node
        return bool(torch._C._will_engine_execute_node(node))
    except (RuntimeError, ValueError):  # it is what `torch.autograd.grad` gives back
        return True


def target(weight: torch.Tensor, *, begins: bool = True) -> tuple[torch.Tensor, bool]:
    """The tensor that takes the gradient of a weight, and whether it is added to what is there.

    That is `weight.main_grad`, if the weight has one: then the gradient is added, or written if
    `weight.overwrite_main_grad` is true and it `begins` those of one call. Else it is a new tensor
    of the weight's shape and dtype, contiguous and uninitialised, to be written.

    Raises:
        TypeError: `main_grad` is not fp32.
        ValueError: it has another shape or device than the weight, or is not contiguous.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return weight.new_empty(weight.shape), False
    _check(weight, main_grad)
    return main_grad, not (begins and overwrites(weight))


def overwrites(weight: torch.Tensor) -> bool:
    return bool(getattr(weight, "overwrite_main_grad", False))


def result(weight: torch.Tensor, d: torch.Tensor) -> torch.Tensor | None:
    """What a backward returns for a weight, once `d` of `target` holds its gradient.

    If that is `main_grad` and the weight has the attribute `grad_added_to_main_grad`, that becomes
    True and a gradient comes that means nothing, of the weight's shape and dtype, so that hooks
    run: zeros if `weight.zero_out_wgrad` is true, else uninitialised. Without the attribute: None.
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
