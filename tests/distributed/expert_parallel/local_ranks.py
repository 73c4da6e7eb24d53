"""Ranks that are threads of one process, with one GPU: its memory stands for that of several.

So any number of ranks is tested where there is one GPU, and by compute-sanitizer.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from moefp8.distributed.expert_parallel.agreement import Call
from moefp8.distributed.expert_parallel.group import ExpertGroup
from moefp8.distributed.expert_parallel.peer_memory import PeerMemory

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


class LocalPeers:
    """Of a rank: all ranks' memory on one GPU."""

    def __init__(self, agreement: LocalAgreement) -> None:
        self.agreement = agreement
        self.last_streams: dict[torch.device, torch.cuda.Stream] = {}  # ranks go side by side
        # All but one may wait while that one's GEMMs run, which take whole SMs.
        self.most_ctas = max(1, 66 // len(agreement.ranks))

    def why_not(self, device: torch.device) -> None:
        return None

    def make(self, device: torch.device, receiving: int, returning: int) -> PeerMemory:
        size = PeerMemory.num_bytes(receiving, returning)
        tensor = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
        tensor[: PeerMemory.num_bytes(0, 0)].zero_()
        torch.cuda.synchronize(device)
        addresses = self.agreement.gather(tensor.data_ptr())
        return PeerMemory(tensor, addresses, receiving, returning)


class LocalRanks:
    """`run` calls a function of (rank, group) on all ranks, each in a thread and a stream.

    No rank copies anything to the host: what they give stays on the GPU until all have launched all
    their work. While CUDA waits to copy to pageable memory it keeps other threads from making an
    event, and the GPU waits for what they would launch next.
    """

    def __init__(self, num_ranks: int, seconds: float = 60) -> None:
        self.agreement: Any = LocalAgreement(num_ranks, timedelta(seconds=seconds))
        peers: list[Any] = [LocalPeers(self.agreement) for _ in range(num_ranks)]
        self.groups = [
            ExpertGroup(rank, num_ranks, self.agreement, peers[rank]) for rank in range(num_ranks)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)]

    def run(self, function: Callable[[int, ExpertGroup], Any]) -> list[Any]:
        found: list[Any] = [None] * len(self.groups)
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            self.agreement.own.rank = rank
            try:
                with torch.cuda.stream(self.streams[rank]):
                    found[rank] = function(rank, self.groups[rank])
            except BaseException as error:
                errors.append(error)
                self.agreement.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        torch.cuda.synchronize()
        return found
