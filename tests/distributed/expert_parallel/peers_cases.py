"""Memories of ranks that lie on the CPU, for kernels of the exchange that a stand-in launches."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moefp8.distributed.expert_parallel.peer_memory import PeerMemory

GUARD, POISON = 256, 0xFF
WORDS = 256  # bytes in which ranks tell


class HostMemories:
    """The memory of each of P ranks: poison, but for the words in which they tell.

    `bytes_of` are all bytes of a rank's memory and those around it.
    """

    def __init__(self, num_ranks: int, receiving: int, returning: int) -> None:
        size = PeerMemory.num_bytes(receiving, returning)
        self.bytes_of = [
            torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8) for _ in range(num_ranks)
        ]
        own = [x[GUARD : GUARD + size] for x in self.bytes_of]
        for x in own:
            x[:WORDS] = 0
        addresses = [x.data_ptr() for x in own]
        with _pinning_nothing():
            self.of = [PeerMemory(x, addresses, receiving, returning) for x in own]


@contextmanager
def _pinning_nothing() -> Iterator[None]:
    """Only a GPU reads memory that is pinned, and only where there is one can it be."""
    real = torch.Tensor.pin_memory
    torch.Tensor.pin_memory = lambda x: x
    try:
        yield
    finally:
        torch.Tensor.pin_memory = real
