"""Memory of each GPU of a host that all ranks of a group can write, and its layout.

P ranks, M tokens of a rank at most, k choices each, H hidden.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...kernels.common.blocks import num_blocks, round_up

MAX_RANKS = 16
MAX_CHUNKS = 128  # in which results travel
GRANULE = 2 << 20  # bytes of which areas are multiples
_ALIGNMENT = 256
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
        return round_up(asked[0], GRANULE), round_up(asked[1], GRANULE)

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
