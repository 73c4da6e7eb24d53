"""Models that accelerate places on several devices: its hooks move what their modules are given."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..layers.conversion.selection import can_swap


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
        now = dict(model.named_modules())
        for name, hook in hooks.items():
            if name in now:  # what experts of DBRX held is no module any more
                add_hook_to_module(now[name], hook)


def _hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name -> hook, of linears, experts and what lies in these."""
    for home, module in model.named_modules():
        if can_swap(module) and not any(x.is_meta for x in module.parameters()):
            for name, child in module.named_modules(prefix=home):
                hook = vars(child).get("_hf_hook")
                if hook is not None:
                    yield name, hook
