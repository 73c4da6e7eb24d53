"""Ranks of the exchange's kernels at the same time, without a GPU: each waits for the others.

A rank is a thread, and runs one CTA at a time, the first ones first: so nothing may wait for what a
later CTA of its own rank does.
"""

import ctypes
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch

from moefp8.distributed.expert_parallel import peers_launch
from moefp8.distributed.expert_parallel.peer_memory import GivenBack, Received
from moefp8.distributed.expert_parallel.peers_launch import (
    COMBINE_AND_GIVE_BACK,
    CombineAndGiveBack,
    Place,
    Sizes,
    give_back_kernel_of,
    push_codes_kernel_of,
)
from moefp8.kernels import jit
from moefp8.kernels.jit import Source
from moefp8.routing.combine_launch import CombineSources
from tests import naive
from tests.distributed.expert_parallel.host_ranks import BF16, ranks_of
from tests.distributed.expert_parallel.peers_cases import HostMemories, Recording, build
from tests.fakes.emulator import FakeDriver

E, H, K = 5, 256, 3
KERNELS = [
    push_codes_kernel_of(BF16, vectorized=True),
    give_back_kernel_of(16),
    COMBINE_AND_GIVE_BACK,
]
# Tokens of each rank, call by call: layouts differ, and some have several chunks.
CALLS: dict[int, list[tuple[int, ...]]] = {
    2: [(9, 5), (2300, 0), (3, 700), (0, 4000), (2300, 2100), (1, 0)],
    3: [(9, 5, 0), (1100, 0, 3), (0, 0, 2), (30, 500, 1700)],
}
NEVER = 10**17  # ns


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    """The kernels of each rank."""
    return [build(KERNELS, tmp_path_factory) for _ in range(max(CALLS))]


def recorded(launch: Callable[..., Any], *given: Any) -> Any:
    with jit.using(FakeDriver(5, library=Recording())) as gpu:
        launch(*given)
    (made,) = gpu.launched
    return made


def sums_of(parts: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """What the ranks in order give for each token, of those that it reaches."""
    total = torch.zeros(len(ids), H)
    for token, own in enumerate(ids.tolist()):
        for rank in sorted(ranks_of(own, E, len(parts))):
            total[token] += parts[rank][token].float()
    return total.to(BF16)


@pytest.mark.parametrize("num_ranks", CALLS)
@pytest.mark.parametrize("combines", [True, False])
def test_ranks_wait_for_each_other_alone(gpus, num_ranks, combines):
    torch.manual_seed(0)
    calls = CALLS[num_ranks]
    layouts = [Sizes(max(call), K, E, H) for call in calls]
    receiving = max(Received.of(num_ranks * x.max_tokens, H, H, K).size for x in layouts)
    returning = max(GivenBack.of(num_ranks, x.max_tokens, H, K).size for x in layouts)
    memories = HostMemories(num_ranks, receiving, returning).of
    launches: list[list[Any]] = [[] for _ in range(num_ranks)]
    results, wanted, kept = [], [], []
    for number, (call, of) in enumerate(zip(calls, layouts, strict=True)):
        num_slots, most = num_ranks * of.max_tokens, of.max_tokens
        received = Received.of(num_slots, H, H, K)
        x = [torch.randn(n, H).to(BF16) for n in call]
        ids = [torch.randint(-1, E + 1, (n, K)) for n in call]
        scores = [torch.rand(n, K) for n in call]
        y = [torch.randn(num_slots, H).to(BF16) for _ in call]
        maps, weights = torch.full((num_ranks, num_slots, K), -1).int(), torch.zeros(num_slots, K)
        for source, own in enumerate(ids):
            begin, end = source * most, source * most + len(own)
            weights[begin:end] = scores[source]
            for rank in range(num_ranks):
                first, last = (r * E // num_ranks for r in (rank, rank + 1))
                is_here = (own >= first) & (own < last)
                rows = torch.randint(num_slots, own.shape)
                maps[rank, begin:end] = torch.where(is_here, rows, -1).int()
        for rank, memory in enumerate(memories):
            place, at = Place(rank, num_ranks, NEVER), memory.receiving_at
            given = x[rank], ids[rank], scores[rank], 1e-4
            pushed = recorded(peers_launch.push, memory, place, of, received, number, *given)
            out = torch.empty(call[rank], H, dtype=BF16)
            slot_ids = memory.view(at + received.ids, (num_slots, K), torch.int32)
            slot_scores = memory.view(at + received.scores, (num_slots, K), torch.float32)
            if combines:
                back = y[rank], maps[rank], slot_scores, out
                given_back = recorded(combine, place, of, memory, number, *back)
            else:
                back = y[rank], slot_ids, None, out, None
                given_back = recorded(peers_launch.give_back, memory, place, of, number, *back)
            launches[rank] += [pushed, given_back]
            parts = []
            for r in range(num_ranks):
                own = slice(rank * most, rank * most + call[rank])
                of_maps = maps[r, own].tolist()
                parts.append(naive.combine(y[r], of_maps, weights[own]) if combines else y[r][own])
            results.append(out)
            wanted.append(sums_of(parts, ids[rank]))
        kept.append((x, ids, scores, y, maps))

    def run(rank: int) -> None:
        for made in launches[rank]:
            given = ctypes.byref(made.arguments), made.grid, made.block, made.shared_bytes
            assert gpus[rank][made.kernel.name](*given)

    threads = [Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert all(memory.error.tolist() == [0] * 4 for memory in memories)
    for number, (came, expected) in enumerate(zip(results, wanted, strict=True)):
        assert torch.equal(came, expected), divmod(number, num_ranks)


def combine(
    place: Place,
    of: Sizes,
    memory: Any,
    turn: int,
    y: torch.Tensor,
    token_to_row: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    places = len(out), memory.returning_at, memory.state.data_ptr()
    sources = CombineSources(*map(Source, range(4)), word=Source(4))
    launch = CombineAndGiveBack(place, of, *places).prepare(
        weights, H, y_row_pitch=H, is_aligned=True, sources=sources, programmatic=True
    )
    launch.on(-1, (*(x.data_ptr() for x in (y, token_to_row, weights, out)), turn))
