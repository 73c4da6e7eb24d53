"""The gradients of a model, to be compared with those of its reference."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def gradients(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> dict[str, torch.Tensor]:
    """The gradients that `model(*args, **kwargs)` sends to its arguments and its parameters.

    Give a model and its `reference_model`, which is differentiable too, the same arguments, and
    compare each tensor. `.grad` of nothing is changed.

    Args:
        args, kwargs: of the model, which gets copies of tensors. Float tensors get gradients.
        loss: a function of what the model returns; None takes `(output * noise).sum()` of a tensor,
            where `noise` is normal numbers of `seed`: an ordinary sum would forgive rows that were
            swapped.

    Returns:
        The gradients by name: "0", "1", ... for positional arguments, keywords, and the names of
        the parameters that ask for one. It is zero where nothing depends on one.

    Raises TypeError if the model returns no tensor, and no loss says what to make of it.
    """

    def leaf(x: Any) -> Any:
        trains = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.detach().clone().requires_grad_() if trains else x

    def writable(x: Any) -> Any:
        return x.clone() if isinstance(x, torch.Tensor) else x

    given = [leaf(x) for x in args]
    named = {name: leaf(x) for name, x in kwargs.items()}
    output = model(*map(writable, given), **{name: writable(x) for name, x in named.items()})
    if loss is not None:
        total = loss(output)
    elif not isinstance(output, torch.Tensor):
        raise TypeError(
            f"gradients: the model must return a tensor, got {type(output).__name__}; say what to "
            "differentiate: loss=lambda output: ..."
        )
    else:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
        total = (output.float() * noise.float()).sum()
    leaves = {**{str(i): x for i, x in enumerate(given)}, **named, **dict(model.named_parameters())}
    trained = {name: x for name, x in leaves.items() if getattr(x, "requires_grad", False)}
    if not total.requires_grad:
        return {name: torch.zeros_like(x) for name, x in trained.items()}
    found = torch.autograd.grad(total, [*trained.values()], materialize_grads=True)
    return dict(zip(trained, found, strict=True))
