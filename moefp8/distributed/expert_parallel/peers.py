"""Exchange of tokens by kernels that write into the memory of the other GPUs of the host.

T tokens of this rank, M of any at most, k choices each, P ranks, H hidden. Token t of rank s has
slot s * M + t. A slot that no token reaches has choices of no expert, and is not computed. So the
hosts agree on all sizes without waiting for a GPU, and one CUDA graph serves every routing of as
many tokens.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ...functional.experts import ExpertsInputs, launch_combining, runs_as_a_whole
from ...functional.experts_backward import (
    ExpertsBackwardInputs,
    gradients_run_as_a_whole,
    launch_combining_gradients,
)
from ...kernels.common.blocks import E4M3, MIN_AMAX, MIN_GRADIENT_AMAX, num_blocks
from ...kernels.jit import current_driver
from .agreement import Call
from .collective import run_experts, run_experts_backward
from .give_back import CombineAndGiveBack, give_back
from .peer_memory import GivenBack, Received
from .push import push
from .ranks import Member, Sizes

if TYPE_CHECKING:
    from .group import ExpertGroup

OVERLAPS = (  # an assertion of PyTorch's has room for 254 characters
    "runs two exchanges of a group at once, as when CUDA graphs are replayed on two streams or "
    "beside an eager call; run them on one stream, or let each wait for the other (wait_stream)"
)


class PeerExchange:
    """One call's exchange, as `CollectiveExchange`; its results are stored in the group's memory.

    Read the results of `dispatch`, or copy them, before the next `combine` or the next dispatch of
    the group, which overwrite them.

    A dispatch begins a turn, and a `combine` ends it. If autograd leaves out the `combine`, the
    group's next dispatch ends the turn on the GPU. If autograd runs another exchange between the
    two, `combine` begins a turn of its own.
    """

    def __init__(self, group: "ExpertGroup", calls: list[Call], ids: torch.Tensor) -> None:
        call, num_ranks = calls[0], group.size
        most = max(x.num_tokens for x in calls)
        self._group, self._choices = group, ids.contiguous()
        self._sizes = Sizes(most, call.top_k, call.num_experts, call.hidden_size)
        seconds = group.agreement.timeout.total_seconds()
        self._member = Member(group.rank, num_ranks, int(seconds * 1e9))
        alike = call.layer, call.top_k, call.hidden_size, call.dtype
        self._identity = *alike, *[x.num_tokens for x in calls]
        self._given_back = GivenBack.of(num_ranks, most, call.hidden_size, call.top_k)
        self.ids, self._turn, self._number, self._is_backward = ids, 0, 0, False

    def dispatch(self, x: torch.Tensor, scores: torch.Tensor | None = None) -> list[torch.Tensor]:
        """A forward sends tokens with their scores; a backward sends gradients without scores."""
        self._is_backward = scores is None
        return self._push(x, scores, None)

    def dispatch_codes(
        self, x: torch.Tensor, scores: torch.Tensor | None = None, *, are_gradients: bool = False
    ) -> list[torch.Tensor]:
        self._is_backward = are_gradients
        return self._push(x, scores, MIN_GRADIENT_AMAX if are_gradients else MIN_AMAX)

    def _push(
        self, x: torch.Tensor, scores: torch.Tensor | None, min_amax: float | None
    ) -> list[torch.Tensor]:
        sizes, is_codes = self._sizes, min_amax is not None
        num_slots, h = self._member.num_ranks * sizes.max_tokens, sizes.hidden_size
        if x.stride(1) != 1 and h > 1:
            x = x.contiguous()
        if num_slots == 0:  # no rank has a token
            shapes = [h, *([num_blocks(h)] if is_codes else [])]
            dtypes = E4M3 if is_codes else x.dtype, torch.float32
            empty = [x.new_empty(0, n, dtype=z) for n, z in zip(shapes, dtypes, strict=False)]
            return empty if scores is None else [*empty, scores]
        dtype = E4M3 if is_codes else x.dtype
        received = Received.of(num_slots, h * dtype.itemsize, h, sizes.top_k)
        memory = self._group.memory_for(x.device, received.size, self._given_back.size)
        scores = None if scores is None else scores.contiguous()
        self._number = self._group.number_turn()
        # Hosts order eager turns; only turns in graphs need numbers to be distinct.
        number = self._number % 2**31 if current_driver().is_capturing() else 0
        self._turn = (number << 32) + _signature_of(self._is_backward, *self._identity)
        args = x, self._choices, scores, min_amax
        push(memory, self._member, sizes, received, self._turn, *args)
        at = memory.receiving_at
        rows = memory.view(at + received.rows, (num_slots, h), dtype, received.row_pitch)
        tensors = [rows]
        if is_codes:
            shape = num_slots, num_blocks(h)
            place, pitch = at + received.scales, received.scale_pitch
            tensors.append(memory.view(place, shape, torch.float32, pitch))
        if scores is not None:
            shape = num_slots, sizes.top_k
            self.ids = memory.view(at + received.ids, shape, torch.int32)
            tensors.append(memory.view(at + received.scores, shape, torch.float32))
        return tensors

    def experts(
        self, inputs: ExpertsInputs, *, saves: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last kernel of the experts returns sums to the ranks, if it can take all slots."""
        h = self._sizes.hidden_size
        if h % 8 or not runs_as_a_whole(inputs, saves=saves):
            return run_experts(self, inputs, saves=saves)
        y = self._empty_sum()
        return y, launch_combining(inputs, self._combine(), self._turn, y, saves=saves)

    def experts_backward(self, inputs: ExpertsBackwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The last kernel returns gradients to the ranks, as the one of `experts` returns sums."""
        h, (num_tokens, top_k) = self._sizes.hidden_size, self._choices.shape
        if h % 8 or not gradients_run_as_a_whole(inputs):
            return run_experts_backward(self, inputs)
        size = num_tokens * (2 * h + 4 * top_k)
        both = self._choices.new_empty(size, dtype=torch.uint8)
        launch_combining_gradients(inputs, self._combine(), self._turn, both)
        dx, grad_scores = both[: num_tokens * 2 * h], both[num_tokens * 2 * h :]
        grad_scores = grad_scores.view(torch.float32).view(num_tokens, top_k)
        return dx.view(torch.bfloat16).view(num_tokens, h), grad_scores

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return self._take_back(rows, None)[0]

    def combine_gradients(
        self, rows: torch.Tensor, grad_scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, grad_choices = self._take_back(rows, grad_scores)
        assert grad_choices is not None
        return y, grad_choices

    def check_turn(self) -> None:
        """End all work of the GPU if another turn has begun, as copies may hold that turn's data.

        Only replays of graphs can overlap. `combine` checks this itself.
        """
        if self._sizes.max_tokens > 0 and self._group.memory.was_captured:
            is_right = self._group.memory.turn == self._turn
            rank = self._group.agreement.ranks[self._member.rank]  # as `watch` names it
            torch._assert_async(is_right, f"ExpertParallel: rank {rank} {OVERLAPS}")

    def keep_choices(self) -> None:
        """Copy the choices, which the group's memory holds only until the next dispatch."""
        self.ids = self.ids.clone()

    def _take_back(
        self, rows: torch.Tensor, grad_scores: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sums [T, H] and [T, k] of all ranks' results."""
        if self._sizes.max_tokens == 0:
            return rows, grad_scores
        y, summed_scores = self._empty_sum(), None
        if grad_scores is not None:
            grad_scores = grad_scores.contiguous()
            summed_scores = grad_scores.new_empty(self._choices.shape)
        if self._number != self._group.last_turn:  # another turn overwrote which ranks tokens reach
            self._push(y[:, :0], None, None)
        args = rows.contiguous(), self.ids, grad_scores, y, summed_scores
        give_back(self._group.memory, self._member, self._sizes, self._turn, *args)
        return y, summed_scores

    def _combine(self) -> CombineAndGiveBack:
        memory, num_tokens = self._group.memory, len(self._choices)
        places = memory.returning_at, memory.state.data_ptr()
        return CombineAndGiveBack(self._member, self._sizes, num_tokens, *places)

    def _empty_sum(self) -> torch.Tensor:
        shape = len(self._choices), self._sizes.hidden_size
        return self._choices.new_empty(shape, dtype=torch.bfloat16)


@lru_cache(4096)
def _signature_of(*identity: int) -> int:
    """Hash what ranks must agree on: forward or backward, layer, k, H, dtype, each rank's T."""
    mixed = 0
    for x in identity:
        mixed = (mixed * 1_000_003 + x + 1) % (2**32 - 5)
    return mixed
