"""A call of a GEMM on a Hopper GPU, with tensors that may have any layout.

Nothing here reads what the device holds: a launch depends on shapes alone, and so one CUDA graph
serves all routings.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..common.blocks import BLOCK, TMA_BYTES, ceil_div
from ..common.prepared import Launches
from ..jit import Kernel, Launch, Source, current_driver
from . import heuristic, tile_counter
from .config import GemmConfig, GroupLayout
from .launch import (
    GemmSources,
    GroupsOfTokens,
    Sms,
    has_more_tiles_than_clusters,
    kernel_of,
    prepare_gemm,
)
from .operands import Operands, check_sizes, fitting_operands
from .segments import ZERO_OF_LIST, list_bytes, most_segments, prepare_segments
from .tile_counter import COUNTER_BYTES, prepare_tile_counter
from .tuned import ConfigSource, config_source_of

_SOURCES = GemmSources(*map(Source, range(5)))
_BOUNDS, _MEMORY = Source(5), Source(6)  # memory of a call, which grouped GEMMs may have
LEAST_PRODUCTS = 4e10  # of all groups, from which on a tile counter pays

_Run = Callable[[int, tuple[int, ...]], None]  # launches on a GPU, with the addresses of a call


class GemmCall(NamedTuple):
    """What a GEMM is given.

    check: raises TypeError or ValueError if the tensors are wrong; called for new layouts.
    bias: [N] in bf16, fp16 or fp32, of a dense GEMM.
    group_layout: what tells which group a token is of; None: the GEMM is dense.
    bounds: `expert_offsets`, `masked_m` or, for both ROWS and SEGMENTS, `grouped_layout`.
    expected_m: about how many tokens a group has, at least 1; only speed heeds it. None: the mean.
    programmatic: it may be launched before the stream's previous kernel ends; then it reads a, its
        scales and writes d only after that end. All else must be older than that kernel. It has
        no effect where an operand is copied.
    d_is_padded: what follows a row of d, up to the next 16 bytes, may be written.
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
        launch_gemm(self.tensors, (self.op, *self[4:5], *self[6:]), lambda: self)


def launch_gemm(
    tensors: Sequence[torch.Tensor], options: Hashable, describe: Callable[[], GemmCall]
) -> None:
    """Launch one kernel on the current stream, or two for some grouped GEMMs; nothing waits for it.

    Operands that TMA cannot address are copied first, and d is written through a copy.

    tensors: `GemmCall.tensors`.
    options: tells apart calls whose tensors lie alike.
    describe: called for layouts that are new.

    Raises what `GemmCall.check` does, JitError, or OutOfMemoryError.
    """
    driver, addresses = current_driver(), tuple([x.data_ptr() for x in tensors])
    layouts = tuple([(x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors])
    of_a, of_a_scales, of_b, _, of_d = addresses[:5]
    aligned = (of_a | of_a_scales | of_b | of_d) % TMA_BYTES == 0
    key = (options, layouts, aligned, driver.max_sms)
    run = driver.prepared().get(key)
    if run is None:
        run = _first_launch(describe())
        if run is None:
            return
        driver.keep(key, run)
    run(layouts[0][3], addresses)


@torch.no_grad()
def _first_launch(call: GemmCall) -> _Run | None:
    """Check; then prepare a launch for these layouts, or run the GEMM with copies that fit."""
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
    twin = fitting.operands.d
    is_padded = call.d_is_padded or twin is not d
    fitting._replace(programmatic=False, d_is_padded=is_padded).launch()
    if twin is not d:
        d.copy_(twin)
    return None


def _write_empty_sums(call: GemmCall) -> None:
    """Write d for K = 0: the bias, or zeros into the rows that are of a group."""
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
    layout, operands = call.group_layout, call.operands
    if layout is not None and layout != GroupLayout.MASKED:
        a, a_scale_inv, b, b_scale_inv, d = operands
        operands = Operands(a[None], a_scale_inv[None], b, b_scale_inv, d[None])
    (m, k), n = operands.a.shape[-2:], operands.b.shape[-2]
    check_sizes(call.op, m, n, k)
    configs = config_source_of(operands.b.get_device())
    if layout is None:
        return prepare_gemm(
            configs.dense(m, n, k, call.batch_invariant),
            operands,
            _SOURCES._replace(bias=None if call.bias is None else Source(5)),
            configs.sms,
            m,
            bias=None if call.bias is None else call.bias.dtype,
            programmatic=call.programmatic,
        ).on
    config, tokens, groups = _choose_grouped(call, layout, m, configs.sms)
    takes = takes_tiles(config, tokens, operands, groups, configs.sms)
    before, num_bytes, sources = _prepare_before(call, operands, layout, takes)
    gemm = prepare_gemm(
        config,
        operands,
        sources,
        configs.sms,
        tokens,
        groups=groups,
        # What is before it waits for all that came before, so the GEMM may start as soon as it has.
        programmatic=call.programmatic or before is not None,
    )
    return gemm.on if before is None else Launches((before, gemm), num_bytes)


def _prepare_before(
    call: GemmCall, operands: Operands, layout: GroupLayout, takes_tiles: bool
) -> tuple[Launch | None, int, GemmSources]:
    """The launch before a grouped GEMM, the bytes that both share, and what the GEMM reads."""
    device_index, rows = operands.b.get_device(), operands.a.shape[-2]
    if layout == GroupLayout.SEGMENTS:
        segments = prepare_segments(
            rows, len(operands.b), device_index, _BOUNDS, _MEMORY, programmatic=call.programmatic
        )
        counter = Source(_MEMORY.which, ZERO_OF_LIST) if takes_tiles else None
        return segments, list_bytes(rows), _SOURCES._replace(bounds=_MEMORY, tile_counter=counter)
    sources = _SOURCES._replace(bounds=_BOUNDS)
    if not takes_tiles:
        return None, 0, sources
    zeroed = prepare_tile_counter(device_index, _MEMORY, programmatic=call.programmatic)
    return zeroed, COUNTER_BYTES, sources._replace(tile_counter=_MEMORY)


def takes_tiles(
    config: GemmConfig, tokens: int, operands: Operands, groups: GroupsOfTokens, sms: Sms
) -> bool:
    """Whether clusters take tiles from a counter, and so end together though tiles are unequal.

    A kernel that zeroes the counter takes a microsecond or two, so there must be many products; the
    number comes from timings on an H200, see docs/design/grouped.md.

    tokens: about how many a group has, or with ROWS a block of rows, which counts as a group.
    """
    num_groups, n, k = operands.b.shape
    if groups.layout == GroupLayout.ROWS:
        num_groups = groups.num_segments
    if num_groups * tokens * n * k < LEAST_PRODUCTS or num_groups == 1:
        return False
    if sms.busy <= config.cluster:  # a lone cluster takes all tiles anyway
        return False
    return has_more_tiles_than_clusters(config, num_groups, tokens, operands, groups, sms)


def needed_kernels(
    max_rows: int, num_groups: int, n: int, k: int, configs: ConfigSource
) -> Iterator[Kernel]:
    """The kernels of a grouped GEMM with OFFSETS for up to so many rows, without `expected_m`."""
    # What a group has at most counts up to two blocks.
    means = ((ceil_div(m, num_groups), min(m, 2 * BLOCK)) for m in range(1, max_rows + 1))
    for mean, limit in dict.fromkeys(means):
        sms, limit = configs.sms, max(mean, limit)
        config = heuristic.choose_grouped_config(
            mean, limit, num_groups, n, k, sms.busy, sms.busy == sms.all
        )
        yield kernel_of(config, None, GroupLayout.OFFSETS)
    if num_groups > 1 and (max_rows + num_groups) * n * k >= LEAST_PRODUCTS:
        yield tile_counter.kernel_of()


def _choose_grouped(
    call: GemmCall, layout: GroupLayout, m: int, sms: Sms
) -> tuple[GemmConfig, int, GroupsOfTokens]:
    """The config, about how many tokens a group has, and what is known of the groups."""
    num_groups, n, k = call.operands.b.shape
    limit, mean, most = m, ceil_div(m, num_groups), num_groups
    if layout == GroupLayout.ROWS:  # each block of rows counts as a group
        num_groups = most = most_segments(m)
        limit = BLOCK
    elif layout == GroupLayout.SEGMENTS:
        # A group that has tokens has a block, and its last one is half padding on average.
        most = most_segments(m)
        num_groups, mean = min(num_groups, most), max(mean, BLOCK) - BLOCK // 2
    tokens = min(call.expected_m or mean, limit)
    all_sms = sms.busy == sms.all
    config = heuristic.choose_grouped_config(tokens, limit, num_groups, n, k, sms.busy, all_sms)
    return config, tokens, GroupsOfTokens(layout, most, config.token_tiles(tokens))
