"""Launch `gemm.cu` as one of the grouped FP8 GEMMs, on a Hopper GPU.

Nothing here reads what the device holds: a launch depends on shapes alone, and so one CUDA graph
serves all routings.
"""

import torch

from ..common.blocks import BLOCK, ceil_div
from ..common.checks import check_contiguous_gemm, check_masked_gemm
from . import heuristic
from . import launch as gemm_plan
from .config import GemmConfig, GroupLayout
from .launch import Launches, Layouts, Operands, Plan, busy_sms, fitting_operands, make_plan

_launches = Launches()


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
    rest = (group_layout, expected_m, d_is_padded, gemm_plan.max_sms())
    if layouts := _launches.launch([*operands, bounds], rest, programmatic):
        _launch_unplanned(op, operands, bounds, layouts, rest, programmatic)


@torch.no_grad()
def _launch_unplanned(
    op: str,
    operands: Operands,
    bounds: torch.Tensor,
    layouts: Layouts,
    rest: tuple[GroupLayout, int | None, bool, int | None],
    programmatic: bool,
) -> None:
    """Check; then make a plan for these layouts, or bring the operands into others."""
    (group_layout, expected_m, d_is_padded, _), d = rest, operands.d
    if group_layout == GroupLayout.MASKED:
        check_masked_gemm(op, *operands, bounds)
    else:
        by_rows = group_layout == GroupLayout.ROWS
        check_contiguous_gemm(op, *operands, *((bounds, None) if by_rows else (None, bounds)))
    if d.numel() == 0 or operands.b.shape[0] == 0:
        return
    if operands.a.shape[-1] == 0:
        d.masked_fill_(rows_of_groups(group_layout, d, bounds)[..., None], 0)
        return
    fitting = fitting_operands(operands, d_is_padded, keep_d=True)
    bounds_in_order = bounds.contiguous()
    pairs = zip((*fitting, bounds_in_order), (*operands, bounds), strict=True)
    if all(x is y for x, y in pairs):
        _launches.keep(_plan(op, group_layout, operands, expected_m, layouts), rest)
    else:
        d_is_padded |= fitting.d is not d
    launch_grouped_gemm(
        *(op, group_layout, fitting, bounds_in_order, expected_m),
        programmatic=programmatic,
        d_is_padded=d_is_padded,
    )
    if fitting.d is not d:
        d.copy_(fitting.d)


def rows_of_groups(layout: GroupLayout, d: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Which rows of d are of a group: bool [M] or [E, max_m]."""
    row = torch.arange(d.shape[-2], device=d.device)
    if layout == GroupLayout.MASKED:
        return row < bounds[:, None]
    if layout == GroupLayout.OFFSETS:
        return (row >= bounds[0]) & (row < bounds[-1])
    return bounds >= 0


def _plan(
    op: str, group_layout: GroupLayout, operands: Operands, expected_m: int | None, layouts: Layouts
) -> Plan:
    """For operands that fit."""
    a, a_scale_inv, b, b_scale_inv, d = operands
    if group_layout != GroupLayout.MASKED:
        operands = Operands(a[None], a_scale_inv[None], b, b_scale_inv, d[None])
    (_, m, k), (num_groups, n, _) = operands.a.shape, b.shape
    gemm_plan.check_sizes(op, m, n, k)
    sms = num_sms, all_sms = busy_sms(a.get_device())
    num_segments, limit = num_groups, m
    if group_layout == GroupLayout.ROWS:  # each block of them is as a group of its own
        num_segments, limit = ceil_div(m, BLOCK), BLOCK
    expected_m = min(expected_m or ceil_div(m, num_groups), limit)
    config = heuristic.choose_grouped_config(
        expected_m, limit, num_segments, n, k, num_sms, num_sms == all_sms
    )
    return plan_of_groups(config, operands, group_layout, num_segments, expected_m, sms, layouts)


def plan_of_groups(
    config: GemmConfig,
    operands: Operands,
    group_layout: GroupLayout,
    num_segments: int,
    tokens: int,
    sms: tuple[int, int],
    layouts: Layouts = (),
    *,
    guesses: bool = True,
    bounds_ready: bool = False,
) -> Plan:
    """For operands of three dimensions. tokens: of a group, about. sms: as `busy_sms`.

    guesses: whether the first tiles may be guessed from that, see `prefetch_expected` in
        producer.cuh.
    """
    (_, m, _), num_groups = operands.a.shape, operands.b.shape[0]
    num_sms, all_sms = sms
    expected_tiles = config.token_tiles(tokens) if guesses else 0
    stride = operands.b_scale_inv.stride(0)
    return make_plan(
        config,
        operands,
        None,
        layouts,
        num_sms=num_sms,
        all_sms=all_sms,
        token_tiles=_most_token_tiles(config, group_layout, m, num_groups),
        tokens=tokens,
        group_layout=group_layout,
        groups=(num_groups, num_segments, m, expected_tiles, stride),
        bounds_ready=bounds_ready,
    )


def _most_token_tiles(config: GemmConfig, layout: GroupLayout, m: int, num_groups: int) -> int:
    """Over all routings."""
    tokens = config.tile[0]
    if layout == GroupLayout.MASKED:
        return num_groups * ceil_div(m, tokens)
    if layout == GroupLayout.ROWS:
        return ceil_div(m, BLOCK) * ceil_div(BLOCK, tokens)
    # Each group that has a token takes up to two tiles more than its share: one that begins before
    # it, at a multiple of 16 bytes in each row of scales, and one that ends after it.
    return m // tokens + 2 * min(num_groups, m)
