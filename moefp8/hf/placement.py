"""Models that accelerate places on several devices: its hooks move what their modules are given."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..layers.selection import can_swap


@contextmanager
def unhooked(model: nn.Module) -> Iterator[None]:
    """Linears and experts are without the hooks, which those that take their places get.

    Of those that are offloaded the hooks bring the weights, so theirs stay: `convert` refuses them.
    """
    hooks = dict(_hooks(model))
    if hooks:
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        for name in hooks:
            remove_hook_from_module(model.get_submodule(name))
    try:
        yield
    finally:
        for name, hook in hooks.items():
            add_hook_to_module(model.get_submodule(name), hook)


def _hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        hook = module.__dict__.get("_hf_hook")
        is_here = not any(x.is_meta for x in module.parameters())
        if hook is not None and is_here and can_swap(module):
            yield name, hook
