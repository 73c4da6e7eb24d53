"""Models that accelerate places on several devices: its hooks move the inputs of modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..layers.conversion.selection import can_swap


@contextmanager
def unhooked(model: nn.Module) -> Iterator[None]:
    """Take hooks off linears and experts, and give them to whatever has taken their places.

    Hooks of offloaded modules stay, since they bring the weights; `convert` refuses such modules.
    """
    hooks = dict(_hooks(model))
    if hooks:
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        for name in hooks:
            remove_hook_from_module(model.get_submodule(name))
    try:
        yield
    finally:
        now = dict(model.named_modules())
        for name, hook in hooks.items():
            if name in now:  # a module within experts of DBRX is gone
                add_hook_to_module(now[name], hook)


def _hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, hook) of linears, experts and the modules within them."""
    for home, module in model.named_modules():
        if can_swap(module) and not any(x.is_meta for x in module.parameters()):
            for name, child in module.named_modules(prefix=home):
                hook = vars(child).get("_hf_hook")
                if hook is not None:
                    yield name, hook
