"""Modules that run another forward for a while."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = tuple[nn.Module, Callable[..., Any]]


@contextmanager
def replaced_forwards(forwards: Sequence[Forward]) -> Iterator[None]:
    """Within it, each module runs the forward beside it."""
    own = [vars(module).get("forward") for module, _ in forwards]  # accelerate sets one
    try:
        for module, forward in forwards:
            module.forward = forward
        yield
    finally:
        for (module, _), before in zip(forwards, own, strict=True):
            vars(module).pop("forward", None)
            if before is not None:
                module.forward = before
