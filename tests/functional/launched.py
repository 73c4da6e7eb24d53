"""Routed experts as their launcher runs them on the CPU, where `Emulator` stands for libcuda."""

import torch

from moefp8.functional import experts as op_room
from tests.functional.cases import run

_GUARD = 1 << 12


class Workspaces:
    """Stands for torch and its allocator: of each size the same memory, never written before."""

    def __init__(self) -> None:
        self.of_size, self.sizes = {}, []

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def empty(self, count, **options) -> torch.Tensor:
        if options["dtype"] != torch.uint8:
            return torch.empty(count, **options)
        self.sizes.append(count)
        memory = self.of_size.get(count)
        if memory is None:
            memory = torch.empty(count + 2 * _GUARD + 256, dtype=torch.uint8)
            self.of_size[count] = memory
        memory.fill_(0xFF)
        return memory[self.first_of(memory) :][:count]

    @staticmethod
    def first_of(memory: torch.Tensor) -> int:
        """Where the workspace begins, which lies as CUDA's allocator would place it."""
        return _GUARD - (memory.data_ptr() + _GUARD) % 256 + 256

    def check(self) -> None:
        """Nothing is written around them."""
        for count, memory in self.of_size.items():
            first = self.first_of(memory)
            assert bool((memory[:first] == 0xFF).all())
            assert bool((memory[first + count :] == 0xFF).all())


def launch(x, ids, top_k_weights, weights, limit=None, masked=False) -> torch.Tensor:
    """As the op does on a Hopper GPU, into memory of which nothing around is written."""
    return op_room._launch(x, ids, top_k_weights, *weights, limit, masked)


def body(x, ids, top_k_weights, weights, limit=None, masked=False) -> torch.Tensor:
    """Ids out of range count as E."""
    e = weights.down_proj.shape[0]
    return run(x, ids.masked_fill((ids < 0) | (ids > e), e), top_k_weights, weights, limit, masked)


def names_of(launched) -> list[str]:
    return [made.kernel.name.split("_")[0] for made in launched]
