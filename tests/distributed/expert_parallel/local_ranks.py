"""Ranks of one process: threads that agree, and a group of one, which needs no process group."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from moefp8.distributed.expert_parallel.agreement import Call
from moefp8.distributed.expert_parallel.group import ExpertGroup
from moefp8.distributed.expert_parallel.peer_group import PeerGroup
from moefp8.distributed.expert_parallel.peer_memory import PeerMemory
from moefp8.distributed.expert_parallel.peers import PeerTransport

T = TypeVar("T")


class LocalAgreement:
    """Threads that tell each other what they are about to do."""

    def __init__(self, num_ranks: int, timeout: timedelta) -> None:
        self.ranks, self.timeout = list(range(num_ranks)), timeout
        self.barrier = threading.Barrier(num_ranks, timeout=timeout.total_seconds())
        self.told: list[Any] = [None] * num_ranks
        self.own = threading.local()

    def gather(self, told: Any) -> list[Any]:
        self.barrier.wait()
        self.told[getattr(self.own, "rank", 0)] = told  # a thread of autograd, of one rank
        self.barrier.wait()
        return list(self.told)

    def agree(self, call: Call) -> list[Call]:
        return self.gather(call)

    def checked(self, failed: Call, check: Callable[[], T]) -> T:
        return check()


class Alone(PeerGroup):
    """The GPU of a rank that has no peers."""

    def __init__(self, agreement: Any) -> None:
        super().__init__("", agreement)

    def make(self, device: torch.device, receiving: int, returning: int) -> PeerMemory:
        """What it holds is poison."""
        size = PeerMemory.num_bytes(receiving, returning)
        tensor = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
        tensor[: PeerMemory.num_bytes(0, 0)].zero_()
        return PeerMemory(tensor, [tensor.data_ptr()], receiving, returning)


def group_of_one() -> ExpertGroup:
    agreement: Any = LocalAgreement(1, timedelta(seconds=60))
    return ExpertGroup(0, 1, agreement, Alone(agreement), transport=PeerTransport)
