"""Models that accelerate places on several devices: its hooks move the inputs of modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..layers.conversion.selection import can_swap


@contextmanager
def unhooked(model: nn.Module) -> Iterator[None]:
    """Take hooks off linears, experts and modules in them, and give them to their successors.

    Hooks of offloaded modules stay, since they bring the weights; `convert` refuses such modules.
    """
    hooks = {
        name: child._hf_hook
        for home, module in model.named_modules()
        if can_swap(module) and not any(x.is_meta for x in module.parameters())
        for name, child in module.named_modules(prefix=home)
        if hasattr(child, "_hf_hook")
    }
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
