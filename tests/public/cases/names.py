"""All public names: which there are, which are one thing, what they take by which name."""

import inspect
from typing import Any

from torch import nn

import moefp8
from tests.public.surface import names, options, parameters

from . import case


@case
def signatures(device: str) -> Any:
    """What each name is: its parameters and their defaults, or its value."""
    outcomes: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, x in names().items():
        same = first.setdefault(id(getattr(x, "__func__", x)), name)
        if same != name and callable(x):
            outcomes[name] = f"is {same}"
        elif callable(x):
            outcomes |= {f"{name}({y})": _shown(z) for y, z in parameters(x).items()}
            outcomes[name] = "class" if inspect.isclass(x) else "function"
        else:
            outcomes[name] = x
    return outcomes


def _shown(parameter: inspect.Parameter) -> str:
    default = "no default" if parameter.default is parameter.empty else repr(parameter.default)
    return f"{parameter.kind.description}, {default}"


@case
def commands(device: str) -> Any:
    return {x: sorted(y) for x, y in options().items()}


@case
def package(device: str) -> Any:
    public = {name: type(getattr(moefp8, name)).__name__ for name in moefp8.__all__}
    return public, moefp8.__version__, isinstance(moefp8.FP8Linear(8, 8, device=device), nn.Module)
