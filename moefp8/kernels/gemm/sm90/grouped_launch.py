"""Describe a grouped GEMM, and the step before it that it may need. M rows, N weights, K; G groups.

Nothing here reads device memory: steps depend on shapes alone, so one CUDA graph serves all
routings.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ...common.blocks import BLOCK, ceil_div
from ...program import Codes, Place, Record, Tensor
from ..interface import GroupLayout, GroupsOfTokens
from ..segments import ZERO_OF_LIST, describe_segments, list_bytes, most_segments
from ..sms import Sms
from . import heuristic
from .config import GemmConfig
from .launch import describe_gemm, has_more_tiles_than_clusters
from .tile_counter import COUNTER_BYTES, describe_tile_counter

LEAST_PRODUCTS = 4e10  # of all groups, from which on a tile counter pays
_MOST_THAT_COUNT = 2 * BLOCK  # rows; a group's upper limit changes no config above this


class Grouped(NamedTuple):
    """The choices of a grouped GEMM that depend on its number of rows.

    tokens: about how many a group has. takes_tiles: see the function of that name.
    """

    config: GemmConfig
    tokens: int
    groups: GroupsOfTokens
    takes_tiles: bool

    @classmethod
    def of(
        cls,
        layout: GroupLayout,
        bounds: Place,
        num_rows: int,
        b: Codes,
        tokens: int | None,
        sms: Sms,
    ) -> "Grouped":
        """num_rows: of a, or of a slab. tokens: `expected_m`."""
        all_groups, n, k = b.data.shape
        num_groups = most = all_groups
        mean, limit = ceil_div(num_rows, num_groups), min(num_rows, _MOST_THAT_COUNT)
        if layout == GroupLayout.ROWS:  # each block of rows counts as a group
            num_groups = most = most_segments(num_rows)
            limit = BLOCK
        elif layout == GroupLayout.SEGMENTS:
            # A group with tokens has a block or more; its last one is half padding on average.
            most = most_segments(num_rows)
            num_groups, mean = min(num_groups, most), max(mean, BLOCK) - BLOCK // 2
        tokens = min(tokens or mean, BLOCK if layout == GroupLayout.ROWS else num_rows)
        config = heuristic.choose_grouped_config(
            tokens, max(tokens, limit), num_groups, n, k, sms.busy, sms.busy == sms.all
        )
        groups = GroupsOfTokens(layout, bounds, all_groups, most, tokens)
        load = heuristic.deciding_load(tokens)
        takes = takes_tiles(config, load, (num_rows, n, k), groups, sms)
        return cls(config, tokens, groups, takes)


def describe_grouped(
    r: Record,
    sms: Sms,
    a: Codes,
    b: Codes,
    d: Tensor,
    layout: GroupLayout,
    bounds: Place,
    *,
    bias: Tensor | None = None,
    expected_m: int | None = None,
    programmatic: bool = False,
) -> None:
    """The GEMM, and before it a step that finds segments or zeroes a tile counter, if need be.

    a, d: with three dimensions. The others are as in `Gemms.grouped`.
    """
    m = d.shape[-2]

    def choose(num_rows: int) -> Grouped:
        return Grouped.of(layout, bounds, num_rows, b, expected_m, sms)

    def largest(most: int) -> int:
        kernels = config, takes
        for num_rows in _deciding_rows(b.data.shape[0], m, most):
            other = choose(num_rows)
            if (other.config, other.takes_tiles) != kernels:
                return num_rows - 1
        return most

    config, tokens, groups, takes = choose(m)
    r.hold(m, largest)
    if layout == GroupLayout.SEGMENTS:
        segments = r.buffer("segments", list_bytes(m))
        describe_segments(r, bounds, segments, m, groups.num_groups, programmatic=programmatic)
        counter = segments.after(ZERO_OF_LIST) if takes else None
        groups = groups._replace(bounds=segments, tile_counter=counter)
    elif takes:
        counter = r.buffer("tile_counter", COUNTER_BYTES)
        describe_tile_counter(r, counter, programmatic=programmatic)
        groups = groups._replace(tile_counter=counter)
    # A step before the GEMM waits for all earlier kernels, so the GEMM may start before it ends.
    may_start = programmatic or bool(r.steps)
    describe_gemm(r, sms, config, a, b, d, tokens, bias=bias, groups=groups, programmatic=may_start)


def _deciding_rows(num_groups: int, after: int, most: int) -> Iterator[int]:
    """All numbers of rows from `after` to `most` where `Grouped` may change, and some others.

    With OFFSETS or MASKED and no `expected_m`, it depends on the deciding load of the groups, and
    on the most rows of a group, up to `_MOST_THAT_COUNT`.
    """
    num_rows = after
    while num_rows < most:
        last = heuristic.deciding_load(ceil_div(num_rows, num_groups)) * num_groups
        is_few = num_rows < _MOST_THAT_COUNT or num_rows == last
        num_rows = num_rows + 1 if is_few else min(last, most)
        yield num_rows


def takes_tiles(
    config: GemmConfig, tokens: int, sizes: tuple[int, int, int], groups: GroupsOfTokens, sms: Sms
) -> bool:
    """Whether clusters take tiles from a counter, and so end together though tiles are unequal.

    A kernel that zeroes the counter takes a microsecond or two, so there must be many products; the
    number comes from timings on an H200, see docs/design/grouped.md.

    tokens: about how many a group has, or with ROWS a block of rows, which counts as a group.
    sizes: M, N, K.
    """
    m, n, k = sizes
    is_rows = groups.layout == GroupLayout.ROWS
    num_groups = groups.num_segments if is_rows else groups.num_groups
    if num_groups * tokens * n * k < LEAST_PRODUCTS or num_groups == 1:
        return False
    if sms.busy <= config.cluster:  # a lone cluster takes all tiles anyway
        return False
    return has_more_tiles_than_clusters(config, num_groups, tokens, (m, n), groups, sms)
