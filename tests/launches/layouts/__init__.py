"""The calls that are recorded: a function for each op draws one, and says how many there are."""

from collections.abc import Iterator

from tests.launches.layouts import (
    experts,
    gemms,
    linears,
    listing,
    quantization,
    ranks,
    routing,
)
from tests.launches.layouts.draw import OPS, Layout

__all__ = [
    "OPS",
    "Layout",
    "all_layouts",
    "experts",
    "gemms",
    "linears",
    "listing",
    "quantization",
    "ranks",
    "routing",
]


def all_layouts(only: str = "", *, every: int = 1) -> Iterator[Layout]:
    """The layouts of all ops, or of those whose names begin with `only`; of each, every n-th."""
    for op, drawing in OPS.items():
        if op.startswith(only):
            yield from (Layout(op, number) for number in range(0, drawing.count, every))
