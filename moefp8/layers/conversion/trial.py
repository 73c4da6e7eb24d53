"""Try an experts module with random weights, and put it back as it was."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .stacks import Stacks, stacks_of

_SMALL = 1 << 24  # up to so many elements, each expert gets random weights of its own
_SAMPLE = 7  # how many experts tell whether the module's own weights are of use
_OF_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def random_weights(
    module: nn.Module, random: torch.Generator
) -> Iterator[tuple[Stacks, Callable[[], str]]]:
    """Put `module` in eval mode with random weights, on the CPU in FP32 if it is on meta.

    Yield its stacks, and a function that names what a forward has changed, or "". In the end
    all is as before.
    """
    before = [
        (path, child, dict(vars(child)), dict(child._parameters), dict(child._buffers))
        for path, child in module.named_modules()
    ]
    try:
        for _, child, _, parameters, buffers in before:
            child.training = False
            child._parameters.update(
                (name, None if x is None else _random_like(x, random))
                for name, x in parameters.items()
            )
            child._buffers.update(
                (name, None if x is None else x.clone()) for name, x in buffers.items()
            )
        stacks = stacks_of(module)
        if stacks is None:
            raise TypeError(f"{type(module).__name__} holds no stacks of experts")

        def changed() -> str:
            for path, child, held, _, buffers in before:
                for name, value in attributes_of(child).items():
                    if name not in held or told(value) != told(held[name]):
                        return f"{path}.{name}".lstrip(".")
                for name, x in buffers.items():
                    if x is not None and not _is_same(x, child._buffers.get(name)):
                        return f"{path}.{name}".lstrip(".")
            return ""

        yield stacks, changed
    finally:
        for _, child, held, parameters, buffers in before:
            vars(child).clear()
            vars(child).update(held)
            child._parameters.update(parameters)
            child._buffers.update(buffers)


def _is_same(x: torch.Tensor, y: torch.Tensor | None) -> bool:
    return x.is_meta or (y is not None and torch.equal(x, y))


def is_small(weight: torch.Tensor) -> bool:
    return weight.numel() <= _SMALL


def _random_like(parameter: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Random weights; if large, the parameter itself if it is of use, else one entry for all."""
    shape = list(parameter.shape)
    is_large = not is_small(parameter)
    if is_large and not parameter.is_meta and _is_of_use(parameter[:_SAMPLE]):
        return parameter
    drawn = [1, *shape[1:]] if is_large else shape
    values = torch.randn(drawn, generator=random, dtype=torch.float32, device="cpu")
    values /= math.sqrt(shape[-1])
    if not parameter.is_meta:
        values = values.to(parameter.device, parameter.dtype)
    return values.expand(shape)


def _is_of_use(weights: torch.Tensor) -> bool:
    """Whether products with these weights tell one forward from another."""
    return bool(weights.isfinite().all()) and float(weights.float().std()) > 1e-3


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes that not every module has."""
    return {name: x for name, x in vars(module).items() if name not in _OF_MODULE}


def told(value: Any) -> str:
    """A text that is equal for equal plain values, and for any other only for the very same."""
    if isinstance(value, tuple):
        return f"({', '.join(map(told, value))})"
    if isinstance(value, int | float | str | bool | torch.dtype | None):
        return f"{type(value).__name__} {value!r}"
    return f"at {id(value)}"
