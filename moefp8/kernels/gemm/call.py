"""A call of a GEMM on a Hopper GPU, with tensors of any layout. M tokens, N weights, K; G groups.

Nothing here reads device memory: a launch depends on shapes alone, so one CUDA graph serves all
routings.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..common.blocks import BLOCK, TMA_BYTES, ceil_div, round_up
from ..jit import Kernel, Launch, current_driver
from ..program import (
    Codes,
    Place,
    Record,
    Span,
    Target,
    Tensor,
    kernels_of,
    layouts,
    prepare_launch,
    prepare_launches,
)
from ..targets import target_of
from . import heuristic
from .config import GemmConfig, GroupLayout
from .launch import (
    GroupsOfTokens,
    Sms,
    describe_gemm,
    has_more_tiles_than_clusters,
)
from .operands import Operands, check_sizes, fitting_operands
from .segments import ZERO_OF_LIST, describe_segments, list_bytes, most_segments
from .tile_counter import COUNTER_BYTES, describe_tile_counter

_INPUTS = "a", "a_scales", "b", "b_scales", "d"
_OLDER = frozenset({"b", "b_scales", "bias", "bounds"})
LEAST_PRODUCTS = 4e10  # of all groups, from which on a tile counter pays
_MOST_THAT_COUNT = 2 * BLOCK  # rows; a group's upper limit changes no config above this

_Run = Callable[[int, tuple[int, ...]], None]  # launches on a GPU, with the addresses of a call


class GemmCall(NamedTuple):
    """A GEMM's tensors and options.

    check: raises TypeError or ValueError if the tensors are wrong; called for new layouts.
    bias: [N] in bf16, fp16 or fp32, of a dense GEMM.
    group_layout: what says which group a token belongs to; None: the GEMM is dense.
    bounds: `expert_offsets`, `masked_m` or, for both ROWS and SEGMENTS, `grouped_layout`.
    expected_m: about how many tokens a group has, at least 1; for speed alone. None: the mean.
    programmatic: it may start before the stream's previous kernel ends; it reads a and its scales
        and writes d after that end. Its other tensors must be older than that kernel. No effect
        where an operand is copied.
    d_is_padded: the bytes after a row of d, up to the next multiple of 16, may be written.
    batch_invariant: a row of a dense GEMM has the same bits whatever M is.
    """

    op: str
    check: Callable[[], object]
    operands: Operands
    bias: torch.Tensor | None = None
    group_layout: GroupLayout | None = None
    bounds: torch.Tensor | None = None
    expected_m: int | None = None
    programmatic: bool = False
    d_is_padded: bool = False
    batch_invariant: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors, in the order of a launch's addresses."""
        return [x for x in (*self.operands, self.bias, self.bounds) if x is not None]

    def launch(self) -> None:
        launch_gemm(self.tensors, (self.op, self.group_layout, *self[6:]), lambda: self)


def launch_gemm(
    tensors: Sequence[torch.Tensor], options: Hashable, describe: Callable[[], GemmCall]
) -> None:
    """Launch one kernel on the current stream, or two for some grouped GEMMs; nothing waits for it.

    Operands that TMA cannot address are copied first, and d is written through a copy.

    tensors: `GemmCall.tensors`.
    options: distinguish calls whose tensors have the same layouts.
    describe: makes the call; it is called for new layouts.

    Raises what `GemmCall.check` does, JitError, or OutOfMemoryError.
    """
    driver, addresses = current_driver(), tuple([x.data_ptr() for x in tensors])
    tensor_layouts = tuple([(x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors])
    a, a_scales, b, _, d = addresses[:5]
    aligned = (a | a_scales | b | d) % TMA_BYTES == 0
    key = (options, tensor_layouts, aligned, driver.max_sms)
    run = driver.prepared().get(key)
    if run is None:
        run = _first_launch(describe())
        if run is None:
            return
        driver.keep(key, run)
    run(tensor_layouts[0][3], addresses)


@torch.no_grad()
def _first_launch(call: GemmCall) -> _Run | None:
    """Check; then prepare a launch for these layouts, or run the GEMM with copies for TMA."""
    call.check()
    operands, is_dense = call.operands, call.group_layout is None
    d = operands.d
    if d.numel() == 0 or len(operands.b) == 0:
        return None
    if operands.a.shape[-1] == 0:
        _write_empty_sums(call)
        return None
    fitting = call._replace(
        operands=fitting_operands(operands, call.d_is_padded, keep_d=not is_dense),
        bias=None if call.bias is None else call.bias.contiguous(),
        bounds=None if call.bounds is None else call.bounds.contiguous(),
    )
    if all(x is y for x, y in zip(fitting.tensors, call.tensors, strict=True)):
        return _prepare(call)
    fitting_d = fitting.operands.d
    is_padded = call.d_is_padded or fitting_d is not d
    fitting._replace(programmatic=False, d_is_padded=is_padded).launch()
    if fitting_d is not d:
        d.copy_(fitting_d)
    return None


def _write_empty_sums(call: GemmCall) -> None:
    """Write d for K = 0: the bias, or zeros into the rows of groups."""
    d, bounds = call.operands.d, call.bounds
    if bounds is None:
        d.zero_() if call.bias is None else d.copy_(call.bias)
        return
    row = torch.arange(d.shape[-2], device=d.device)
    rows = bounds >= 0
    if call.group_layout == GroupLayout.MASKED:
        rows = row < bounds[:, None]
    elif call.group_layout == GroupLayout.OFFSETS:
        rows = (row >= bounds[0]) & (row < bounds[-1])
    d.masked_fill_(rows[..., None], 0)


def _prepare(call: GemmCall) -> _Run:
    operands, optional = call.operands, {"bias": call.bias, "bounds": call.bounds}
    others = layouts(**{name: x for name, x in optional.items() if x is not None})
    (m, k), n = operands.a.shape[-2:], operands.b.shape[-2]
    check_sizes(call.op, m, n, k)
    device_index = operands.b.get_device()
    r = Record(target_of(device_index), (*_INPUTS, *others), older=_OLDER)
    a = Codes.of(operands.a, operands.a_scale_inv, "a")
    b = Codes.of(operands.b, operands.b_scale_inv, "b")
    d = Tensor.of(operands.d, "d")
    if call.group_layout is None:
        config = r.target.configs.dense(m, n, k, call.batch_invariant)
        bias = others.get("bias")
        describe_gemm(r, config, a, b, d, m, bias=bias, programmatic=call.programmatic)
    else:
        if call.group_layout != GroupLayout.MASKED:
            a, d = a.batched(), d.batched()
        describe_grouped(
            r,
            a,
            b,
            d,
            call.group_layout,
            others["bounds"].place,
            expected_m=call.expected_m,
            programmatic=call.programmatic,
        )
    if len(r.steps) == 1:
        return prepare_launch(r, device_index).on
    return prepare_launches(r, device_index)


def prepare_dense(config: GemmConfig, operands: Operands, target: Target) -> Launch:
    """A launch of a dense GEMM with that config, for operands that TMA takes, in their order."""
    r = Record(target, _INPUTS, older=_OLDER)
    a = Codes.of(operands.a, operands.a_scale_inv, "a")
    b = Codes.of(operands.b, operands.b_scale_inv, "b")
    d = Tensor.of(operands.d, "d")
    describe_gemm(r, config, a, b, d, len(operands.a), programmatic=False)
    return prepare_launch(r, operands.d.get_device())


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
        groups = GroupsOfTokens(layout, bounds, all_groups, most, config.token_tiles(tokens))
        takes = takes_tiles(config, tokens, (num_rows, n, k), groups, sms)
        return cls(config, tokens, groups, takes)


def describe_grouped(
    r: Record,
    a: Codes,
    b: Codes,
    d: Tensor,
    layout: GroupLayout,
    bounds: Place,
    *,
    expected_m: int | None = None,
    programmatic: bool = False,
) -> None:
    """The GEMM, and before it a step that finds segments or zeroes a tile counter, if need be.

    a, d: with three dimensions. bounds, expected_m, programmatic: as in `GemmCall`.
    """
    m, sms = d.shape[-2], r.target.configs.sms

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
    describe_gemm(r, config, a, b, d, tokens, groups=groups, programmatic=may_start)


def _deciding_rows(num_groups: int, after: int, most: int) -> Iterator[int]:
    """All numbers of rows from `after` to `most` where `Grouped` may change, and some others.

    It depends on the mean of the groups, and on the most rows of a group, up to
    `_MOST_THAT_COUNT`.
    """
    num_rows = after
    while num_rows < most:
        last_of_mean = round_up(num_rows, num_groups)
        is_few = num_rows < _MOST_THAT_COUNT or num_rows == last_of_mean
        num_rows = num_rows + 1 if is_few else min(last_of_mean, most)
        yield num_rows


def grouped_kernels(
    target: Target, most_rows: int, num_groups: int, n: int, k: int
) -> Iterator[Kernel]:
    """The kernels of a grouped GEMM with OFFSETS, without `expected_m`, for up to `most_rows`."""

    def describe(span: Span) -> Record:
        r, m = Record(target, (*_INPUTS, "bounds"), older=_OLDER, span=span), span.first
        b, d = Codes.contiguous("b", num_groups, n, k), r.matrices("out", (1, m, n), torch.bfloat16)
        describe_grouped(r, r.codes("rows", (1, m, k)), b, d, GroupLayout.OFFSETS, Place("bounds"))
        return r

    return kernels_of(describe, most_rows)


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
