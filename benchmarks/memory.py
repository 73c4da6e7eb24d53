"""How much memory calls take on a GPU."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


def peak_bytes(call: Callable[[], object]) -> int:
    """How much a call has allocated at a time, beside what there was."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def saved_bytes(forward: Callable[[], object], weights: Iterable[torch.Tensor]) -> int:
    """What autograd keeps from a forward for its backward, each storage once; `weights` not."""
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x.detach()  # what is saved of a result would keep the graph of that result

    def unpack(x: Any) -> Any:
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = forward()  # as long as it lives, no storage is reused by another
    del y
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    return sum(kept.values())
