"""The launch contract: how every kernel of ours is prepared, kept and launched.

1. A key says all that a launch depends on but addresses: the op, shapes, strides, dtypes, device,
   options, and which addresses are aligned. It holds no address, so one prepared launch serves all
   layers of one layout.
2. What is prepared for a key is kept by the thread that prepared it, and no other thread sees it:
   a launch writes the addresses of its call into its arguments.
3. A call is then one look-up, the addresses that differ from those of the call before, and one call
   of the driver for each kernel, on the GPU's current stream.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..jit import Launch, current_driver

P = TypeVar("P")


def prepared(key: Hashable, prepare: Callable[[], P]) -> P:
    """What this thread has kept for a key, else what `prepare` returns."""
    driver = current_driver()
    found = driver.prepared().get(key)
    return driver.keep(key, prepare()) if found is None else found


def layout_of(x: torch.Tensor) -> tuple[Any, ...]:
    """All that a launch may depend on of a tensor but its address."""
    return x.shape, x.stride(), x.dtype, x.get_device()


class Launches(NamedTuple):
    """Kernels in a row, and the bytes of memory between them, which a call allocates."""

    launches: Sequence[Launch]
    workspace_bytes: int
