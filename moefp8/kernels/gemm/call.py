"""A call of a GEMM's kernels, with tensors of any layout. M tokens, N weights, K; G groups.

Nothing here reads device memory: a launch depends on shapes alone, so one CUDA graph serves all
routings.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..common.blocks import TMA_BYTES
from ..jit import Kernel, current_driver
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
from .interface import GroupLayout
from .operands import Operands, check_sizes, fitting_operands

_INPUTS = "a", "a_scales", "b", "b_scales", "d"
_OLDER = frozenset({"b", "b_scales", "bias", "bounds"})

_Run = Callable[[int, tuple[int, ...]], None]  # launches on a GPU, with the addresses of a call


class GemmCall(NamedTuple):
    """A GEMM's tensors and options.

    check: raises TypeError or ValueError if the tensors are wrong; called for new layouts.
    bias: [N] in bf16, fp16 or fp32; of groups [G, N].
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
    """Write d for K = 0: the bias, or zeros, into the rows of groups."""
    d, bounds, bias = call.operands.d, call.bounds, call.bias
    if bounds is None:
        d.zero_() if bias is None else d.copy_(bias)
        return
    row = torch.arange(d.shape[-2], device=d.device, dtype=torch.int32)
    if call.group_layout == GroupLayout.MASKED:
        rows = row < bounds[:, None]
        d.masked_fill_(rows[..., None], 0)
        return
    group = bounds  # of each row
    if call.group_layout == GroupLayout.OFFSETS:
        group = torch.searchsorted(bounds, row, right=True) - 1
    num_groups = len(call.operands.b)
    has_group = ((group >= 0) & (group < num_groups))[:, None]
    sums = 0 if bias is None else bias[group.clamp(0, num_groups - 1)].to(d.dtype)
    d.copy_(torch.where(has_group, sums, d))


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
        r.target.gemms.dense(
            r,
            a,
            b,
            d,
            bias=others.get("bias"),
            batch_invariant=call.batch_invariant,
            programmatic=call.programmatic,
        )
    else:
        if call.group_layout != GroupLayout.MASKED:
            a, d = a.batched(), d.batched()
        r.target.gemms.grouped(
            r,
            a,
            b,
            d,
            call.group_layout,
            others["bounds"].place,
            bias=others.get("bias"),
            expected_m=call.expected_m,
            programmatic=call.programmatic,
        )
    if len(r.steps) == 1:
        return prepare_launch(r, device_index).on
    return prepare_launches(r, device_index)


def grouped_kernels(
    target: Target,
    most_rows: int,
    num_groups: int,
    n: int,
    k: int,
    bias: torch.dtype | None = None,
) -> Iterator[Kernel]:
    """The kernels of a grouped GEMM with OFFSETS, without `expected_m`, for up to `most_rows`."""
    biases = None if bias is None else Tensor.contiguous("bias", num_groups, n, dtype=bias)

    def describe(span: Span) -> Record:
        r, m = Record(target, (*_INPUTS, "bias", "bounds"), older=_OLDER, span=span), span.first
        a, b = r.codes("rows", (1, m, k)), Codes.contiguous("b", num_groups, n, k)
        d, bounds = r.matrices("out", (1, m, n), torch.bfloat16), Place("bounds")
        target.gemms.grouped(r, a, b, d, GroupLayout.OFFSETS, bounds, bias=biases)
        return r

    return kernels_of(describe, most_rows)
