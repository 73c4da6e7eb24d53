"""Transports that a user might write, and what ranks compute with them.

T tokens of a rank, k choices each, P ranks, H hidden.
"""

from typing import Any

import torch
import torch.distributed as dist

from moefp8.distributed import ExpertParallel, Transport
from tests.distributed.expert_parallel.cases import LONG, Kind, Results, Tokens, adapt, run, whole
from tests.distributed.expert_parallel.error_cases import told


class LoopBack(Transport):
    """A single process plays the group: tokens stay, and a sum has one part."""

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class Everywhere(Transport):
    """Every rank receives all tokens. Those without an expert there are NaN."""

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        received = torch.cat(self._gather(rows))
        if rows.shape[1] == self.calls[0].hidden_size:
            nan = 0x7F if rows.dtype == torch.uint8 else torch.nan  # the former of FP8 codes
            received = received.masked_fill(~self._is_here(), nan)
        return received

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        begin = sum(call.num_tokens for call in self.calls[: self.group.rank])
        end = begin + len(self.own_ids)
        total = torch.zeros(1)
        for results in self._gather(rows):
            total = total + results[begin:end].float()
        return total.to(rows.dtype)

    def _gather(self, rows: torch.Tensor) -> list[Any]:
        rows_of_ranks: list[Any] = [None] * self.group.size
        dist.all_gather_object(rows_of_ranks, rows, self.group.process_group)
        return rows_of_ranks

    def _is_here(self) -> torch.Tensor:
        """bool [R, 1]: whether a token has an expert on this rank."""
        ids, num_experts = torch.cat(self._gather(self.own_ids)), self.calls[0].num_experts
        rank, size = self.group.rank, self.group.size
        begin, end = rank * num_experts // size, (rank + 1) * num_experts // size
        return ((ids >= begin) & (ids < end)).any(1, keepdim=True)


class Incomplete(Transport):
    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def run_over(
    transport: type[Transport], kind: Kind, tokens: Tokens, with_gradients: bool
) -> Results:
    """What a rank computes in a group of its own, whose tokens travel by `transport`."""
    group = dist.new_group(list(range(dist.get_world_size())))
    layer = ExpertParallel(whole(kind), group, timeout=LONG, transport=transport)
    adapt(layer.experts, kind)
    with torch.set_grad_enabled(with_gradients):
        return run(layer, tokens, with_gradients=with_gradients)


def made_over(*transports: Any) -> list[Any]:
    """Whether layers of one new group can be made with these, one after the other."""
    group = dist.new_group(list(range(dist.get_world_size())))
    return [
        told(lambda x=x: bool(ExpertParallel(whole(Kind()), group, transport=x)))
        for x in transports
    ]
