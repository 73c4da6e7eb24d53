"""Launch `gemm.cu` as one of the grouped FP8 GEMMs, on a Hopper GPU.

Nothing here reads what the device holds: a launch depends on shapes alone, and so one CUDA graph
serves all routings.
"""

import torch

from ..common.blocks import BLOCK, ceil_div
from ..common.checks import check_contiguous_gemm, check_masked_gemm
from ..common.prepared import layout_of
from ..common.tma_operands import are_aligned
from ..jit import Launch, Source, current_driver, launch_all
from . import heuristic
from .config import GemmConfig, GroupLayout
from .launch import (
    GateUp,
    GemmSources,
    GroupsOfTokens,
    Operands,
    busy_sms,
    check_sizes,
    fitting_operands,
    prepare_gemm,
)

_SOURCES = GemmSources(Source(0), Source(1), Source(2), Source(3), Source(4), bounds=Source(5))


def launch_grouped_gemm(
    op: str,
    group_layout: GroupLayout,
    operands: Operands,
    bounds: torch.Tensor,
    expected_m: int | None = None,
    *,
    programmatic: bool = False,
    d_is_padded: bool = False,
) -> None:
    """One kernel on the current stream; nothing waits for it.

    Operands that TMA cannot address are copied first, and d is written through a copy.

    operands: a and d are [M, K] and [M, N], if masked [E, max_m, K] and [E, max_m, N].
    bounds: `expert_offsets`, `masked_m` or `grouped_layout`, as `group_layout` says.
    expected_m: tokens of a group, about, at least 1; decides how fast it is. None: the mean.
    programmatic: it may be launched before the stream's previous kernel ends; then it waits.
    d_is_padded: up to the next 16 bytes, what follows a row of d may be written.
    Raises TypeError, ValueError as the ops, JitError, or OutOfMemoryError.
    """
    tensors = (*operands, bounds)
    driver, addresses = current_driver(), tuple([x.data_ptr() for x in tensors])
    layouts = tuple([layout_of(x) for x in tensors])
    aligned = are_aligned((addresses[0], addresses[1], addresses[2], addresses[4]))
    options = (group_layout, expected_m, programmatic, d_is_padded, driver.max_sms)
    key = (op, layouts, aligned, options)
    launch = driver.prepared().get(key)
    if launch is None:
        launch = _first_launch(
            op, group_layout, operands, bounds, expected_m, programmatic, d_is_padded
        )
        if launch is None:
            return
        driver.keep(key, launch)
    launch_all((launch,), operands.a.get_device(), addresses)


@torch.no_grad()
def _first_launch(
    op: str,
    group_layout: GroupLayout,
    operands: Operands,
    bounds: torch.Tensor,
    expected_m: int | None,
    programmatic: bool,
    d_is_padded: bool,
) -> Launch | None:
    """Check; then prepare a launch for these layouts, or do it all with operands in others."""
    if group_layout == GroupLayout.MASKED:
        check_masked_gemm(op, *operands, bounds)
    elif group_layout == GroupLayout.ROWS:
        check_contiguous_gemm(op, *operands, bounds, None)
    else:
        check_contiguous_gemm(op, *operands, None, bounds)
    d = operands.d
    if d.numel() == 0 or operands.b.shape[0] == 0:
        return None
    if operands.a.shape[-1] == 0:
        d.masked_fill_(rows_of_groups(group_layout, d, bounds)[..., None], 0)
        return None
    fitting = fitting_operands(operands, d_is_padded, keep_d=True)
    bounds_in_order = bounds.contiguous()
    pairs = zip((*fitting, bounds_in_order), (*operands, bounds), strict=True)
    if all(x is y for x, y in pairs):
        return _prepare(op, group_layout, operands, expected_m, programmatic)
    launch_grouped_gemm(
        op,
        group_layout,
        fitting,
        bounds_in_order,
        expected_m,
        programmatic=programmatic,
        d_is_padded=d_is_padded or fitting.d is not d,
    )
    if fitting.d is not d:
        d.copy_(fitting.d)
    return None


def rows_of_groups(
    group_layout: GroupLayout, d: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """Which rows of d are of a group: bool [M] or [E, max_m]."""
    row = torch.arange(d.shape[-2], device=d.device)
    if group_layout == GroupLayout.MASKED:
        return row < bounds[:, None]
    if group_layout == GroupLayout.OFFSETS:
        return (row >= bounds[0]) & (row < bounds[-1])
    return bounds >= 0


def _prepare(
    op: str,
    group_layout: GroupLayout,
    operands: Operands,
    expected_m: int | None,
    programmatic: bool,
) -> Launch:
    """For operands that fit."""
    a, a_scale_inv, b, b_scale_inv, d = operands
    if group_layout != GroupLayout.MASKED:
        operands = Operands(a[None], a_scale_inv[None], b, b_scale_inv, d[None])
    (_, m, k), (num_groups, n, _) = operands.a.shape, b.shape
    check_sizes(op, m, n, k)
    sms = num_sms, all_sms = busy_sms(a.get_device())
    num_segments, limit = num_groups, m
    if group_layout == GroupLayout.ROWS:  # each block of them is as a group of its own
        num_segments, limit = ceil_div(m, BLOCK), BLOCK
    tokens = min(expected_m or ceil_div(m, num_groups), limit)
    config = heuristic.choose_grouped_config(
        tokens, limit, num_segments, n, k, num_sms, num_sms == all_sms
    )
    groups = GroupsOfTokens(group_layout, num_segments, config.token_tiles(tokens))
    return prepare_grouped(
        config, operands, _SOURCES, groups, tokens, sms, programmatic=programmatic
    )


def prepare_grouped(
    config: GemmConfig,
    operands: Operands,
    sources: GemmSources,
    groups: GroupsOfTokens,
    tokens: int,
    sms: tuple[int, int],
    *,
    gate_up: GateUp | None = None,
    programmatic: bool = True,
) -> Launch:
    """For operands of three dimensions. tokens: of a group, about. sms: as `busy_sms`."""
    num_sms, all_sms = sms
    return prepare_gemm(
        config,
        operands,
        sources,
        num_sms=num_sms,
        all_sms=all_sms,
        token_tiles=most_token_tiles(config, groups.layout, operands),
        tokens=tokens,
        groups=groups,
        gate_up=gate_up,
        programmatic=programmatic,
    )


def most_token_tiles(config: GemmConfig, group_layout: GroupLayout, operands: Operands) -> int:
    """How many tiles of tokens any routing can need."""
    m, num_groups, tokens = operands.a.shape[1], operands.b.shape[0], config.tile[0]
    if group_layout == GroupLayout.MASKED:
        return num_groups * ceil_div(m, tokens)
    if group_layout == GroupLayout.ROWS:
        return ceil_div(m, BLOCK) * ceil_div(BLOCK, tokens)
    # Each group that has a token takes up to two tiles more than its share: one that begins before
    # it, at a multiple of 16 bytes in each row of scales, and one that ends after it.
    return m // tokens + 2 * min(num_groups, m)
