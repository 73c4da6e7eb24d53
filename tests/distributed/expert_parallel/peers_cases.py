"""The exchange's kernels, and ranks whose memory is on the CPU, for stand-ins that launch them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch

from moefp8.distributed.expert_parallel.give_back import COMBINE_AND_GIVE_BACK, give_back_kernel_of
from moefp8.distributed.expert_parallel.peer_memory import PeerMemory
from moefp8.distributed.expert_parallel.push import push_codes_kernel_of, push_rows_kernel_of
from moefp8.kernels import jit
from moefp8.kernels.jit import Kernel
from tests.distributed.expert_parallel.local_ranks import Alone
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import Emulator
from tests.routing.cases import DTYPES

PUSH = [
    *(push_codes_kernel_of(dtype, vectorized=x) for dtype, x in product(DTYPES, (True, False))),
    *(push_rows_kernel_of(unit) for unit in (16, 2)),
]
GIVE_BACK = [
    *(give_back_kernel_of(unit) for unit in (16, 2)),
    COMBINE_AND_GIVE_BACK,
]
GUARD, POISON = 256, 0xFF
WORDS = PeerMemory.num_bytes(0, 0)  # in which ranks tell


def placed(num_tokens: int, h: int, dtype: torch.dtype, pitch: int, offset: int) -> torch.Tensor:
    """Rows that are `pitch` elements apart, `offset` elements behind a multiple of 16 bytes."""
    whole = torch.zeros(offset + num_tokens * pitch + 16, dtype=dtype)
    begin = -whole.data_ptr() % 16 // dtype.itemsize + offset
    return whole[begin : begin + num_tokens * pitch].view(num_tokens, pitch)[:, :h]


def build(kernels: list[Kernel], factory: Any) -> dict[str, Callable[..., bool]]:
    """Kernels of several sources, as functions of the CPU; factory: of temporary folders."""
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    made: dict[str, Callable[..., bool]] = {}
    for source in dict.fromkeys(kernel.source for kernel in kernels):
        own = [kernel for kernel in kernels if kernel.source == source]
        folder, is_push = factory.mktemp(source.stem), source == PUSH[0].source
        made |= cuda_on_cpu.build(own, folder, with_numerics=is_push)
    return made


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


class HostPeers(Alone):
    """A rank whose GPU is a CPU, and which knows no other's memory."""

    def memory_for(self, device: torch.device, receiving: int, returning: int) -> PeerMemory:
        old = self._memory
        if old is None or old.receiving < receiving or old.returning < returning:
            self._memory = HostMemories(1, *PeerMemory.sizes(receiving, returning, old)).of[0]
        self.memory.was_captured |= jit.current_driver().is_capturing()
        return self.memory


class Recording(Emulator):
    """It runs nothing."""

    def compute(self, made, parameters):
        of = jit.struct_of(made.kernel.source)
        made.arguments = of.from_buffer_copy(of.from_address(parameters[-1]))
