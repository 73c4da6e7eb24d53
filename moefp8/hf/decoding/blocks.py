"""Blocks of a model run through `torch.compile`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

_NO_LIMIT = 1 << 16


class CompiledBlocks:
    """Within it, each block of the model runs compiled. It may be entered again.

    Blocks are what transformers names in `_no_split_modules`. One by one they take less time than
    the whole model, since equal ones share their code; Dynamo counts each as a recompilation.
    """

    def __init__(self, model: Any, backend: Any) -> None:
        names = model._no_split_modules or ()
        blocks = [module for module in model.modules() if type(module).__name__ in names]
        options: Any = {"fullgraph": True, "dynamic": False, "backend": backend}
        self.forwards = [(block, torch.compile(block.forward, **options)) for block in blocks]
        self._entered = ExitStack()

    def __enter__(self) -> None:
        limits = {"recompile_limit": _NO_LIMIT, "accumulated_recompile_limit": _NO_LIMIT}
        with ExitStack() as stack:
            stack.enter_context(torch._dynamo.config.patch(limits))
            for block, forward in self.forwards:
                stack.enter_context(replaced_forward(block, forward))
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.close()


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within it, `module` runs `forward`."""
    own = vars(module).get("forward")  # accelerate sets one
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
