"""Memory of each GPU of a host that all ranks of a group can write, and its layout.

P ranks, M tokens of a rank at most, k choices each, H hidden. It uses
`torch.distributed._symmetric_memory` (its CUDA backend: peers' memory as plain addresses), which is
private to PyTorch; only this file imports it.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...kernels.common.blocks import num_blocks, round_up

MAX_RANKS = 16
MAX_CHUNKS = 128  # in which results travel
_ALIGNMENT, _GRANULE = 256, 2 << 20
_MAY_SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # PyTorch's own, for tests
_NUM_WORDS = 1 + MAX_CHUNKS  # of each rank: one for tokens, one for each chunk of results
_AREAS = round_up(_NUM_WORDS * MAX_RANKS * 8, _ALIGNMENT)  # where they begin, after the words


class Received(NamedTuple):
    """Offsets, in bytes, of what a rank receives: rows of slots, their scales, choices, scores."""

    rows: int
    row_pitch: int
    scales: int
    scale_pitch: int
    ids: int
    scores: int
    size: int

    @classmethod
    @lru_cache(4096)
    def of(cls, num_slots: int, row_bytes: int, hidden_size: int, top_k: int) -> "Received":
        row_pitch = round_up(row_bytes, 16)
        scale_pitch = round_up(num_blocks(hidden_size) * 4, 16)
        lengths = row_pitch, scale_pitch, top_k * 4, top_k * 4
        places = _places([num_slots * x for x in lengths])
        return cls(places[0], row_pitch, places[1], scale_pitch, *places[2:])


class GivenBack(NamedTuple):
    """Offsets, in bytes, of what a rank gets back: rows [P M, H] bf16, grad_scores [P M, k] fp32.

    And of what it keeps to sum its own tokens: reached, uint32 [M], a token's bit of each rank that
    returns something for it; scores, fp32 [M, k].
    """

    rows: int
    grad_scores: int
    reached: int
    scores: int
    size: int

    @classmethod
    @lru_cache(4096)
    def of(cls, num_ranks: int, max_tokens: int, hidden_size: int, top_k: int) -> "GivenBack":
        num_slots = num_ranks * max_tokens
        slot_bytes = num_slots * hidden_size * 2, num_slots * top_k * 4
        return cls(*_places([*slot_bytes, max_tokens * 4, max_tokens * top_k * 4]))


def _places(lengths: Sequence[int]) -> list[int]:
    """Where each part begins in its area, and the area's size."""
    places = [0]
    for length in lengths:
        places.append(round_up(places[-1] + length, _ALIGNMENT))
    return places


class PeerMemory:
    """The memory of all ranks: the words by which they signal, then two areas.

    The two never share a byte, since pushes into one may overtake reads of the other.

    Attributes:
        receiving, returning: how many bytes of each area there are.
        state: `State` of ranks.cuh: two counts, the turn, the address of `error`, `addresses`,
            and counters of 4 bytes: one for each word, and five of items and CTAs.
        error: int32 [4] in the host's memory, which a kernel writes before it ends all work: 1 if a
            rank did not come, 2 if it is at another turn, 3 if two of its turns overlap; that
            rank; the signal that it sent.
    """

    def __init__(
        self, tensor: torch.Tensor, addresses: Sequence[int], receiving: int, returning: int
    ) -> None:
        self.tensor, self.receiving, self.returning = tensor, receiving, returning
        self._all_as: dict[torch.dtype, torch.Tensor] = {}
        self.error = torch.zeros(4, dtype=torch.int32).pin_memory()
        others = [0] * (MAX_RANKS - len(addresses))
        counters = [0] * ((_NUM_WORDS + 5 + 1) // 2)
        words = [0, 0, 0, self.error.data_ptr(), *addresses, *others, *counters]
        self.state = torch.tensor(words, dtype=torch.int64).to(tensor.device)
        self.turn = self.state[2]

    @staticmethod
    def sizes(receiving: int, returning: int, old: "PeerMemory | None") -> tuple[int, int]:
        """The areas' sizes to allocate: at least so many bytes, and no smaller than before."""
        least = (0, 0) if old is None else (old.receiving, old.returning)
        asked = max(receiving, least[0]), max(returning, least[1])
        return round_up(asked[0], _GRANULE), round_up(asked[1], _GRANULE)

    @staticmethod
    def num_bytes(receiving: int, returning: int) -> int:
        return _AREAS + receiving + returning

    handle: Any = None
    was_captured = False  # whether a CUDA graph may use it

    @property
    def receiving_at(self) -> int:
        return _AREAS

    @property
    def returning_at(self) -> int:
        return _AREAS + self.receiving

    def view(
        self, at: int, shape: Sequence[int], dtype: torch.dtype, pitch: int = 0
    ) -> torch.Tensor:
        """A tensor in this rank's memory; pitch: bytes from row to row; 0: contiguous."""
        rows, columns = shape
        everything = self._all_as.get(dtype)
        if everything is None:
            everything = self._all_as[dtype] = self.tensor.view(dtype)
        strides = pitch // dtype.itemsize or columns, 1
        begin = everything.storage_offset() + at // dtype.itemsize
        return everything.as_strided((rows, columns), strides, begin)


class Peers:
    """The GPUs of a process group, one of each rank.

    group_name: its name, by which PyTorch finds it. agreement_group: the same ranks, over gloo. The
    methods are called by all ranks together.
    """

    def __init__(self, group_name: Any, agreement_group: Any) -> None:
        self.group_name, self.agreement_group = group_name, agreement_group

    def make(self, device: torch.device, receiving: int, returning: int) -> PeerMemory:
        """Memory with areas of so many bytes on each rank."""
        import torch.distributed._symmetric_memory as symmetric

        num_bytes = PeerMemory.num_bytes(receiving, returning)
        tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        handle: Any = symmetric.rendezvous(tensor, self.group_name)
        tensor.zero_()
        made = PeerMemory(tensor, handle.buffer_ptrs, receiving, returning)
        made.handle = handle  # it owns the mapping
        torch.cuda.synchronize(device)
        dist.barrier(self.agreement_group)  # no rank signals before all have zeros
        return made

    def why_not(self, device: torch.device) -> str | None:
        """Why the GPUs cannot write each other's memory, the same on all; None: they can.

        It allocates some memory to see.
        """
        everyone: list[Any] = [None] * dist.get_world_size(self.agreement_group)
        dist.all_gather_object(everyone, _who(device), group=self.agreement_group)
        hosts, gpus, kinds, may_share = ({x[i] for x in everyone} for i in range(4))
        if len(everyone) > MAX_RANKS:
            return f"there are {len(everyone)} ranks, and at most {MAX_RANKS} can"
        if len(hosts) > 1:
            return "they are GPUs of several hosts"
        if len(gpus) < len(everyone) and may_share != {"1"}:
            return f"several ranks have one GPU (for tests, {_MAY_SHARE}=1 on all lets them)"
        if kinds != {(9, 0)}:
            return f"kernels of ours need Hopper GPUs, and their compute capabilities are {kinds}"
        problem = None
        try:
            self.make(device, _GRANULE, _GRANULE)
        except Exception as error:  # of the driver, of rights, of what PyTorch was built with
            problem = f"{type(error).__name__}: {error}"
        dist.all_gather_object(everyone, problem, group=self.agreement_group)
        return next((x for x in everyone if x is not None), None)


def _who(device: torch.device) -> tuple[str, str, tuple[int, int], str | None]:
    """(host, GPU, compute capability, whether it may have several ranks)"""
    host = "one"
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read().strip()
    except OSError:
        pass
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", device.index))
    return host, uuid, torch.cuda.get_device_capability(device), os.environ.get(_MAY_SHARE)
