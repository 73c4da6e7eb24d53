"""What the tests of the grouped GEMMs share: which tokens are of which group, and operands.

Imports no more than `sanitizer_cases` may need. All sums are exact, in any order: their results are
compared bit by bit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from moefp8.kernels import (
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    num_blocks,
    tma_aligned,
)
from moefp8.kernels.gemm.call import GemmCall, launch_gemm
from moefp8.kernels.gemm.config import GroupLayout
from moefp8.kernels.gemm.operands import Operands

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

UNTOUCHED = 77.0  # what d holds before
_ALIGNMENT = 128  # of groups named by rows


def launch_grouped_gemm(op, layout, operands, bounds, expected_m=None, **options) -> None:
    """The launcher of the grouped GEMMs, with options that their ops do not have."""
    call = GemmCall(op, lambda: None, operands, None, layout, bounds, expected_m)
    launch_gemm(call._replace(**options))


class Segment(NamedTuple):
    """Rows from `begin` to `end`, in that of the matrices of tokens."""

    group: int
    matrix: int
    begin: int
    end: int


class Routing(NamedTuple):
    layout: GroupLayout
    num_groups: int
    num_tokens: int  # rows of a, or of each of its matrices
    bounds: list[int]
    segments: list[Segment]

    def rows_of_a(self) -> tuple[int, ...]:
        masked = self.layout == GroupLayout.MASKED
        return (self.num_groups, self.num_tokens) if masked else (self.num_tokens,)

    def is_of_group(self) -> torch.Tensor:
        """Which rows of a and d are."""
        result = torch.zeros(self.rows_of_a(), dtype=torch.bool)
        for _, matrix, begin, end in self.segments:
            (result[matrix] if self.layout == GroupLayout.MASKED else result)[begin:end] = True
        return result

    def bounds_on(self, device: str = "cpu") -> torch.Tensor:
        return torch.tensor(self.bounds, dtype=torch.int32, device=device)


def by_offsets(counts: Sequence[int], before: int = 0, after: int = 0) -> Routing:
    """before, after: rows of no group."""
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


def routing_of(layout: GroupLayout, counts: Sequence[int], spare: int = 3) -> Routing:
    """Of this layout, with `spare` rows of no group where it has place for them."""
    if layout == GroupLayout.OFFSETS:
        return by_offsets(counts, spare, spare)
    if layout == GroupLayout.MASKED:
        return masked(counts, spare)
    return by_rows(list(enumerate(counts)), len(counts), spare)


def routings() -> "SearchStrategy[Routing]":
    """With groups of no token, rows of no group, and groups in any order where they have names."""
    from hypothesis import strategies as st

    count = st.sampled_from((0, 0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 129, 200))
    counts, spare = st.lists(count, min_size=1, max_size=5), st.sampled_from((0, 1, 2, 5))
    runs = st.lists(st.tuples(st.integers(-1, 3), count), min_size=1, max_size=4)
    return st.one_of(
        st.builds(by_offsets, counts, spare, spare),
        st.builds(masked, counts, spare),
        st.builds(by_rows, runs, st.just(4), spare),
    )


def operands(routing: Routing, n: int, k: int) -> Operands:
    """Small whole numbers with powers of two as scales; NaN in all tokens of no group."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape).float().to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape).float().exp2()

    rows, groups = routing.rows_of_a(), routing.num_groups
    a, a_scale_inv = numbers(*rows, k), scales(*rows, num_blocks(k))
    of_none = ~routing.is_of_group()[..., None]
    a = a.view(torch.uint8).masked_fill(of_none, 0x7F).view(a.dtype)
    a_scale_inv = tma_aligned(a_scale_inv.masked_fill(of_none, float("nan")))
    b, b_scale_inv = numbers(groups, n, k), scales(groups, num_blocks(n), num_blocks(k))
    d = torch.full((*rows, n), UNTOUCHED, dtype=torch.bfloat16)
    return Operands(a, a_scale_inv, b, b_scale_inv, d)


def expected_of(routing: Routing, made: Operands) -> torch.Tensor:
    """All of d, in FP64 rounded once."""
    a, a_scale_inv, b, b_scale_inv, d = made
    (n, k), block = b.shape[1:], 128
    result = torch.full(d.shape, UNTOUCHED, dtype=torch.bfloat16, device=d.device)
    for group, matrix, begin, end in routing.segments:
        x, x_scale_inv, y = (
            (z[matrix] if z.ndim == 3 else z)[begin:end] for z in (a, a_scale_inv, result)
        )
        tokens = x.double() * x_scale_inv.repeat_interleave(block, 1)[:, :k]
        scales = b_scale_inv[group].repeat_interleave(block, 0)[:n].repeat_interleave(block, 1)
        y.copy_(tokens @ (b[group].double() * scales[:, :k]).T)
    return result


@contextmanager
def only_groups_are_written(routing: Routing, d: torch.Tensor) -> Iterator[None]:
    """Of the memory that d is a part of, no more than the rows of groups. Then they are filled."""
    around = d.as_strided((d.untyped_storage().nbytes() // 2,), (1,), 0)
    before = around.clone()
    yield
    d.masked_fill_(routing.is_of_group()[..., None].to(d.device), UNTOUCHED)
    assert torch.equal(around.view(torch.uint8), before.view(torch.uint8))


def run_op(routing: Routing, made: Operands, bounds: torch.Tensor, expected_m: int = 4) -> None:
    """By the public names."""
    a, b, d = made[:2], made[2:4], made.d
    if routing.layout == GroupLayout.MASKED:
        m_grouped_fp8_gemm_nt_masked(a, b, d, bounds, expected_m)
    elif routing.layout == GroupLayout.ROWS:
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, bounds)
    else:
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=bounds)


def launch(
    routing: Routing,
    made: Operands,
    bounds: torch.Tensor | None = None,
    expected_m: int = 4,
    **options: bool,
) -> None:
    bounds = routing.bounds_on(made.a.device) if bounds is None else bounds
    launch_grouped_gemm("op", routing.layout, made, bounds, expected_m, **options)


def launch_and_compare(
    routing: Routing,
    made: Operands,
    bounds: torch.Tensor | None = None,
    expected_m: int = 4,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    **options: bool,
) -> None:
    """within: what surrounds the launch."""
    bounds = routing.bounds_on(made.a.device) if bounds is None else bounds
    expected = expected_of(routing, made)
    made.d.fill_(UNTOUCHED)
    with only_groups_are_written(routing, made.d):
        with within():
            launch(routing, made, bounds, expected_m, **options)
        assert torch.equal(made.d, expected)
