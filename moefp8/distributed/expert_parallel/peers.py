"""Exchange of tokens by kernels that write into the memory of the other GPUs of the host.

T tokens of this rank, M of any at most, k choices each, P ranks, H hidden. Token t of rank s has
slot s * M + t: slots that no token reaches have choices of no one, which no expert computes. So all
sizes are those that the hosts agreed on, no GPU is waited for, and one CUDA graph serves every
routing of as many tokens.
"""

from typing import TYPE_CHECKING, Any

import torch

from ...kernels.common.blocks import E4M3, MIN_AMAX, MIN_GRADIENT_AMAX, num_blocks
from ...routing.combine import sum_rows
from .agreement import Call
from .peer_memory import GivenBack, PeerMemory, Received
from .peers_launch import Place, Sizes, give_back, push

if TYPE_CHECKING:
    from .group import ExpertGroup


class PeerExchange:
    """One call's exchange, as `CollectiveExchange`, whose results lie in memory of the group.

    So what `dispatch` gives has to be read, and copied if it is kept, before the next `combine` or
    `release`, and one of these follows each dispatch.
    """

    def __init__(self, group: "ExpertGroup", calls: list[Call], ids: torch.Tensor) -> None:
        call, num_ranks = calls[0], group.size
        most = max(x.num_tokens for x in calls)
        self._group, self._choices = group, ids.contiguous()
        self._sizes = Sizes(most, call.top_k, call.num_experts, call.hidden_size)
        seconds = group.agreement.timeout.total_seconds()
        self._place = Place(group.rank, num_ranks, int(seconds * 1e9))
        self._signature = _signature_of(call, [x.num_tokens for x in calls])
        self._given_back = GivenBack.of(num_ranks * most, call.hidden_size, call.top_k)
        self._token_to_row = ids.new_empty((len(ids), num_ranks), dtype=torch.int32)
        self._knows_rows = False
        self.ids = ids

    def dispatch(self, x: torch.Tensor, scores: torch.Tensor | None = None) -> list[torch.Tensor]:
        return self._push(x, scores, None)

    def dispatch_codes(
        self, x: torch.Tensor, scores: torch.Tensor | None = None, *, are_gradients: bool = False
    ) -> list[torch.Tensor]:
        return self._push(x, scores, MIN_GRADIENT_AMAX if are_gradients else MIN_AMAX)

    def _push(
        self, x: torch.Tensor, scores: torch.Tensor | None, min_amax: float | None
    ) -> list[torch.Tensor]:
        sizes, is_codes = self._sizes, min_amax is not None
        num_slots, h = self._place.num_ranks * sizes.max_tokens, sizes.hidden_size
        if x.stride(1) != 1 and h > 1:
            x = x.contiguous()
        if num_slots == 0:  # nobody has a token
            shapes = [h, *([num_blocks(h)] if is_codes else [])]
            dtypes = E4M3 if is_codes else x.dtype, torch.float32
            found = [x.new_empty(0, n, dtype=z) for n, z in zip(shapes, dtypes, strict=False)]
            return found if scores is None else [*found, scores]
        dtype = E4M3 if is_codes else x.dtype
        received = Received.of(num_slots, h * dtype.itemsize, h, sizes.top_k)
        memory = self._group.memory_for(x.device, received.size, self._given_back.size)
        to_row = None if self._knows_rows else self._token_to_row
        scores = None if scores is None else scores.contiguous()
        given = x, self._choices, scores, to_row, min_amax
        push(memory, self._place, sizes, received, self._signature, *given)
        at, self._knows_rows = memory.receiving_at, True
        rows = memory.view(at + received.rows, (num_slots, h), dtype, received.row_pitch)
        found = [rows]
        if is_codes:
            shape = num_slots, num_blocks(h)
            place, pitch = at + received.scales, received.scale_pitch
            found.append(memory.view(place, shape, torch.float32, pitch))
        if scores is not None:
            shape = num_slots, sizes.top_k
            self.ids = memory.view(at + received.ids, shape, torch.int32)
            found.append(memory.view(at + received.scores, shape, torch.float32))
        return found

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return self._take_back(rows, None)[0]

    def combine_gradients(
        self, rows: torch.Tensor, of_scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, of_choices = self._take_back(rows, of_scores)
        assert of_choices is not None
        return y, of_choices

    def release(self) -> None:
        if self._sizes.max_tokens > 0:
            self._give_back(None, None)

    def keep_choices(self) -> None:
        """Own the choices, which the group's memory holds until the next dispatch."""
        self.ids = self.ids.clone()

    def _give_back(self, rows: torch.Tensor | None, of_scores: torch.Tensor | None) -> PeerMemory:
        memory: PeerMemory = self._group.memory
        given = rows, self.ids, of_scores
        give_back(memory, self._place, self._sizes, self._given_back, self._signature, *given)
        return memory

    def _take_back(
        self, rows: torch.Tensor, of_scores: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._sizes.max_tokens == 0:
            return rows, of_scores
        given = rows.contiguous(), None if of_scores is None else of_scores.contiguous()
        memory = self._give_back(*given)
        sizes, num_ranks = self._sizes, self._place.num_ranks
        num_slots, at = num_ranks * sizes.max_tokens, memory.returning_at
        back = memory.view(
            at + self._given_back.rows, (num_slots, sizes.hidden_size), torch.bfloat16
        )
        ones = self._group.one(rows.device).expand(len(self._token_to_row), num_ranks)
        y = sum_rows(back, self._token_to_row, ones)
        if of_scores is None:
            return y, None
        place = at + self._given_back.of_scores
        every = memory.view(place, (num_slots, sizes.top_k), torch.float32)
        each = every.view(num_ranks, sizes.max_tokens, sizes.top_k)
        return y, each[:, : len(y)].sum(0)


def _signature_of(call: Call, num_tokens: list[int]) -> int:
    """What all ranks must be at when they meet: the layer, the phase, how many tokens each has."""
    mixed: Any = 0
    for x in (call.phase, call.layer, call.top_k, call.hidden_size, *num_tokens):
        mixed = (mixed * 1_000_003 + x + 1) % (2**32 - 5)
    return int(mixed)
