"""What the tests of the GEMMs share: which tokens are of which group, and operands.

All sums are exact, in any order, so that results are compared bit by bit. The module imports no
more than `sanitizer` may need.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch

from moefp8.kernels import (
    fp8_gemm_nt,
    jit,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    num_blocks,
    tma_aligned,
)
from moefp8.kernels.gemm import grouped
from moefp8.kernels.gemm.call import GemmCall
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.operands import Operands
from moefp8.kernels.gemm.sm90 import grouped_launch
from tests import naive

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

UNTOUCHED = 77.0  # what d holds before
LAYOUTS = (None, *GroupLayout)  # None: a dense GEMM
_ALIGNMENT = 128  # groups begin at multiples of it where rows name them


def launch_grouped_gemm(op, layout, operands, bounds, expected_m=None, **options) -> None:
    """The launcher of the grouped GEMMs, with options that their ops do not have."""
    made = GemmCall(op, lambda: None, operands, None, layout, bounds, expected_m)
    made._replace(**options).launch()


class Segment(NamedTuple):
    """The rows of a group: from `begin` to `end`, in one of the matrices of tokens."""

    group: int
    matrix: int
    begin: int
    end: int


class Routing(NamedTuple):
    """layout: None for a dense GEMM, which is a single group with all tokens."""

    layout: GroupLayout | None
    num_groups: int
    num_tokens: int  # rows of a, or of each of its matrices
    bounds: list[int]
    segments: list[Segment]

    def rows_of_a(self) -> tuple[int, ...]:
        masked = self.layout == GroupLayout.MASKED
        return (self.num_groups, self.num_tokens) if masked else (self.num_tokens,)

    def matrices_of_b(self) -> tuple[int, ...]:
        """What precedes the shape of one matrix of weights."""
        return () if self.layout is None else (self.num_groups,)

    def is_of_group(self) -> torch.Tensor:
        """Which rows of a and d are of a group."""
        result = torch.zeros(self.rows_of_a(), dtype=torch.bool)
        for _, matrix, begin, end in self.segments:
            (result[matrix] if self.layout == GroupLayout.MASKED else result)[begin:end] = True
        return result

    def bounds_on(self, device: str = "cpu") -> torch.Tensor:
        return torch.tensor(self.bounds, dtype=torch.int32, device=device)


def dense(num_tokens: int) -> Routing:
    return Routing(None, 1, num_tokens, [], [Segment(0, 0, 0, num_tokens)])


def by_offsets(counts: Sequence[int], before: int = 0, after: int = 0) -> Routing:
    """before, after: how many rows of no group there are."""
    bounds = [before]
    for count in counts:
        bounds.append(bounds[-1] + count)
    segments = [Segment(i, 0, bounds[i], bounds[i + 1]) for i in range(len(counts))]
    return Routing(GroupLayout.OFFSETS, len(counts), bounds[-1] + after, bounds, segments)


def masked(counts: Sequence[int], spare: int = 0) -> Routing:
    """spare: how many rows the matrices have more than the largest group."""
    segments = [Segment(i, i, 0, count) for i, count in enumerate(counts)]
    return Routing(GroupLayout.MASKED, len(counts), max(counts) + spare, list(counts), segments)


def by_rows(runs: Sequence[tuple[int, int]], num_groups: int, after: int = 0) -> Routing:
    """runs: (group or -1, rows); each begins at a multiple of 128. after: rows of no group."""
    bounds: list[int] = []
    segments = []
    for group, count in runs:
        bounds += [-1] * (-len(bounds) % _ALIGNMENT)
        if group >= 0:
            segments.append(Segment(group, 0, len(bounds), len(bounds) + count))
        bounds += [group] * count
    bounds += [-1] * after
    return Routing(GroupLayout.ROWS, num_groups, len(bounds), bounds, segments)


def routing_of(layout: GroupLayout | None, counts: Sequence[int], spare: int = 3) -> Routing:
    """A routing of this layout, with `spare` rows of no group where there is place for them."""
    if layout is None:
        return dense(sum(counts))
    if layout == GroupLayout.OFFSETS:
        return by_offsets(counts, spare, spare)
    if layout == GroupLayout.MASKED:
        return masked(counts, spare)
    return by_rows(list(enumerate(counts)), len(counts), spare)._replace(layout=layout)


def routings_of_384_rows(layout: GroupLayout) -> list[Routing]:
    """Three groups of any sizes, and always as many rows of a."""
    if layout == GroupLayout.SEGMENTS:
        return [x._replace(layout=layout) for x in routings_of_384_rows(GroupLayout.ROWS)]
    return {
        GroupLayout.OFFSETS: [
            by_offsets((384, 0, 0)),
            by_offsets((0, 0, 384)),
            by_offsets((0, 0, 0), 0, 384),
            by_offsets((1, 2, 1), 77, 303),
            by_offsets((127, 130, 127)),
        ],
        GroupLayout.MASKED: [
            masked((384, 0, 0)),
            masked((384, 384, 384)),
            masked((0, 0, 0), 384),
            masked((1, 2, 200), 184),
        ],
        GroupLayout.ROWS: [
            by_rows([(1, 384)], 3),
            by_rows([(2, 100), (0, 128), (1, 1)], 3, 127),
            by_rows([(-1, 384)], 3),
            by_rows([(0, 128), (-1, 128), (0, 128)], 3),
        ],
    }[layout]


def routings() -> "SearchStrategy[Routing]":
    """Groups may have no token, and rows no group; groups with names come in any order."""
    from hypothesis import strategies as st

    count = st.sampled_from((0, 0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 129, 200))
    counts, spare = st.lists(count, min_size=1, max_size=5), st.sampled_from((0, 1, 2, 5))
    runs = st.lists(st.tuples(st.integers(-1, 3), count), min_size=1, max_size=4)
    named = st.builds(by_rows, runs, st.just(4), spare)
    return st.one_of(
        st.builds(by_offsets, counts, spare, spare),
        st.builds(masked, counts, spare),
        named,
        named.map(lambda routing: routing._replace(layout=GroupLayout.SEGMENTS)),
    )


def all_routings() -> "SearchStrategy[Routing]":
    """What `routings` draws, and dense ones."""
    from hypothesis import strategies as st

    num_tokens = st.sampled_from((0, 1, 2, 7, 8, 9, 17, 63, 64, 65, 129, 200, 300))
    return st.one_of(st.builds(dense, num_tokens), routings())


def operands(routing: Routing, n: int, k: int) -> Operands:
    """Small whole numbers with powers of two as scales; NaN in all tokens of no group."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape).float().to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape).float().exp2()

    rows, groups = routing.rows_of_a(), routing.matrices_of_b()
    a, a_scale_inv = numbers(*rows, k), scales(*rows, num_blocks(k))
    of_none = ~routing.is_of_group()[..., None]
    a = a.view(torch.uint8).masked_fill(of_none, 0x7F).view(a.dtype)
    a_scale_inv = tma_aligned(a_scale_inv.masked_fill(of_none, float("nan")))
    b, b_scale_inv = numbers(*groups, n, k), scales(*groups, num_blocks(n), num_blocks(k))
    d = torch.full((*rows, n), UNTOUCHED, dtype=torch.bfloat16)
    return Operands(a, a_scale_inv, b, b_scale_inv, d)


def bias_of(dtype: torch.dtype | None, n: int) -> torch.Tensor | None:
    """Whole numbers; None: no bias."""
    return None if dtype is None else torch.randint(-99, 100, (n,)).to(dtype)


def expected_of(routing: Routing, made: Operands, bias: torch.Tensor | None = None) -> torch.Tensor:
    """All of d, in FP64 rounded once."""
    result = torch.full(made.d.shape, UNTOUCHED, dtype=torch.bfloat16, device=made.d.device)
    for segment in routing.segments:
        *pairs, d = operands_of(segment, made._replace(d=result))
        y = naive.gemm(pairs[:2], pairs[2:])
        d.copy_(y if bias is None else y + bias.double())
    return result


def operands_of(segment: Segment, made: Operands) -> Operands:
    """The part of a dense GEMM that they have in a segment's; views."""
    group, matrix, begin, end = segment
    a, a_scale_inv, d = (
        (x[matrix] if x.ndim == 3 else x)[begin:end] for x in (made.a, made.a_scale_inv, made.d)
    )
    b, b_scale_inv = (x[group] if x.ndim == 3 else x for x in (made.b, made.b_scale_inv))
    return Operands(a, a_scale_inv, b, b_scale_inv, d)


@contextmanager
def only_groups_are_written(routing: Routing, d: torch.Tensor) -> Iterator[None]:
    """No more than rows of groups is written of the memory of d. At the end they are filled."""
    around = d.as_strided((d.untyped_storage().nbytes() // 2,), (1,), 0)
    before = around.clone()
    yield
    d.masked_fill_(routing.is_of_group()[..., None].to(d.device), UNTOUCHED)
    assert torch.equal(around.view(torch.uint8), before.view(torch.uint8))


def run_op(
    routing: Routing,
    made: Operands,
    bounds: torch.Tensor,
    expected_m: int = 4,
    bias: torch.Tensor | None = None,
) -> None:
    """Call the op by its public name."""
    a, b, d = made[:2], made[2:4], made.d
    if routing.layout is None:
        fp8_gemm_nt(a, b, d, bias=bias)
    elif routing.layout == GroupLayout.MASKED:
        m_grouped_fp8_gemm_nt_masked(a, b, d, bounds, expected_m)
    elif routing.layout in (GroupLayout.ROWS, GroupLayout.SEGMENTS):
        with finding_segments(routing.layout == GroupLayout.SEGMENTS):
            m_grouped_fp8_gemm_nt_contiguous(a, b, d, bounds)
    else:
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=bounds)


def finding_segments(always: bool) -> AbstractContextManager[object]:
    """Whether a kernel finds the segments of `grouped_layout`: always, or never."""
    return mock.patch.object(grouped, "finds_segments", return_value=always)


@contextmanager
def taking_tiles(always: bool) -> Iterator[None]:
    """Whether clusters take tiles from a counter: always, or never.

    What this thread has prepared is forgotten, before and after.
    """
    prepared = jit.current_driver().prepared()
    prepared.clear()
    try:
        with mock.patch.object(grouped_launch, "takes_tiles", return_value=always):
            yield
    finally:
        prepared.clear()


def launch(
    routing: Routing,
    made: Operands,
    bounds: torch.Tensor | None = None,
    expected_m: int = 4,
    bias: torch.Tensor | None = None,
    **options: bool,
) -> None:
    """Call the launcher of all GEMMs, with options that ops do not have; it checks nothing."""
    what = GemmCall("op", lambda: None, made, bias, **options)
    if routing.layout is not None:
        bounds = routing.bounds_on(made.a.device) if bounds is None else bounds
        what = what._replace(group_layout=routing.layout, bounds=bounds, expected_m=expected_m)
    what.launch()


def launch_and_compare(
    routing: Routing,
    made: Operands,
    bounds: torch.Tensor | None = None,
    expected_m: int = 4,
    bias: torch.Tensor | None = None,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    **options: bool,
) -> None:
    """within: what surrounds the launch."""
    bounds = routing.bounds_on(made.a.device) if bounds is None else bounds
    expected = expected_of(routing, made, bias)
    made.d.fill_(UNTOUCHED)
    with only_groups_are_written(routing, made.d):
        with within():
            launch(routing, made, bounds, expected_m, bias, **options)
        assert torch.equal(made.d, expected)
