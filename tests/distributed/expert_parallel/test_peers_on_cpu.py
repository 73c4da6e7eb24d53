"""What the kernels by which ranks write each other's memory do, byte by byte, without a GPU.

Ranks run one after the other. So that none waits, the others' words lie there before it runs, and
are taken away afterwards: what a rank tells must come from itself.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.distributed.expert_parallel import peers_launch
from moefp8.distributed.expert_parallel.peer_memory import (
    MAX_RANKS,
    GivenBack,
    PeerMemory,
    Received,
)
from moefp8.distributed.expert_parallel.peers_launch import CombineAndGiveBack, Place, Sizes
from moefp8.kernels import jit
from moefp8.kernels.jit import Source
from moefp8.routing.combine_launch import CombineSources
from tests import naive
from tests.distributed.expert_parallel.peers_cases import (
    GIVE_BACK,
    GUARD,
    PUSH,
    HostMemories,
    build,
    placed,
)
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.routing.cases import DTYPES

pytestmark = pytest.mark.usefixtures("gpu")
BF16 = torch.bfloat16
TOKENS, RESULTS = range(2)  # what is pushed
SIGNATURE = 2**32 - 6
UNTOUCHED = -77


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    return build([*PUSH, *GIVE_BACK], tmp_path_factory)


@pytest.fixture(scope="module")
def gpu(functions):
    """A GPU of one SM, which has eight CTAs, that runs the kernels' text."""
    with jit.using(FakeDriver(1, library=cuda_on_cpu.OnCpu(functions))) as driver:
        yield driver


class Case(NamedTuple):
    """Tokens of each rank, of whom the one with most has M; ids: their dtype."""

    tokens: tuple[int, ...]
    top_k: int
    num_experts: int
    hidden_size: int
    dtype: torch.dtype = BF16
    ids: torch.dtype = torch.int64
    pitch: int = 0  # of rows, more than H
    offset: int = 0  # of x, in elements, behind a multiple of 16 bytes

    @property
    def sizes(self) -> Sizes:
        return Sizes(max(self.tokens), self.top_k, self.num_experts, self.hidden_size)


# ---- The references: they write into bytes what has to lie there ----


def rank_of(expert: int, num_experts: int, num_ranks: int) -> int:
    for rank in range(num_ranks):
        if rank * num_experts // num_ranks <= expert < (rank + 1) * num_experts // num_ranks:
            return rank
    raise AssertionError("every expert has a rank")


def ranks_of(ids: list[int], num_experts: int, num_ranks: int) -> set[int]:
    return {rank_of(x, num_experts, num_ranks) for x in ids if 0 <= x < num_experts}


def put(target: torch.Tensor, at: int, values: torch.Tensor) -> None:
    """Write them at a byte of a memory."""
    data = values.contiguous().view(torch.uint8).flatten()
    target[GUARD + at : GUARD + at + len(data)] = data


class Host:
    """P ranks that exchange. After each exchange, every byte is as it has to be."""

    def __init__(self, case: Case, row_bytes: int) -> None:
        self.case, self.num_ranks = case, len(case.tokens)
        num_slots, h = self.num_ranks * case.sizes.max_tokens, case.hidden_size
        self.received = Received.of(num_slots, row_bytes, h, case.top_k)
        self.back = GivenBack.of(num_slots, h, case.top_k)
        self.memories = HostMemories(self.num_ranks, self.received.size, self.back.size)
        self.expected = [x.clone() for x in self.memories.bytes_of]
        self.rounds, self.signature = [0, 0], 0

    def place(self, rank: int) -> Place:
        return Place(rank, self.num_ranks, 10**6)

    def memory(self, rank: int) -> PeerMemory:
        return self.memories.of[rank]

    def words(self, rank: int) -> torch.Tensor:
        return self.memory(rank).tensor[: 2 * MAX_RANKS * 8].view(torch.int64).view(2, MAX_RANKS)

    def exchange(self, which: int, launch: Callable[[int], None]) -> None:
        """Launch on all ranks, and compare."""
        self.rounds[which] += 1
        value = self.rounds[which] << 32 | self.signature
        for rank in range(self.num_ranks):
            words, others = self.words(rank), [r for r in range(self.num_ranks) if r != rank]
            before = words.clone()
            words[which, others] = value
            launch(rank)
            words[which, others] = before[which, others]
        for rank in range(self.num_ranks):
            told = torch.full((self.num_ranks,), value)
            put(self.expected[rank], which * MAX_RANKS * 8, told)
            memory = self.memory(rank)
            state = [*self.rounds, 0, self.signature, memory.error.data_ptr()]
            assert memory.state[:5].tolist() == state
            assert memory.error.tolist() == [0] * 4
            assert torch.equal(self.memories.bytes_of[rank], self.expected[rank]), rank

    def push(
        self,
        x: list[torch.Tensor],
        ids: list[torch.Tensor],
        scores: list[torch.Tensor] | None,
        min_amax: float | None,
        *,
        writes_rows: bool = True,
    ) -> list[torch.Tensor]:
        """Of each rank, int32 [T, P]: which slot of what it gets back each token has."""
        case, received, at = self.case, self.received, self.memory(0).receiving_at
        most, top_k, num_experts, h = case.sizes
        to_row = [torch.full((len(own) + 2, self.num_ranks), UNTOUCHED).int() for own in ids]
        wanted = [z.clone() for z in to_row]
        self.signature = SIGNATURE - self.rounds[TOKENS]
        padding = []  # (rank, begin, end) of what lies behind the codes of a row
        for source, tokens in enumerate(x):
            chosen = ids[source].tolist()
            if min_amax is not None:
                codes, scales = naive.quantize(tokens, 1, False, min_amax)
            for token, own in enumerate(chosen):
                reached, slot = ranks_of(own, num_experts, self.num_ranks), source * most + token
                for rank in range(self.num_ranks):
                    if writes_rows:
                        there = rank * most + token if rank in reached else -1
                        wanted[source][1 + token, rank] = there
                    if rank not in reached:
                        continue
                    row = at + received.rows + slot * received.row_pitch
                    if min_amax is None:
                        put(self.expected[rank], row, tokens[token])
                        continue
                    put(self.expected[rank], row, codes[token].byte())
                    padding.append((rank, row + h, row + received.row_pitch))
                    scale = at + received.scales + slot * received.scale_pitch
                    put(self.expected[rank], scale, scales[token])
            if scores is None:
                continue
            for token, choice in itertools.product(range(most), range(top_k)):
                exists = token < len(tokens)
                expert = chosen[token][choice] if exists else num_experts
                expert = expert if 0 <= expert < num_experts else num_experts
                score = scores[source][token, choice].item() if exists else 0.0
                place = ((source * most + token) * top_k + choice) * 4
                for rank in range(self.num_ranks):
                    target = self.expected[rank]
                    put(target, at + received.ids + place, torch.tensor([expert]).int())
                    put(target, at + received.scores + place, torch.tensor([score]))

        def launch(rank: int) -> None:
            given = ids[rank], None if scores is None else scores[rank]
            rows = to_row[rank][1:-1] if writes_rows else None
            peers_launch.push(
                self.memory(rank),
                self.place(rank),
                case.sizes,
                received,
                self.signature,
                x[rank],
                *given,
                rows,
                min_amax,
            )
            for which, begin, end in padding:  # it may hold anything
                here = slice(GUARD + begin, GUARD + end)
                self.expected[which][here] = self.memories.bytes_of[which][here]

        self.exchange(TOKENS, launch)
        assert all(map(torch.equal, to_row, wanted))
        return [z[1:-1] for z in to_row]

    def slot_ids(self, rank: int) -> torch.Tensor:
        """int32 [P M, k], as it has come."""
        case, at = self.case, self.memory(rank).receiving_at + self.received.ids
        shape = self.num_ranks * case.sizes.max_tokens, case.top_k
        return self.memory(rank).view(at, shape, torch.int32)

    def expect_back(self, rank: int, rows: torch.Tensor | None, has_row: Any) -> None:
        most, h = self.case.sizes.max_tokens, self.case.hidden_size
        at = self.memory(0).returning_at + self.back.rows
        for source, token in itertools.product(range(self.num_ranks), range(most)):
            slot = source * most + token
            if rows is not None and has_row(slot):
                put(self.expected[source], at + (rank * most + token) * h * 2, rows[slot])

    def give_back(
        self, y: list[torch.Tensor] | None, of_choices: list[torch.Tensor] | None
    ) -> None:
        most, top_k, num_experts, _ = self.case.sizes
        ids = [self.slot_ids(rank).clone() for rank in range(self.num_ranks)]
        for rank in range(self.num_ranks):
            chosen = ids[rank].tolist()
            of_slots = [ranks_of(own, num_experts, self.num_ranks) for own in chosen]
            rows = None if y is None else y[rank]
            self.expect_back(rank, rows, lambda slot, r=rank, of=of_slots: r in of[slot])
            if of_choices is not None:
                at = self.memory(0).returning_at + self.back.of_scores
                for source, token in itertools.product(range(self.num_ranks), range(most)):
                    there = at + (rank * most + token) * top_k * 4
                    put(self.expected[source], there, of_choices[rank][source * most + token])

        def launch(rank: int) -> None:
            given = None if y is None else y[rank], ids[rank]
            scores = None if of_choices is None else of_choices[rank]
            place = self.place(rank)
            peers_launch.give_back(self.memory(rank), place, self.case.sizes, *given, scores)

        self.exchange(RESULTS, launch)

    def combine_and_give_back(
        self,
        y: list[torch.Tensor],
        token_to_row: list[torch.Tensor],
        weights: list[torch.Tensor],
    ) -> None:
        for rank in range(self.num_ranks):
            maps, h = token_to_row[rank].tolist(), self.case.hidden_size
            rows = naive.combine(y[rank][:, :h], maps, weights[rank])
            self.expect_back(rank, rows, lambda slot, of=maps: max(of[slot]) >= 0)

        def launch(rank: int) -> None:
            memory = self.memory(rank)
            combine = CombineAndGiveBack(self.place(rank), self.case.sizes, memory.returning_at)
            made = combine.prepare(
                weights[rank],
                self.case.hidden_size,
                y_row_pitch=y[rank].stride(0),
                is_aligned=True,
                sources=CombineSources(*map(Source, range(4))),
                programmatic=True,
            )
            given = y[rank], token_to_row[rank], weights[rank], memory.state
            made.on(-1, tuple(x.data_ptr() for x in given))

        self.exchange(RESULTS, launch)


# ---- Inputs ----


def ids_of(case: Case) -> list[torch.Tensor]:
    """Of anybody and of nobody, among them what int32 or int64 can just hold."""
    limits, found = torch.iinfo(case.ids), []
    nobody = [-1, case.num_experts, case.num_experts + 1, limits.min, limits.max]
    nobody += [2**32, 2**32 + 1, -(2**32)] if case.ids == torch.int64 else []
    for num_tokens in case.tokens:
        shape = num_tokens, case.top_k
        ids = torch.randint(0, case.num_experts, shape)
        others = torch.tensor(nobody)[torch.randint(len(nobody), shape)]
        ids = torch.where(torch.rand(shape) < 0.25, others, ids)
        ids[torch.rand(num_tokens) < 0.15] = case.num_experts  # tokens without an expert
        found.append(ids.to(case.ids))
    return found


def tokens_of(case: Case) -> list[torch.Tensor]:
    found = []
    for num_tokens in case.tokens:
        h = case.hidden_size
        x = placed(num_tokens, h, case.dtype, h + case.pitch, case.offset)
        x.copy_(
            torch.randn(num_tokens, h)
            * torch.logspace(-6, 3, max(num_tokens, 1))[:num_tokens, None]
        )
        found.append(x)
    return found


def scores_of(case: Case) -> list[torch.Tensor]:
    return [torch.randn(n, case.top_k) for n in case.tokens]


def results_of(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rows of slots and what goes with their choices, of each rank."""
    num_slots = len(case.tokens) * case.sizes.max_tokens
    y = [torch.randn(num_slots, case.hidden_size).to(BF16) for _ in case.tokens]
    return y, [torch.randn(num_slots, case.top_k) for _ in case.tokens]


CASES = {
    "one rank": Case((5,), 2, 3, 256),
    "two": Case((7, 4), 2, 8, 264),
    "more tokens than CTAs take at once": Case((150, 90), 3, 8, 264),
    "as many ranks as can": Case((2, 1, 0, 1) * 4, 3, 37, 24),
    "uneven experts": Case((6, 3, 5), 3, 7, 136),
    "as many experts as ranks": Case((3, 2, 4, 1), 2, 4, 8),
    "nobody has a token but one": Case((0, 0, 4), 2, 5, 200),
    "one token": Case((1, 0), 1, 2, 1),
    "very odd": Case((4, 9, 2), 3, 10, 201),
    "long rows": Case((3, 2), 2, 5, 2184),
    "long odd rows": Case((3, 2), 2, 5, 333, torch.float16),
    "many choices": Case((5, 3, 4, 2), 40, 130, 72),
    "FP32, int32": Case((5, 6), 2, 9, 132, torch.float32, torch.int32),
    "FP16, int32": Case((5, 6, 1), 4, 11, 144, torch.float16, torch.int32),
    "wide rows": Case((5, 6), 2, 6, 136, pitch=8),
    "rows that begin anywhere": Case((5, 6), 2, 6, 136, pitch=3, offset=1),
}
by_case = pytest.mark.parametrize("name", CASES)


@by_case
@pytest.mark.parametrize("min_amax", [None, 1e-4, 2.0**-60])
@pytest.mark.parametrize("has_scores", [True, False])
def test_tokens_go_where_their_experts_are(name, min_amax, has_scores):
    case = CASES[name]
    x, ids, scores = tokens_of(case), ids_of(case), scores_of(case)
    host = Host(case, case.hidden_size * (1 if min_amax else case.dtype.itemsize))
    host.push(x, ids, scores if has_scores else None, min_amax)


@by_case
@pytest.mark.parametrize("has_scores", [True, False])
def test_rows_go_back_to_where_tokens_came_from(name, has_scores):
    case = CASES[name]
    x, ids, scores = tokens_of(case), ids_of(case), scores_of(case)
    host = Host(case, case.hidden_size)
    host.push(x, ids, scores, 1e-4)
    y, of_choices = results_of(case)
    host.give_back(y, of_choices if has_scores else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [x for x, case in CASES.items() if case.hidden_size % 8 == 0])
def test_sums_go_back_to_where_tokens_came_from(name, dtype):
    case = CASES[name]
    x, ids, scores = tokens_of(case), ids_of(case), scores_of(case)
    host = Host(case, case.hidden_size)
    host.push(x, ids, scores, 1e-4)
    num_slots, num_rows = len(case.tokens) * case.sizes.max_tokens, 9
    y = [torch.randn(num_rows, case.hidden_size + 8).to(BF16) for _ in case.tokens]
    shape = num_slots, case.top_k
    maps = [torch.randint(-4, num_rows, shape).clamp(min=-1).int() for _ in case.tokens]
    for z in maps:
        z[torch.rand(num_slots) < 0.3] = -1
    weights = [torch.randn(shape[::-1]).to(dtype).T for _ in case.tokens]
    host.combine_and_give_back(y, maps, weights)


def test_exchanges_follow_one_another():
    """As forward and backward of frozen experts do, a forward without tokens, and again."""
    case = CASES["uneven experts"]
    host = Host(case, case.hidden_size)
    for _ in range(3):
        x, ids, scores = tokens_of(case), ids_of(case), scores_of(case)
        y, of_choices = results_of(case)
        host.push(x, ids, scores, 1e-4)
        host.give_back(y, None)
        host.push(x, ids, None, 2.0**-60, writes_rows=False)
        host.give_back(y, of_choices)
        host.push(x, ids, scores, 1e-4)
        host.give_back(None, None)


def test_codes_of_what_is_no_number():
    case = Case((6, 6), 2, 4, 264)
    x = tokens_of(case)
    for rank, value in enumerate((torch.inf, torch.nan)):
        x[rank][1::2, 7] = value
    x[0][2] = 0
    ids = [torch.randint(0, 4, (6, 2)) for _ in x]
    host = Host(case, 264)
    codes, scales = naive.quantize(x[0], 1, False)
    assert scales.isinf().any()
    assert (codes[1] == 127).any()
    host.push(x, ids, scores_of(case), 1e-4)


@given(data=st.data())
def test_any_case(data):
    num_ranks = data.draw(st.integers(1, 5))
    counts = st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks)
    case = Case(
        tuple(data.draw(counts.filter(any))),
        data.draw(st.integers(1, 9)),
        data.draw(st.integers(num_ranks, 40)),
        data.draw(st.integers(1, 300)),
        data.draw(st.sampled_from(DTYPES)),
        data.draw(st.sampled_from([torch.int32, torch.int64])),
        data.draw(st.integers(0, 9)),
        data.draw(st.integers(0, 9)),
    )
    torch.manual_seed(data.draw(st.integers(0, 99)))
    min_amax = data.draw(st.sampled_from([None, 1e-4]))
    width = 1 if min_amax else case.dtype.itemsize
    host = Host(case, case.hidden_size * width)
    host.push(tokens_of(case), ids_of(case), scores_of(case), min_amax)
    host.give_back(*results_of(case))


# ---- Ranks that do not come ----


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (0, [1, 1, 0, 0]),  # nothing
        ((1 << 32) + 5, [2, 1, 1, 5]),  # something else
        (7, [1, 1, 0, 7]),  # what it told before
    ],
)
@pytest.mark.parametrize("which", [TOKENS, RESULTS])
def test_what_is_wrong_is_written_down(which, told, error):
    case = CASES["two"]
    host = Host(case, case.hidden_size)
    if which == RESULTS:
        host.push(tokens_of(case), ids_of(case), scores_of(case), 1e-4)
    host.words(0)[which, 1] = told
    place, memory = host.place(0), host.memory(0)
    if which == TOKENS:
        given = tokens_of(case)[0], ids_of(case)[0], scores_of(case)[0], None, 1e-4
        peers_launch.push(memory, place, case.sizes, host.received, SIGNATURE, *given)
    else:
        y, of_choices = (z[0] for z in results_of(case))
        peers_launch.give_back(memory, place, case.sizes, y, host.slot_ids(0).clone(), of_choices)
    assert memory.error.tolist() == error
    value = 1 << 32 | SIGNATURE
    assert [host.words(rank)[which, 0].item() for rank in range(2)] == [value, value]
