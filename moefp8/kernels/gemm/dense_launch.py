"""Launch `gemm.cu` as the dense FP8 GEMM, on a Hopper GPU."""

import torch

from ..common.blocks import ceil_div
from ..common.checks import check_dense_gemm
from . import launch as gemm_plan
from .launch import Launches, Layouts, Operands, Plan, fitting_operands, make_plan
from .tuned import config_source_of

_OP = "fp8_gemm_nt"

_launches = Launches()


def launch_gemm(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    programmatic: bool = False,
    d_is_padded: bool = False,
) -> None:
    """`fp8_gemm_nt` on a Hopper GPU: one kernel on the current stream; nothing waits for it.

    Operands that TMA cannot address are copied first, and d is written through a copy:
    `fitting_operands`.

    programmatic: it may be launched before the stream's previous kernel ends; then it reads a, its
        scales and writes d only after that end. All else must be older than that kernel. Has no
        effect where an operand is copied.
    d_is_padded: up to the next 16 bytes, what follows a row of d may be written.
    Raises TypeError, ValueError as `fp8_gemm_nt`, JitError, or OutOfMemoryError.
    """
    tensors = [a, a_scale_inv, b, b_scale_inv, d]
    if bias is not None:
        tensors.append(bias)
    rest = (d_is_padded, gemm_plan.max_sms())
    if layouts := _launches.launch(tensors, rest, programmatic):
        operands = Operands(a, a_scale_inv, b, b_scale_inv, d)
        _launch_unplanned(operands, bias, layouts, rest, programmatic)


@torch.no_grad()
def _launch_unplanned(
    operands: Operands,
    bias: torch.Tensor | None,
    layouts: Layouts,
    rest: tuple[bool, int | None],
    programmatic: bool,
) -> None:
    """Check; then make a plan for these layouts, or bring the operands into others."""
    check_dense_gemm(_OP, *operands, bias)
    d, d_is_padded = operands.d, rest[0]
    if d.numel() == 0:
        return
    if operands.a.shape[1] == 0:
        d.zero_() if bias is None else d.copy_(bias)
        return
    fitting = fitting_operands(operands, d_is_padded, keep_d=False)
    contiguous_bias = None if bias is None else bias.contiguous()
    pairs = zip(fitting, operands, strict=True)
    if all(x is y for x, y in pairs) and contiguous_bias is bias:
        _launches.keep(_plan(operands, bias, layouts), rest)
        launch_gemm(*operands, bias, programmatic=programmatic, d_is_padded=d_is_padded)
    elif fitting.d is d:
        launch_gemm(*fitting, contiguous_bias, d_is_padded=d_is_padded)
    else:
        launch_gemm(*fitting, contiguous_bias, d_is_padded=True)
        d.copy_(fitting.d)


def _plan(operands: Operands, bias: torch.Tensor | None, layouts: Layouts) -> Plan:
    """For operands that fit."""
    (m, k), n = operands.a.shape, operands.b.shape[0]
    gemm_plan.check_sizes(_OP, m, n, k)
    configs = config_source_of(operands.a.get_device())
    config = configs.dense(m, n, k)
    return make_plan(
        config,
        operands,
        None if bias is None else bias.dtype,
        layouts,
        num_sms=configs.num_sms,
        all_sms=configs.all_sms,
        token_tiles=ceil_div(m, config.tile[0]),
        tokens=m,
    )
