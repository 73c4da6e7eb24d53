"""Tokens travel by collectives of `torch.distributed`, on any backend.

T tokens of this rank, k choices each, P ranks, R tokens received, H hidden. A token goes once to
each rank that holds one of its experts. Python must know how many tokens are sent, so on a GPU each
call waits for the choices.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...kernels.jit import Kernel
from ...kernels.program import Target
from ...routing.combine import combine_kernels, sum_rows
from .agreement import Call
from .transport import Traffic, Transport

if TYPE_CHECKING:
    from .group import ExpertGroup


class CollectiveTransport(Transport):
    """A rank receives tokens in order of their ranks, then of the tokens of a rank."""

    def __init__(self, group: "ExpertGroup", calls: Sequence[Call], ids: torch.Tensor) -> None:
        super().__init__(group, calls, ids)
        if calls[0].is_captured:
            raise RuntimeError(
                "ExpertParallel: a CUDA graph needs GPUs that write each other's memory; without, "
                "sizes of what travels are read by the host"
            )
        self._name, device, num_experts = calls[0].name, ids.device, calls[0].num_experts
        self._gpu_group = gpu_group(group.process_group) if device.type == "cuda" else None
        own = ids.clamp(-1, num_experts).int().cpu()  # E: a choice of no expert
        everyone = self._gather(own, [call.num_tokens for call in calls])
        sent = _reached(everyone[group.rank], num_experts, group.size)  # [T, P]
        received = [_reached(x, num_experts, group.size)[:, group.rank] for x in everyone]
        self._tokens = sent.T.nonzero()[:, 1].to(device)  # the tokens that are sent, rank by rank
        self._num_sent = sent.sum(0).tolist()
        self._num_received = [int(x.sum()) for x in received]
        ids_of_ranks = [x[y] for x, y in zip(everyone, received, strict=True)]
        self.received_ids = torch.cat(ids_of_ranks).to(device)
        begins = torch.tensor([0, *accumulate(self._num_sent)][:-1], dtype=torch.int32)
        to_row = (sent.cumsum(0) - 1 + begins).where(sent, -1)
        self._token_to_row = to_row.int().to(device)  # [T, P]: rows of what comes back

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        sent = rows.index_select(0, self._tokens)
        return self._travel(sent, self._num_sent, self._num_received)

    def dispatch_tokens(
        self, x: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.dispatch(x), self.dispatch(scores)  # ids are here already

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        back = self._travel(rows, self._num_received, self._num_sent)
        ones = back.new_ones(self._token_to_row.shape, dtype=torch.float32)
        return sum_rows(back, self._token_to_row, ones)

    @classmethod
    def list_kernels(cls, target: Target, traffic: Traffic) -> Iterator[Kernel]:
        yield from super().list_kernels(target, traffic)
        num_ranks, h = traffic.num_ranks, traffic.hidden_size
        if h % 8 == 0:
            yield from combine_kernels(target, torch.float32, num_ranks, h)

    def _travel(
        self, x: torch.Tensor, num_sent: list[int], num_received: list[int]
    ) -> torch.Tensor:
        data = x.contiguous().view(torch.uint8)
        received = data.new_empty((sum(num_received), *data.shape[1:]))
        agreement, on_gpu = self.group.agreement, self._gpu_group is not None
        group = self._gpu_group if on_gpu else agreement.group
        data, taken = (data, received) if on_gpu else (data.cpu(), received.cpu())
        with agreement.explaining(self._name):
            dist.all_to_all_single(taken, data, num_received, num_sent, group=group)
        return (taken if on_gpu else received.copy_(taken)).view(x.dtype)

    def _gather(self, ids: torch.Tensor, num_tokens: list[int]) -> list[torch.Tensor]:
        """The choices of all ranks, by rank."""
        most, agreement = max(num_tokens), self.group.agreement
        padded = ids.new_zeros(most, ids.shape[1])
        padded[: len(ids)] = ids
        everyone = [torch.empty_like(padded) for _ in num_tokens]
        with agreement.explaining(self._name):
            dist.all_gather(everyone, padded, agreement.group)
        return [x[:n] for x, n in zip(everyone, num_tokens, strict=True)]


def _reached(ids: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """bool [T, P]: whether a rank holds one of a token's experts; ids of no expert reach none."""
    bounds = [rank * num_experts // num_ranks for rank in range(num_ranks + 1)]
    ranks = torch.tensor(bounds)
    here = ids[:, None, :]
    return ((here >= ranks[:-1, None]) & (here < ranks[1:, None])).any(-1)


def gpu_group(group: Any) -> Any:
    """The group, if it moves tensors of GPUs; None: they travel through the hosts."""
    backend = dist.get_backend_config(group) if hasattr(dist, "get_backend_config") else ""
    return group if "nccl" in str(backend) else None
