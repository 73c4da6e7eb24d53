"""The exchange's kernels, and memories of ranks on the CPU for a stand-in that launches them."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch

from moefp8.distributed.expert_parallel.peer_memory import PeerMemory
from moefp8.distributed.expert_parallel.peers_launch import (
    combine_kernel_of,
    give_back_kernel_of,
    push_codes_kernel_of,
    push_rows_kernel_of,
)
from tests.routing.cases import DTYPES

PUSH = [
    *(push_codes_kernel_of(dtype, vectorized=x) for dtype, x in product(DTYPES, (True, False))),
    *(push_rows_kernel_of(unit) for unit in (16, 2)),
]
GIVE_BACK = [
    *(give_back_kernel_of(unit) for unit in (16, 2)),
    *(combine_kernel_of(dtype) for dtype in DTYPES),
]
GUARD, POISON = 256, 0xFF
WORDS = 256  # bytes in which ranks tell


def placed(num_tokens: int, h: int, dtype: torch.dtype, pitch: int, offset: int) -> torch.Tensor:
    """Rows that are `pitch` elements apart, `offset` elements behind a multiple of 16 bytes."""
    whole = torch.zeros(offset + num_tokens * pitch + 16, dtype=dtype)
    begin = -whole.data_ptr() % 16 // dtype.itemsize + offset
    return whole[begin : begin + num_tokens * pitch].view(num_tokens, pitch)[:, :h]


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
