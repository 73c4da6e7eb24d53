"""Ranks whose memory is on the CPU, and the references of what the exchange's kernels do there.

Ranks run one after the other. So that none waits, the others' words, and what they give back, lie
there before it runs, and are taken away afterwards: what a rank writes must come from itself.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moefp8.distributed.expert_parallel import give_back, push
from moefp8.distributed.expert_parallel.give_back import CombineAndGiveBack
from moefp8.distributed.expert_parallel.peer_memory import (
    MAX_CHUNKS,
    MAX_RANKS,
    GivenBack,
    PeerMemory,
    Received,
)
from moefp8.distributed.expert_parallel.ranks import Member, Sizes
from moefp8.kernels.program import Place, Word, layouts
from tests import naive
from tests.distributed.expert_parallel.peers_cases import GUARD, HostMemories
from tests.records import run

BF16 = torch.bfloat16
SIGNATURE = 2**32 - 6
NO_RESULTS = 2**32 - 1  # in place of a signature, where a turn ends without results
UNTOUCHED = -77


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
        self.back = GivenBack.of(self.num_ranks, case.sizes.max_tokens, h, case.top_k)
        self.memories = HostMemories(self.num_ranks, self.received.size, self.back.size)
        self.expected = [x.clone() for x in self.memories.bytes_of]
        self.reached: list[list[set[int]]] = []
        self.scores: list[torch.Tensor] = []
        self.num_pushed, self.num_given_back, self.turn = 0, 0, 0

    @property
    def signature(self) -> int:
        return self.turn % 2**32

    def member(self, rank: int) -> Member:
        return Member(rank, self.num_ranks, 10**6)

    def memory(self, rank: int) -> PeerMemory:
        return self.memories.of[rank]

    def words(self, rank: int) -> torch.Tensor:
        """[1 + MAX_CHUNKS, MAX_RANKS]: of tokens, then of each chunk of results."""
        length = (1 + MAX_CHUNKS) * MAX_RANKS * 8
        return self.memory(rank).tensor[:length].view(torch.int64).view(-1, MAX_RANKS)

    def launch(self, rank: int, values: dict[int, int], launch: Callable[[int], None]) -> None:
        """Launch where all others have told these values, by word."""
        words, others = self.words(rank), [r for r in range(self.num_ranks) if r != rank]
        before = words.clone()
        for word, value in values.items():
            words[word, others] = value
        launch(rank)
        words[:, others] = before[:, others]

    def check(self, values: dict[int, int]) -> None:
        """Every rank has told all others these values, and written what was expected of it."""
        for rank in range(self.num_ranks):
            for (word, value), other in itertools.product(values.items(), range(self.num_ranks)):
                if other != rank:
                    put(self.expected[rank], (word * MAX_RANKS + other) * 8, torch.tensor([value]))
            memory = self.memory(rank)
            state = [self.num_pushed, self.num_given_back, self.turn]
            assert memory.state[:4].tolist() == [*state, memory.error.data_ptr()]
            assert not memory.state[4 + MAX_RANKS :].any()  # counters are as before
            assert memory.error.tolist() == [0] * 4
            assert torch.equal(self.memories.bytes_of[rank], self.expected[rank]), rank

    # ---- Tokens ----

    def push(
        self,
        x: list[torch.Tensor],
        ids: list[torch.Tensor],
        scores: list[torch.Tensor] | None,
        min_amax: float | None,
    ) -> None:
        case, received, at = self.case, self.received, self.memory(0).receiving_at
        most, top_k, num_experts, h = case.sizes
        self.turn = (self.num_pushed << 32) + SIGNATURE - self.num_pushed
        self.scores = self.scores if scores is None else scores
        chosen = [z.tolist() for z in ids]
        self.reached = [[ranks_of(z, num_experts, self.num_ranks) for z in own] for own in chosen]
        padding = []  # (rank, begin, end) of what lies behind the codes of a row
        for source, tokens in enumerate(x):
            if min_amax is not None:
                codes, scales = naive.quantize(tokens, 1, False, min_amax)
            bits = [sum(1 << rank for rank in own) for own in self.reached[source]]
            place = self.memory(0).returning_at
            put(self.expected[source], place + self.back.reached, torch.tensor(bits).int())
            if scores is not None:
                put(self.expected[source], place + self.back.scores, scores[source])
            for token, reached in enumerate(self.reached[source]):
                slot = source * most + token
                for rank in reached:
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
                expert = chosen[source][token][choice] if exists else num_experts
                expert = expert if 0 <= expert < num_experts else num_experts
                score = scores[source][token, choice].item() if exists else 0.0
                place = ((source * most + token) * top_k + choice) * 4
                for rank in range(self.num_ranks):
                    target = self.expected[rank]
                    put(target, at + received.ids + place, torch.tensor([expert]).int())
                    put(target, at + received.scores + place, torch.tensor([score]))

        def launch(rank: int) -> None:
            given = x[rank], ids[rank], None if scores is None else scores[rank], min_amax
            of = self.memory(rank), self.member(rank), case.sizes, received, self.turn
            push.push(*of, *given)
            for which, begin, end in padding:  # it may hold anything
                here = slice(GUARD + begin, GUARD + end)
                self.expected[which][here] = self.memories.bytes_of[which][here]

        values = {}
        if self.num_given_back < self.num_pushed:  # the turn before has brought no results
            self.num_given_back += 1
            values[1] = self.num_given_back << 32 | NO_RESULTS
        self.num_pushed += 1
        values[0] = self.num_pushed << 32 | self.signature
        for rank in range(self.num_ranks):
            self.launch(rank, values, launch)
        self.check(values)

    def slots_of(self, rank: int) -> slice:
        most = self.case.sizes.max_tokens
        return slice(rank * most, (rank + 1) * most)

    def slot_ids(self, rank: int) -> torch.Tensor:
        """int32 [P M, k], as it has come."""
        case, at = self.case, self.memory(rank).receiving_at + self.received.ids
        shape = self.num_ranks * case.sizes.max_tokens, case.top_k
        return self.memory(rank).view(at, shape, torch.int32)

    # ---- Results ----

    def give_back(self, y: list[torch.Tensor], of_choices: list[torch.Tensor] | None) -> None:
        """y, of_choices: of each rank [P M, H] and [P M, k]."""
        ids = [self.slot_ids(rank).clone() for rank in range(self.num_ranks)]
        for rank, own in enumerate(ids):  # which others may overwrite
            own[self.slots_of(rank)] = UNTOUCHED

        def launch(rank: int, out: Any, out_of_choices: Any) -> None:
            scores = None if of_choices is None else of_choices[rank]
            of = self.memory(rank), self.member(rank), self.case.sizes, self.turn
            give_back.give_back(*of, y[rank], ids[rank], scores, out, out_of_choices)

        self._return(y, of_choices, launch)

    def combine_and_give_back(
        self,
        y: list[torch.Tensor],
        token_to_row: list[torch.Tensor],
        weights: list[torch.Tensor],
        of_choices: list[torch.Tensor] | None = None,
    ) -> None:
        """weights: of each rank [P M, k]; without of_choices, those of its own slots are the scores
        that it pushed."""
        h, top_k = self.case.hidden_size, self.case.top_k
        rows = []
        for rank, (z, maps) in enumerate(zip(y, token_to_row, strict=True)):
            of_slots, own = weights[rank].float(), self.slots_of(rank)
            if of_choices is None:
                weights[rank][own] = torch.nan  # which others may overwrite
                of_slots[own.start : own.start + len(self.scores[rank])] = self.scores[rank]
            rows.append(naive.combine(z[:, :h], maps.tolist(), of_slots))

        def launch(rank: int, out: Any, out_of_choices: Any) -> None:
            memory = self.memory(rank)
            both = torch.empty(len(out) * (2 * h + 4 * top_k) + 16, dtype=torch.uint8)
            both = both[-both.data_ptr() % 16 :]
            places = len(out), memory.returning_at, memory.state.data_ptr()
            made = CombineAndGiveBack(self.member(rank), self.case.sizes, *places)
            end = len(out) * 2 * h
            combine(
                made,
                y[rank],
                token_to_row[rank],
                weights[rank],
                both[:end].view(BF16).view(len(out), h),
                self.turn,
                None if of_choices is None else of_choices[rank],
            )
            out.copy_(both[:end].view(BF16).view_as(out))
            if of_choices is not None:
                found = both[end : end + len(out) * 4 * top_k]
                out_of_choices.copy_(found.view(torch.float32).view_as(out_of_choices))

        self._return(rows, of_choices, launch)

    def _return(
        self,
        rows: list[torch.Tensor],
        of_choices: list[torch.Tensor] | None,
        launch: Callable[[int, Any, Any], None],
    ) -> None:
        """rows, of_choices: what each rank gives back for each slot, if it is reached."""
        most, top_k, _, h = self.case.sizes
        at = self.memory(0).returning_at
        given: list[tuple[int, int, int, torch.Tensor]] = []  # from, to, where, what
        for source, own in enumerate(self.reached):
            for (token, reached), rank in itertools.product(enumerate(own), range(self.num_ranks)):
                if rank not in reached or rank == source:  # its own results do not travel
                    continue
                there, slot = rank * most + token, source * most + token
                row = at + self.back.rows + there * h * 2
                given.append((rank, source, row, rows[rank][slot]))
                if of_choices is not None:
                    place = at + self.back.grad_scores + there * top_k * 4
                    given.append((rank, source, place, of_choices[rank][slot]))
        for _, source, place, what in given:
            put(self.expected[source], place, what)

        self.num_given_back += 1
        value = self.num_given_back << 32 | self.signature
        counts = set()
        for rank, num_tokens in enumerate(self.case.tokens):
            before = self.memories.bytes_of[rank].clone()
            others = [z for z in given if z[1] == rank]
            for _, _, place, what in others:
                put(self.memories.bytes_of[rank], place, what)
            out = torch.full((num_tokens + 2, h), UNTOUCHED).to(BF16)
            out_of_choices = torch.full((num_tokens + 2, top_k), float(UNTOUCHED))
            wanted = out.clone(), out_of_choices.clone()
            wanted[0][1:-1] = self._sum(rank, rows, h).to(BF16)
            if of_choices is not None:
                wanted[1][1:-1] = self._sum(rank, of_choices, top_k)
            sums = placed_at_16(out), out_of_choices
            self.launch(
                rank,
                dict.fromkeys(range(1, 1 + MAX_CHUNKS), value),
                lambda r, z=sums: launch(r, z[0][1:-1], None if of_choices is None else z[1][1:-1]),
            )
            assert torch.equal(sums[0], wanted[0]), rank
            assert torch.equal(sums[1], wanted[1]), rank
            for _, _, place, what in others:
                here = slice(GUARD + place, GUARD + place + what.numel() * what.itemsize)
                self.memories.bytes_of[rank][here] = before[here]
            told = [self.words(other)[1:, rank] for other in range(self.num_ranks) if other != rank]
            counts |= {int((words == value).sum()) for words in told}
        (num_chunks,) = counts or {0}
        self.check(dict.fromkeys(range(1, 1 + num_chunks), value))

    def _sum(self, rank: int, of_slots: list[torch.Tensor], width: int) -> torch.Tensor:
        """fp32 [T, width] of what all ranks give for this rank's tokens, in their order."""
        total = torch.zeros(self.case.tokens[rank], width)
        for token, reached in enumerate(self.reached[rank]):
            for other in sorted(reached):
                total[token] += of_slots[other][rank * self.case.sizes.max_tokens + token].float()
        return total


def combine(
    made: CombineAndGiveBack,
    y: torch.Tensor,
    token_to_row: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    turn: int,
    grad_weights: torch.Tensor | None = None,
) -> None:
    """Launch what `made` describes."""
    tensors = layouts(y=y, weights=weights, out=out)
    maps, word = Place("token_to_row"), Word("turn")
    grads = None if grad_weights is None else Place("grad_weights")
    run(
        lambda r: made.describe(r, token_to_row=maps, **tensors, grad_weights=grads, word=word),
        y=y,
        token_to_row=token_to_row,
        weights=weights,
        out=out,
        turn=turn,
        grad_weights=grad_weights,
    )


def placed_at_16(x: torch.Tensor) -> torch.Tensor:
    """The same rows, of which the second one begins at a multiple of 16 bytes."""
    room = torch.empty(x.numel() + 16, dtype=x.dtype)
    begin = -(room.data_ptr() + x.stride(0) * x.itemsize) % 16 // x.itemsize
    return room[begin : begin + x.numel()].view_as(x).copy_(x)
