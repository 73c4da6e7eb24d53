"""Try an experts module with random weights, and put it back as it was."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .source_code import values_in_reach
from .stacks import Stacks, stacks_of

_SMALL = 1 << 20  # stacks of up to so many elements get random weights
_ROW_STEP = 3  # how far apart rows of random weights begin that overlap
_OF_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def random_weights(
    module: nn.Module, random: torch.Generator, training: bool = False
) -> Iterator[tuple[Stacks, Callable[[], str]]]:
    """Give `module` random weights, on the CPU in FP32 if it is on meta, and set its mode.

    Large weights stay if they are of use, so that the trial takes no memory for others.

    Yield its stacks, and a function that names what a forward has changed, or "". In the end
    all is as before.
    """
    before = [
        (path, child, dict(vars(child)), dict(child._parameters), dict(child._buffers))
        for path, child in module.named_modules()
    ]
    keeps_own = _is_of_use(module)
    try:
        for _, child, _, parameters, buffers in before:
            child.training = training
            if not keeps_own:
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
        values = values_in_reach(module)

        def changed() -> str:
            for path, child, held, _, buffers in before:
                for name, value in attributes_of(child).items():
                    if name not in held or told(value) != told(held[name]):
                        return f"{path}.{name}".lstrip(".")
                for name, x in buffers.items():
                    if x is not None and not _is_same(x, child._buffers.get(name)):
                        return f"{path}.{name}".lstrip(".")
            after = values_in_reach(module)
            keys = (x for x in {**values, **after} if x not in after or x not in values)
            return next(keys, "") or next((x for x in after if after[x] != values[x]), "")

        yield stacks, changed
    finally:
        for _, child, held, parameters, buffers in before:
            vars(child).clear()
            vars(child).update(held)
            child._parameters.update(parameters)
            child._buffers.update(buffers)


def _is_same(x: torch.Tensor, y: torch.Tensor | None) -> bool:
    return x.is_meta or (y is not None and torch.equal(x, y))


def _random_like(parameter: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Random weights, whose rows overlap in memory if they are many."""
    shape = parameter.shape
    strides = [math.prod(shape[axis + 1 : -1]) * _ROW_STEP for axis in range(len(shape) - 1)]
    is_small = parameter.numel() <= _SMALL
    size = parameter.numel() if is_small else math.prod(shape[:-1]) * _ROW_STEP + shape[-1]
    values = torch.randn(size, generator=random, dtype=torch.float32, device="cpu")
    values /= math.sqrt(shape[-1])
    if not parameter.is_meta:
        values = values.to(parameter.device, parameter.dtype)
    return values.view(shape) if is_small else values.as_strided(shape, (*strides, 1))


def _is_of_use(module: nn.Module) -> bool:
    """Whether products with a module's own weights tell one forward, and expert, from another."""
    stacks = stacks_of(module)
    weights = [] if stacks is None else [*stacks.gate_up, stacks.down]
    if (
        any(x.is_meta or not x.numel() for x in weights)
        or sum(x.numel() for x in weights) <= _SMALL
    ):
        return False
    for weight in weights:
        norms = torch.stack([_norm(expert) for expert in weight])
        gains = norms / math.sqrt(weight.shape[1])
        is_usual = (gains > 0.03) & (gains < 30)
        if not is_usual.all() or len(gains.unique()) < len(gains):
            return False
    return True


def _norm(weight: torch.Tensor) -> torch.Tensor:
    """The norm of a matrix, without an FP32 copy of all of it."""
    rows = weight.split(max(1, _SMALL // weight.shape[1]))
    return torch.stack([torch.linalg.vector_norm(x.float()) for x in rows]).norm()


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
