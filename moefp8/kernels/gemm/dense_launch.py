"""Launch `gemm.cu` as the dense FP8 GEMM, on a Hopper GPU."""

import torch

from ..common.blocks import ceil_div
from ..common.checks import check_dense_gemm
from ..common.prepared import layout_of
from ..common.tma_operands import are_aligned
from ..jit import Launch, Source, current_driver, launch_all
from .launch import GemmSources, Operands, check_sizes, fitting_operands, prepare_gemm
from .tuned import config_source_of

_OP = "fp8_gemm_nt"
_SOURCES = GemmSources(*map(Source, range(5)))


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
    driver, addresses = current_driver(), tuple([x.data_ptr() for x in tensors])
    layouts = tuple([layout_of(x) for x in tensors])
    aligned = are_aligned((addresses[0], addresses[1], addresses[2], addresses[4]))
    key = (_OP, layouts, aligned, programmatic, d_is_padded, driver.max_sms)
    launch = driver.prepared().get(key)
    if launch is None:
        operands = Operands(a, a_scale_inv, b, b_scale_inv, d)
        launch = _first_launch(operands, bias, programmatic, d_is_padded)
        if launch is None:
            return
        driver.keep(key, launch)
    launch_all((launch,), a.get_device(), addresses)


@torch.no_grad()
def _first_launch(
    operands: Operands, bias: torch.Tensor | None, programmatic: bool, d_is_padded: bool
) -> Launch | None:
    """Check; then prepare a launch for these layouts, or do it all with operands in others."""
    check_dense_gemm(_OP, *operands, bias)
    d = operands.d
    if d.numel() == 0:
        return None
    if operands.a.shape[1] == 0:
        d.zero_() if bias is None else d.copy_(bias)
        return None
    fitting = fitting_operands(operands, d_is_padded, keep_d=False)
    contiguous_bias = None if bias is None else bias.contiguous()
    pairs = zip(fitting, operands, strict=True)
    if all(x is y for x, y in pairs) and contiguous_bias is bias:
        (m, k), n = operands.a.shape, operands.b.shape[0]
        check_sizes(_OP, m, n, k)
        sources = _SOURCES if bias is None else _SOURCES._replace(bias=Source(5))
        return prepare_dense(operands, sources, bias, programmatic)
    launch_gemm(*fitting, contiguous_bias, d_is_padded=d_is_padded or fitting.d is not d)
    if fitting.d is not d:
        d.copy_(fitting.d)
    return None


def prepare_dense(
    operands: Operands, sources: GemmSources, bias: torch.Tensor | None, programmatic: bool
) -> Launch:
    """For operands that fit, and a bias that is contiguous."""
    (m, k), n = operands.a.shape, operands.b.shape[0]
    configs = config_source_of(operands.a.get_device())
    config = configs.dense(m, n, k)
    return prepare_gemm(
        config,
        operands,
        sources,
        num_sms=configs.num_sms,
        all_sms=configs.all_sms,
        token_tiles=ceil_div(m, config.tile[0]),
        tokens=m,
        bias=None if bias is None else bias.dtype,
        programmatic=programmatic,
    )
