"""Tokens travel by kernels that write into the memory of the other GPUs of the host.

T tokens of this rank, M of any at most, k choices each, P ranks, H hidden. Token t of rank s has
slot s * M + t. A slot that no token reaches has choices of no expert, and is not computed. So the
hosts agree on all sizes without waiting for a GPU, and one CUDA graph serves every routing of as
many tokens.
"""

from collections.abc import Iterator, Sequence
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
from ...kernels.jit import Kernel, current_driver
from ...kernels.program import Target
from .agreement import Call
from .give_back import COMBINE_AND_GIVE_BACK, CombineAndGiveBack, give_back, give_back_kernels
from .peer_memory import Received
from .push import push, push_kernels
from .ranks import Member, Sizes
from .transport import Traffic, Transport
from .watch import OVERLAPS

if TYPE_CHECKING:
    from .group import ExpertGroup


class PeerTransport(Transport):
    """What this rank receives is stored in the group's memory, where its next turn overwrites it.

    A dispatch begins a turn, and a combine ends it. If autograd leaves out the combine, the group's
    next dispatch ends the turn on the GPU. If autograd runs another call between the two, `combine`
    begins a turn of its own.
    """

    def __init__(self, group: "ExpertGroup", calls: Sequence[Call], ids: torch.Tensor) -> None:
        super().__init__(group, calls, ids)
        call, num_ranks, self._peers = calls[0], group.size, group.peers
        most = max(x.num_tokens for x in calls)
        self._choices = ids.contiguous()
        self._sizes = Sizes(most, call.top_k, call.num_experts, call.hidden_size)
        self._member = Member(group.rank, num_ranks, int(group.timeout.total_seconds() * 1e9))
        alike = call.layer, call.top_k, call.hidden_size, call.dtype
        self._identity = *alike, *[x.num_tokens for x in calls]
        self._given_back = self._sizes.given_back(num_ranks)
        self._turn, self._number, self._is_backward = 0, 0, False

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Push gradients; tokens take their choices and scores along in `dispatch_tokens`."""
        self._is_backward = True
        return self._push(rows, None, None)[0]

    def dispatch_tokens(
        self, x: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._is_backward = False
        rows, scores = self._push(x, scores, None)
        return rows, scores

    def dispatch_codes(
        self, x: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._is_backward = False
        codes, scale_inv, scores = self._push(x, scores, MIN_AMAX)
        return codes, scale_inv, scores

    def dispatch_gradient_codes(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._is_backward = True
        codes, scale_inv = self._push(grad, None, MIN_GRADIENT_AMAX)
        return codes, scale_inv

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return self._give_back_and_sum(rows, None)[0]

    def combine_gradients(
        self, rows: torch.Tensor, grad_scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, grad_choices = self._give_back_and_sum(rows, grad_scores)
        assert grad_choices is not None
        return y, grad_choices

    def run_experts(
        self, inputs: ExpertsInputs, *, saves: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last kernel of the experts sends sums to the ranks, if it can take all slots."""
        h = self._sizes.hidden_size
        if h % 8 or not runs_as_a_whole(inputs, saves=saves):
            return super().run_experts(inputs, saves=saves)
        y = self._empty_sum()
        combine = self._combine_and_give_back()
        return y, launch_combining(inputs, combine, self._turn, y, saves=saves)

    def run_experts_backward(
        self, inputs: ExpertsBackwardInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last kernel sends gradients to the ranks, as that of `run_experts` sends sums."""
        h, (num_tokens, top_k) = self._sizes.hidden_size, self._choices.shape
        if h % 8 or not gradients_run_as_a_whole(inputs):
            return super().run_experts_backward(inputs)
        size = num_tokens * (2 * h + 4 * top_k)
        both = self._choices.new_empty(size, dtype=torch.uint8)
        launch_combining_gradients(inputs, self._combine_and_give_back(), self._turn, both)
        dx, grad_scores = both[: num_tokens * 2 * h], both[num_tokens * 2 * h :]
        grad_scores = grad_scores.view(torch.float32).view(num_tokens, top_k)
        return dx.view(torch.bfloat16).view(num_tokens, h), grad_scores

    def check_turn(self) -> None:
        """End all work of the GPU if another turn has begun, as copies may hold that turn's data.

        Only replays of graphs can overlap. `combine` checks this itself.
        """
        if self._sizes.max_tokens > 0 and self._peers.memory.was_captured:
            is_right = self._peers.memory.turn == self._turn
            rank = self.group.agreement.ranks[self._member.rank]  # as `watch` names it
            torch._assert_async(is_right, f"ExpertParallel: rank {rank} {OVERLAPS}")

    @classmethod
    def list_kernels(cls, target: Target, traffic: Traffic) -> Iterator[Kernel]:
        h, are_codes = traffic.hidden_size, traffic.are_codes
        for dtype in traffic.dtypes:
            yield from push_kernels(target, dtype, h, are_codes=are_codes)
        yield from give_back_kernels(target, h)
        if are_codes and h % 8 == 0:
            yield COMBINE_AND_GIVE_BACK

    def _push(
        self, x: torch.Tensor, scores: torch.Tensor | None, min_amax: float | None
    ) -> list[torch.Tensor]:
        """Begin a turn: push x, as codes unless `min_amax` is None, and scores unless None.

        Returns the rows of all slots, with codes their scales, and with scores those of all slots.
        """
        sizes, is_codes = self._sizes, min_amax is not None
        num_slots, h = self._member.num_ranks * sizes.max_tokens, sizes.hidden_size
        dtype = E4M3 if is_codes else x.dtype
        if num_slots == 0:  # no rank has a token
            scales = [x.new_empty(0, num_blocks(h), dtype=torch.float32)] if is_codes else []
            return [x.new_empty(0, h, dtype=dtype), *scales, *([] if scores is None else [scores])]
        if x.stride(1) != 1 and h > 1:
            x = x.contiguous()
        received = Received.of(num_slots, h * dtype.itemsize, h, sizes.top_k)
        memory = self._peers.memory_for(x.device, received.size, self._given_back.size)
        scores = None if scores is None else scores.contiguous()
        self._number = self._peers.number_turn()
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
            self.received_ids = memory.view(at + received.ids, shape, torch.int32)
            tensors.append(memory.view(at + received.scores, shape, torch.float32))
        return tensors

    def _give_back_and_sum(
        self, rows: torch.Tensor, grad_scores: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """End the turn: return results to their ranks, and sum [T, H] and [T, k] of all ranks."""
        if self._sizes.max_tokens == 0:
            return rows, grad_scores
        y, summed_scores = self._empty_sum(), None
        if grad_scores is not None:
            grad_scores = grad_scores.contiguous()
            summed_scores = grad_scores.new_empty(self._choices.shape)
        if self._number != self._peers.last_turn:  # another turn overwrote which ranks tokens reach
            self._push(y[:, :0], None, None)
        args = rows.contiguous(), self.received_ids, grad_scores, y, summed_scores
        give_back(self._peers.memory, self._member, self._sizes, self._turn, *args)
        return y, summed_scores

    def _combine_and_give_back(self) -> CombineAndGiveBack:
        memory, num_tokens = self._peers.memory, len(self._choices)
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
