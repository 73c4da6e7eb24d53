"""A call of a GEMM with tensors that may lie anyhow, on a Hopper GPU.

Nothing here reads what the device holds: a launch depends on shapes alone, and so one CUDA graph
serves all routings.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..common.blocks import BLOCK, ceil_div
from ..common.prepared import layout_of
from ..common.tma_operands import are_aligned
from ..jit import Launch, Source, current_driver, launch_all
from . import heuristic
from .config import GroupLayout
from .launch import GemmSources, GroupsOfTokens, prepare_gemm
from .operands import Operands, check_sizes, fitting_operands
from .tuned import config_source_of

_SOURCES = GemmSources(*map(Source, range(5)))


class GemmCall(NamedTuple):
    """What a GEMM is given.

    check: raises TypeError or ValueError if the tensors are wrong; called for new layouts.
    bias: [N] in bf16, fp16 or fp32, of a dense GEMM.
    group_layout: what tells which group a token is of; None: the GEMM is dense.
    bounds: `expert_offsets`, `masked_m` or `grouped_layout`, as `group_layout` says.
    expected_m: tokens of a group, about, at least 1; decides how fast it is. None: the mean.
    programmatic: it may be launched before the stream's previous kernel ends; then it reads a, its
        scales and writes d only after that end. All else must be older than that kernel. Has no
        effect where an operand is copied.
    d_is_padded: up to the next 16 bytes, what follows a row of d may be written.
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


def launch_gemm(call: GemmCall) -> None:
    """One kernel on the current stream; nothing waits for it.

    Operands that TMA cannot address are copied first, and d is written through a copy.
    Raises what `call.check` does, JitError, or OutOfMemoryError.
    """
    op, _, operands, bias, group_layout, bounds, *options = call
    tensors = [*operands, *(x for x in (bias, bounds) if x is not None)]
    driver, addresses = current_driver(), tuple([x.data_ptr() for x in tensors])
    layouts = tuple([layout_of(x) for x in tensors])
    aligned = are_aligned((addresses[0], addresses[1], addresses[2], addresses[4]))
    key = (op, layouts, aligned, group_layout, *options, driver.max_sms)
    launch = driver.prepared().get(key)
    if launch is None:
        launch = _first_launch(call)
        if launch is None:
            return
        driver.keep(key, launch)
    launch_all((launch,), operands.a.get_device(), addresses)


@torch.no_grad()
def _first_launch(call: GemmCall) -> Launch | None:
    """Check; then prepare a launch for these layouts, or do it all with operands in others."""
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
    if all(x is y for x, y in zip(_tensors(fitting), _tensors(call), strict=True)):
        layout = call.group_layout
        return _prepare_dense(call) if layout is None else _prepare_grouped(call, layout)
    twin = fitting.operands.d
    is_padded = call.d_is_padded or twin is not d
    launch_gemm(fitting._replace(programmatic=False, d_is_padded=is_padded))
    if twin is not d:
        d.copy_(twin)
    return None


def _tensors(call: GemmCall) -> list[torch.Tensor | None]:
    return [*call.operands, call.bias, call.bounds]


def _write_empty_sums(call: GemmCall) -> None:
    """K = 0: d is the bias, or zero in the rows that are of a group."""
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


def _prepare_dense(call: GemmCall) -> Launch:
    (m, k), n = call.operands.a.shape, len(call.operands.b)
    check_sizes(call.op, m, n, k)
    configs = config_source_of(call.operands.a.get_device())
    return prepare_gemm(
        configs.dense(m, n, k),
        call.operands,
        _SOURCES if call.bias is None else _SOURCES._replace(bias=Source(5)),
        configs.sms,
        m,
        bias=None if call.bias is None else call.bias.dtype,
        programmatic=call.programmatic,
    )


def _prepare_grouped(call: GemmCall, group_layout: GroupLayout) -> Launch:
    operands = call.operands
    if group_layout != GroupLayout.MASKED:
        a, a_scale_inv, b, b_scale_inv, d = operands
        operands = Operands(a[None], a_scale_inv[None], b, b_scale_inv, d[None])
    (_, m, k), (num_groups, n, _) = operands.a.shape, operands.b.shape
    check_sizes(call.op, m, n, k)
    sms = config_source_of(operands.a.get_device()).sms
    num_segments, limit = num_groups, m
    if group_layout == GroupLayout.ROWS:  # each block of them is as a group of its own
        num_segments, limit = ceil_div(m, BLOCK), BLOCK
    tokens = min(call.expected_m or ceil_div(m, num_groups), limit)
    config = heuristic.choose_grouped_config(
        tokens, limit, num_segments, n, k, sms.busy, sms.busy == sms.all
    )
    return prepare_gemm(
        config,
        operands,
        _SOURCES._replace(bounds=Source(5)),
        sms,
        tokens,
        groups=GroupsOfTokens(group_layout, num_segments, config.token_tiles(tokens)),
        programmatic=call.programmatic,
    )
