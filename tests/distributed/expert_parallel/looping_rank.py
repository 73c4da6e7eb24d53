"""`python -m tests.distributed.expert_parallel.looping_rank RANK NUM_RANKS FOLDER WAY`: a process
that calls a layer of its group until something stops it, by replays of a graph or eagerly."""

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moefp8 import GroupedExperts
from moefp8.distributed import ExpertParallel
from tests.distributed.expert_parallel.cases import Kind, draw, whole

SECONDS = 10  # for which a rank waits; hosts of a busy machine are some seconds apart
KIND = Kind(8, 256, 128)


def main() -> None:
    rank, num_ranks = int(sys.argv[1]), int(sys.argv[2])
    folder, way = sys.argv[3:]
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", f"file://{folder}/store", rank=rank, world_size=num_ranks)
    whole_experts: GroupedExperts = whole(KIND)
    timeout = timedelta(seconds=SECONDS)
    experts = ExpertParallel(
        whole_experts.to(device), dist.group.WORLD, timeout=timeout, transport="peers"
    )
    x, ids, scores, *_ = draw(KIND, [5] * num_ranks, 3, 0)[rank]
    given = x.to(device), ids.to(device), scores.to(device)
    with torch.no_grad():
        for _ in range(3):
            experts(*given)
        torch.cuda.synchronize()
        run: Callable[[], Any] = partial(experts, *given)
        if way == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        for number in range(10**9):
            run()
            if number % 100 == 0:
                torch.cuda.synchronize()
            if number == 1000:
                print("loops", flush=True)


if __name__ == "__main__":
    main()
