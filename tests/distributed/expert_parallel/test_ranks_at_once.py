"""Ranks of the exchange's kernels at the same time, without a GPU: each waits for the others.

A rank is a thread, and runs one CTA at a time, the first ones first: so nothing may wait for what a
later CTA of its own rank does.
"""

import ctypes
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch

from moefp8.distributed.expert_parallel import give_back, push
from moefp8.distributed.expert_parallel.give_back import (
    COMBINE_AND_GIVE_BACK,
    CombineAndGiveBack,
    give_back_kernel_of,
)
from moefp8.distributed.expert_parallel.peer_memory import MAX_RANKS, GivenBack, Received
from moefp8.distributed.expert_parallel.push import push_codes_kernel_of, push_rows_kernel_of
from moefp8.distributed.expert_parallel.ranks import Member, Sizes
from moefp8.kernels import jit
from tests import naive
from tests.distributed.expert_parallel import peers_cases
from tests.distributed.expert_parallel.host_ranks import BF16, combine, ranks_of
from tests.distributed.expert_parallel.peers_cases import HostMemories, Recording, build
from tests.distributed.ranks import PATIENCE_S
from tests.fakes.emulator import FakeDriver

E, H, K = 5, 256, 3
KERNELS = [
    push_codes_kernel_of(BF16, vectorized=True),
    push_rows_kernel_of(16),
    give_back_kernel_of(16),
    COMBINE_AND_GIVE_BACK,
]
# Tokens of each rank, call by call: layouts differ, and some have several chunks.
CALLS: dict[int, list[tuple[int, ...]]] = {
    2: [(9, 5), (570, 0), (3, 170), (0, 1000), (570, 520), (1, 0)],
    3: [(9, 5, 0), (270, 0, 3), (0, 0, 2), (30, 120, 420)],
}
NEVER = 10**17  # ns
WORDS = peers_cases.WORDS // 8


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    """The kernels of each rank."""
    return [build(KERNELS, tmp_path_factory) for _ in range(max(CALLS))]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(give_back, "_CHUNK_BYTES", 1 << 17)


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
            member, at = Member(rank, num_ranks, NEVER), memory.receiving_at
            given = x[rank], ids[rank], scores[rank], 1e-4
            pushed = recorded(push.push, memory, member, of, received, number, *given)
            out = torch.empty(call[rank], H, dtype=BF16)
            slot_ids = memory.view(at + received.ids, (num_slots, K), torch.int32)
            slot_scores = memory.view(at + received.scores, (num_slots, K), torch.float32)
            if combines:
                areas = call[rank], memory.returning_at, memory.state.data_ptr()
                back = y[rank], maps[rank], slot_scores, out, number
                given_back = recorded(combine, CombineAndGiveBack(member, of, *areas), *back)
            else:
                back = y[rank], slot_ids, None, out, None
                given_back = recorded(give_back.give_back, memory, member, of, number, *back)
            launches[rank] += [pushed, given_back]
            parts = []
            for r in range(num_ranks):
                own = slice(rank * most, rank * most + call[rank])
                of_maps = maps[r, own].tolist()
                parts.append(naive.combine(y[r], of_maps, weights[own]) if combines else y[r][own])
            results.append(out)
            wanted.append(sums_of(parts, ids[rank]))
        kept.append((x, ids, scores, y, maps))

    def rank_runs(rank: int) -> None:
        for made in launches[rank]:
            run(gpus[rank], made)

    together(*(partial(rank_runs, rank) for rank in range(num_ranks)))
    assert all(memory.error.tolist() == [0] * 4 for memory in memories)
    for number, (came, expected) in enumerate(zip(results, wanted, strict=True)):
        assert torch.equal(came, expected), divmod(number, num_ranks)


# ---- Turns ----


def run(gpu: dict[str, Callable[..., bool]], made: Any) -> None:
    given = ctypes.byref(made.arguments), made.grid, made.block, made.shared_bytes
    assert gpu[made.kernel.name](*given)


def together(*functions: Callable[[], None]) -> None:
    threads = [Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


class Turn:
    """A turn of ranks with `num_tokens` each, all of which go to every rank."""

    def __init__(
        self, memories: list[Any], number: int, num_tokens: int, min_amax: float | None
    ) -> None:
        num_ranks, self.number, self.num_tokens = len(memories), number, num_tokens
        self.sizes, self.memories = Sizes(num_tokens, K, E, H), memories
        num_slots, width = num_ranks * num_tokens, 1 if min_amax else 2
        self.received = Received.of(num_slots, H * width, H, K)
        self.x = [torch.randn(num_tokens, H).to(BF16) for _ in memories]
        self.ids = torch.tensor([[0, E - 1, E]]).expand(num_tokens, K).contiguous()
        self.scores, self.width = torch.rand(num_tokens, K), width
        self.kept: list[Any] = []  # what launches read
        self.members = [Member(rank, num_ranks, NEVER) for rank in range(num_ranks)]
        self.pushes = [self._push(rank, min_amax) for rank in range(num_ranks)]
        self.rows = torch.cat([x.view(torch.uint8) for x in self.x])
        if min_amax is not None:
            self.rows = naive.quantize(torch.cat(self.x), 1, False)[0].byte()

    def _push(self, rank: int, min_amax: float | None) -> Any:
        given = self.x[rank], self.ids, self.scores, min_amax
        of = self.memories[rank], self.members[rank], self.sizes, self.received, self.number
        return recorded(push.push, *of, *given)

    def came(self, rank: int) -> torch.Tensor:
        """A copy of the rows that the rank has received."""
        memory, shape = self.memories[rank], (len(self.rows), H * self.width)
        at = memory.receiving_at + self.received.rows
        return memory.view(at, shape, torch.uint8, self.received.row_pitch).clone()

    def give_back(self, rank: int, deadline_ns: int = NEVER) -> tuple[Any, torch.Tensor]:
        """The launch, whose rows are ones, and its sums."""
        member = self.members[rank]._replace(deadline_ns=deadline_ns)
        y = torch.ones(len(self.rows), H, dtype=BF16)
        out = torch.full((self.num_tokens, H), -1.0, dtype=BF16)
        ids = self.ids.int().repeat(len(self.memories), 1)
        self.kept.append((y, ids, out))
        of = self.memories[rank], member, self.sizes, self.number
        return recorded(give_back.give_back, *of, y, ids, None, out, None), out


def memories_of(num_ranks: int, num_tokens: int) -> list[Any]:
    receiving = Received.of(num_ranks * num_tokens, 2 * H, H, K).size
    return HostMemories(num_ranks, receiving, GivenBack.of(num_ranks, num_tokens, H, K).size).of


@pytest.mark.parametrize("min_amax", [None, 1e-4], ids=["rows", "codes"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_reads_what_has_come_though_nothing_is_given_back(gpus, late, min_amax):
    """Pushes of tokens alone, and turns in between that are whole."""
    memories, came, sums = memories_of(2, 90), {}, []
    has_results = [False, False, True, False, True, True, False]
    turns = [Turn(memories, i + 7, 90 - 10 * i, min_amax) for i in range(len(has_results))]
    backs = [
        [turn.give_back(rank) if whole else None for rank in range(2)]
        for turn, whole in zip(turns, has_results, strict=True)
    ]

    def rank_runs(rank: int) -> None:
        for number, (turn, back) in enumerate(zip(turns, backs, strict=True)):
            run(gpus[rank], turn.pushes[rank])
            if rank == late:
                time.sleep(0.03)
            came[rank, number] = turn.came(rank)
            if back[rank] is not None:
                run(gpus[rank], back[rank][0])
                sums.append(back[rank][1])

    together(*(partial(rank_runs, rank) for rank in range(2)))
    for rank, memory in enumerate(memories):
        assert memory.error.tolist() == [0] * 4
        assert memory.state[:2].tolist() == [len(turns), len(turns) - 1]  # the last one is open
        for number, turn in enumerate(turns):
            assert torch.equal(came[rank, number], turn.rows), (rank, number)
    assert all((y == 2).all() for y in sums)


def test_one_rank_that_gives_nothing_back_is_an_error(gpus):
    """The other one waits for results, and gets none."""
    memories = memories_of(2, 30)
    first, second = (Turn(memories, number, 30, None) for number in (7, 8))
    back, _ = first.give_back(0)

    def gives() -> None:
        run(gpus[0], first.pushes[0])
        run(gpus[0], back)

    def pushes() -> None:
        run(gpus[1], first.pushes[1])
        run(gpus[1], second.pushes[1])

    together(gives, pushes)
    assert [memory.error.tolist() for memory in memories] == [[2, 1, 1, -1], [2, 0, 1, 7]]


OVERLAPS = [3, 0, 1, 7]  # kind, rank, which turn


def test_results_of_a_turn_that_another_one_has_followed_are_an_error(gpus):
    """The other rank is not told that they have come."""
    memories = memories_of(2, 30)
    first = Turn(memories, 7, 30, None)
    turns = first, Turn(memories, 7 + (1 << 32), 30, None)

    def pushes(rank: int) -> None:
        for turn in turns:
            run(gpus[rank], turn.pushes[rank])

    together(*(partial(pushes, rank) for rank in range(2)))
    assert memories[0].error.tolist() == [0] * 4
    words = [memory.tensor.view(torch.int64).clone() for memory in memories]
    run(gpus[0], first.give_back(0, deadline_ns=10**6)[0])
    assert memories[0].error.tolist() == OVERLAPS
    assert torch.equal(memories[1].tensor.view(torch.int64)[:WORDS], words[1][:WORDS])


def when(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-4)


def test_a_turn_that_begins_while_tokens_are_pushed_is_an_error(gpus):
    memories = memories_of(1, 3000)
    turn, state = Turn(memories, 7, 3000, None), memories[0].state

    def begins() -> None:
        when(lambda: state[2] == 7)
        state[2] = 7 + (1 << 32)

    together(lambda: run(gpus[0], turn.pushes[0]), begins)
    assert memories[0].error.tolist() == OVERLAPS


def test_a_turn_that_begins_while_results_are_given_back_is_an_error(gpus):
    """The rank has one CTA, which waits for the results of the other one."""
    memories = memories_of(2, 1)
    turn, words = Turn(memories, 7, 1, None), memories[0].tensor.view(torch.int64)
    back, _ = turn.give_back(0)
    together(*(partial(run, gpus[rank], turn.pushes[rank]) for rank in range(2)))

    def begins() -> None:
        when(lambda: memories[1].tensor.view(torch.int64)[MAX_RANKS] != 0)  # it has told of its own
        memories[0].state[2] = 7 + (1 << 32)
        words[MAX_RANKS + 1] = 1 << 32 | 7  # the other one's have come

    together(lambda: run(gpus[0], back), begins)
    assert memories[0].error.tolist() == OVERLAPS
