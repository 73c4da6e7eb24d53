"""A linear layer whose weight is trained: forward, dX and dW by FP8 GEMMs. M rows, K in, N out.

The weight is the master weight; `weights.codes_of` keeps its codes. In the forward one kernel
makes row codes of x for the GEMM, and column codes (a scale for 128 rows of a feature), which are
saved. The backward quantizes dY likewise: its row codes times W give dX = dY W, its column codes
times those of x give dW = dY^T X. Forward and backward are one prepared launch each.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from ...kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX, num_blocks
from ...kernels.common.checks import (
    FLOATS,
    check_bias,
    check_same_device,
    check_shape,
    check_tensor,
)
from ...kernels.common.prepared import Launches, layout_of, prepared
from ...kernels.common.tma_operands import fits
from ...kernels.gemm.dense import fp8_gemm_nt
from ...kernels.gemm.k_grouped import k_grouped_gemm
from ...kernels.gemm.operands import check_sizes
from ...kernels.jit import Kernel, current_driver
from ...kernels.program import (
    Codes,
    Record,
    Span,
    Target,
    Tensor,
    kernels_at_any_address,
    layouts,
    prepare_launches,
)
from ...kernels.registry import Written, register_inputs, without_autocast
from ...kernels.targets import target_of
from ...quant.columns import (
    column_codes,
    describe_columns,
    empty_columns,
    quantize_1x128_and_128x1,
    readable,
)
from ...quant.quantize import quantize_1x128
from ..autograd import first_order, records
from ..linear import fp8_linear
from . import main_grad
from .weights import codes_of

_OP, _BACKWARD = "trained_linear", "trained_linear_backward"
Wgrad = Literal["128x1", "128x128", "bf16"]
"""The format in which inputs are saved for gradients of weights: FP8 with a scale for 128 tokens of
one feature or of 128 features, or BF16; in BF16 the gradient of the result stays BF16, too."""


def check_wgrad(layer: str, wgrad: str) -> None:
    if wgrad not in get_args(Wgrad):
        raise ValueError(f"{layer}: wgrad must be '128x1', '128x128' or 'bf16', got {wgrad!r}")


class TrainedLinearInputs(NamedTuple):
    """The inputs of `trained_linear`.

    x: [M, K] bf16, fp16 or fp32. weight: [N, K] bf16, fp16 or fp32. bias: [N], or None.
    reuse_codes: as in `codes_of`.
    saves: whether to make column codes of x.
    blocks: whether these have one scale for 128 features.
    batch_invariant: a row of the result has the same bits whatever M is, see `fp8_gemm_nt`.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    reuse_codes: bool
    saves: bool
    blocks: bool
    batch_invariant: bool


Saved = tuple[torch.Tensor, torch.Tensor]  # column codes and their scales
Trained = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the result, and `Saved`


def _check(inputs: TrainedLinearInputs) -> None:
    x, weight, bias, *_ = inputs
    check_same_device(_OP, x=x, weight=weight, bias=bias)
    check_tensor(_OP, "x", x, FLOATS, 2)
    check_tensor(_OP, "weight", weight, FLOATS, 2)
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{_OP}: K must be equal in x and weight, got {x.shape[1]} and {weight.shape[1]}"
        )
    check_bias(_OP, bias, len(weight))


def _empty(x: torch.Tensor, columns: int) -> torch.Tensor:
    return x.new_empty((len(x), columns), dtype=torch.bfloat16)


def nothing_of(x: torch.Tensor) -> Saved:
    """Empty tensors in place of column codes that are not needed."""
    return x.new_empty(0, dtype=torch.float8_e4m3fn), x.new_empty(0, dtype=torch.float32)


def _allocate(inputs: TrainedLinearInputs) -> Trained:
    _check(inputs)
    x, saves = inputs.x, inputs.saves
    columns = (
        quantize_1x128_and_128x1(x, None, False, MIN_AMAX, inputs.blocks)[2:]
        if saves
        else nothing_of(x)
    )
    return _empty(x, len(inputs.weight)), *columns


def _forward(inputs: TrainedLinearInputs) -> Trained:
    x, weight, bias, reuse_codes, saves, blocks, batch_invariant = inputs
    codes = codes_of(weight, reuse_codes=reuse_codes)
    if not saves:
        y = fp8_linear(x, codes.data, codes.scale_inv, bias, batch_invariant)
        return y, *nothing_of(x)
    *rows, data, scale_inv = quantize_1x128_and_128x1(x, None, False, MIN_AMAX, blocks)
    y = _empty(x, len(weight))
    a, b = (rows[0], rows[1]), (codes.data, codes.scale_inv)
    fp8_gemm_nt(a, b, y, bias=bias, batch_invariant=batch_invariant)
    return y, data, scale_inv


def _body(inputs: TrainedLinearInputs) -> Trained:
    _check(inputs)
    return _forward(inputs)


def _launch(inputs: TrainedLinearInputs) -> Trained:
    """On a Hopper GPU: two kernels on the current stream; nothing waits for them."""
    x, weight, bias, reuse_codes, saves, blocks, batch_invariant = inputs
    if not saves or x.ndim != 2 or x.dtype not in FLOATS or x.shape[1:] != weight.shape[1:]:
        return _body(inputs)
    codes = codes_of(weight, reuse_codes=reuse_codes)
    y, columns = _empty(x, len(weight)), empty_columns(*_blocks_of(x), x.device, blocks=blocks)
    weight_codes, check = _Codes(codes.data, codes.scale_inv), partial(_check, inputs)
    if launch_forward(check, x, weight_codes, bias, y, columns, blocks, batch_invariant):
        return y, *columns
    return _body(inputs)


def _blocks_of(x: torch.Tensor) -> tuple[int, int]:
    return num_blocks(x.shape[0]), x.shape[1]


trained_linear = register_inputs(
    _OP,
    TrainedLinearInputs,
    "(Tensor, Tensor, Tensor)",
    reference=_body,
    fake=_allocate,
    kernels=_launch,
)
"""`TrainedLinearInputs` -> (bf16 [M, N], column codes of x and their scales, or empty ones)."""


# ---- The gradient ----


class TrainedLinearBackwardInputs(NamedTuple):
    """The inputs of `trained_linear_backward`.

    grad: [M, N] bf16, fp16 or fp32. weight: as in the forward.
    x_columns, x_columns_scale_inv: column codes of x from the forward.
    d: bf16 or fp32 [N, K], written with the gradient of the weight; None: not wanted.
    accumulates: whether the gradient is added to d, in fp32.
    wants_x: whether to compute dX; else it is empty.
    batch_invariant: as in the forward, for dX.
    """

    grad: torch.Tensor
    weight: torch.Tensor
    x_columns: torch.Tensor
    x_columns_scale_inv: torch.Tensor
    d: Written | None
    accumulates: bool
    wants_x: bool
    batch_invariant: bool


def _allocate_backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    """Check, then allocate dX; this is also the fake body."""
    grad, weight = inputs.grad, inputs.weight
    check_same_device(_BACKWARD, grad=grad, weight=weight, x_columns=inputs.x_columns, d=inputs.d)
    check_tensor(_BACKWARD, "grad", grad, FLOATS, 2)
    check_shape(_BACKWARD, "grad", grad, [len(grad), len(weight)], "[M, N] for weight [N, K]")
    return _empty(grad, weight.shape[1] if inputs.wants_x else 0)


def _backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    dx = _allocate_backward(inputs)
    grad, weight, *x_columns, d, accumulates, wants_x, batch_invariant = inputs
    codes = codes_of(weight, is_backward=True) if wants_x else None
    quantized: tuple[torch.Tensor, ...] = ()
    if d is not None:
        quantized = quantize_1x128_and_128x1(grad, None, False, MIN_GRADIENT_AMAX)
    elif wants_x:
        quantized = quantize_1x128(grad, False, MIN_GRADIENT_AMAX)
    if codes:
        weight_codes = codes.transposed, codes.scale_inv.mT
        fp8_gemm_nt((quantized[0], quantized[1]), weight_codes, dx, batch_invariant=batch_invariant)
    if d is not None:
        k_grouped_gemm(*quantized[2:], *x_columns, d, None, len(grad), accumulates)
    return dx


def _launch_backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    grad, weight, x_columns, scale_inv, d, accumulates, wants_x, batch_invariant = inputs
    if d is None or not wants_x:
        return _backward(inputs)
    codes = codes_of(weight, is_backward=True)
    dx, weight_codes = _empty(grad, weight.shape[1]), _Codes(codes.transposed, codes.scale_inv.mT)
    check, columns = partial(_allocate_backward, inputs), (x_columns, scale_inv)
    if launch_backward(check, grad, weight_codes, columns, dx, d, accumulates, batch_invariant):
        return dx
    return _backward(inputs)


trained_linear_backward = register_inputs(
    _BACKWARD,
    TrainedLinearBackwardInputs,
    "Tensor",
    reference=_backward,
    fake=_allocate_backward,
    kernels=_launch_backward,
)
"""`TrainedLinearBackwardInputs` -> bf16 dX [M, K]; dW = dY^T X goes to d."""


def weight_gradient(
    weight: torch.Tensor,
    grad_columns: Saved,
    x_columns: Saved,
    num_tokens: int,
    expert_offsets: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Compute dY^T X, and what a backward returns for the weight: see `main_grad`.

    weight: [N, K], or [E, N, K] with expert_offsets.
    grad_columns, x_columns: column codes of dY and of X.
    """
    d, accumulates = main_grad.target(weight)
    written = as_written(d)
    k_grouped_gemm(*grad_columns, *x_columns, written, expert_offsets, num_tokens, accumulates)
    return main_grad.result(weight, d if written is d else d.copy_(written))


class Trainee(NamedTuple):
    """A weight saved by a forward.

    weight: [N, K]. master: from `main_grad.master`. wgrad: see `Wgrad`.
    """

    weight: torch.Tensor
    master: torch.Tensor | None
    wgrad: Wgrad


def gradients(
    grad: torch.Tensor,
    trainee: Trainee,
    saved_x: Sequence[torch.Tensor],
    needs: tuple[bool, bool],
    batch_invariant: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dX, in bf16, and what a backward returns for the weight.

    grad: [M, N], the gradient of the result. saved_x: x [M, K] itself with wgrad "bf16", else its
        column codes and scales; unused if the weight needs no gradient. needs: of x, of the weight.
    """
    weight, master, wgrad = trainee.weight, trainee.master, trainee.wgrad
    master = weight if master is None else master
    needs_x, needs_weight = needs
    needs_weight = needs_weight and main_grad.is_asked_for(master)
    if needs_weight and wgrad != "bf16":
        d, accumulates = main_grad.target(master)
        written, options = as_written(d), (accumulates, needs_x, batch_invariant)
        dx = trained_linear_backward(grad, weight, *saved_x, written, *options)
        grad_weight = main_grad.result(master, d if written is d else d.copy_(written))
        return (dx if needs_x else None), grad_weight
    dx = grad_weight = None
    if needs_x:
        options = False, True, batch_invariant
        dx = trained_linear_backward(grad, weight, *nothing_of(grad), None, *options)
    if needs_weight:
        grad_weight = _bf16_gradient(master, grad, saved_x[0])
    return dx, grad_weight


class _TrainedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wgrad: Wgrad,
        reuse_codes: bool,
        batch_invariant: bool,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        needs_weight = ctx.needs_input_grad[4]
        saves = needs_weight and wgrad != "bf16"
        options = reuse_codes, saves, wgrad == "128x128", batch_invariant
        y: torch.Tensor
        y, *columns = trained_linear(x, weight, bias, *options)
        ctx.wgrad, ctx.dtype, ctx.batch_invariant = wgrad, x.dtype, batch_invariant
        ctx.bias_dtype = None if bias is None else bias.dtype
        saved_x = columns if saves else [x] if needs_weight else []
        ctx.save_for_backward(weight, *saved_x)
        ctx.master = main_grad.master(weight)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *saved_x = ctx.saved_tensors
        *_, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        needs = needs_x, needs_weight
        trainee = Trainee(weight, ctx.master, ctx.wgrad)
        dx, grad_weight = gradients(grad, trainee, saved_x, needs, ctx.batch_invariant)
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return None, None, None, None if dx is None else dx.to(ctx.dtype), grad_weight, grad_bias


def as_written(d: torch.Tensor) -> torch.Tensor:
    """d itself, or FP32 memory in its place if the GEMM cannot write its dtype."""
    return torch.empty_like(d, dtype=torch.float32) if d.dtype == torch.float16 else d


def _bf16_gradient(
    weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor
) -> torch.Tensor | None:
    d, accumulates = main_grad.target(weight)
    with without_autocast(grad.device):
        product = grad.bfloat16().T @ x.bfloat16()
    return main_grad.result(weight, d.add_(product) if accumulates else d.copy_(product))


def linear(
    layer: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    wgrad: Wgrad,
    *,
    reuse_codes: bool = True,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """bf16 [M, N], with gradients in x, weight and bias, all by FP8 GEMMs.

    layer: the name in errors. wgrad: see `Wgrad`. reuse_codes: see `codes_of`. batch_invariant: see
        `TrainedLinearInputs`.
    """
    y: torch.Tensor
    if records(layer, x, weight, bias):
        y = _TrainedLinear.apply(wgrad, reuse_codes, batch_invariant, x, weight, bias)
    else:
        y, *_ = trained_linear(x, weight, bias, reuse_codes, False, False, batch_invariant)
    return y


# ---- The kernels ----


class _Codes(NamedTuple):
    """e4m3 [N, K] and fp32 [ceil(N/128), ceil(K/128)], any strides."""

    data: torch.Tensor
    scale_inv: torch.Tensor


def _is_simple(x: torch.Tensor, codes: _Codes) -> bool:
    """Whether no operand of a product x codes^T has to be copied."""
    (m, k), n = x.shape, len(codes.data)
    is_readable = x.stride(1) == 1 and readable(x) is x
    return bool(m and n and k) and k % 16 == n % 8 == 0 and is_readable and fits(codes.data)


def describe_forward(
    r: Record,
    x: Tensor,
    weights: Codes,
    y: Tensor,
    columns: Codes,
    *,
    bias: Tensor | None = None,
    blocks: bool = False,
    min_amax: float = MIN_AMAX,
    batch_invariant: bool = False,
) -> None:
    """Add the steps that make both codes of x [M, K], and y [M, N], x times the weights [N, K]."""
    (m, k), n = x.shape, weights.data.shape[0]
    check_sizes(_OP, m, n, k)
    rows = r.codes("rows", (1, m, k)).first()
    describe_columns(r, x, columns, m, rows=rows, min_amax=min_amax, blocks=blocks)
    r.target.gemms.dense(r, rows, weights, y, bias=bias, batch_invariant=batch_invariant)


def describe_backward(
    r: Record,
    grad: Tensor,
    weights: Codes,
    x_columns: Codes,
    dx: Tensor,
    d: Tensor,
    *,
    accumulates: bool,
    batch_invariant: bool = False,
) -> None:
    """Add steps: dX [M, K] of grad [M, N] and W^T [K, N], and dW [N, K], written or added to d."""
    m, n = grad.shape
    columns = column_codes(r, "columns", num_blocks(m), n)
    describe_forward(
        r,
        grad,
        weights,
        dx,
        columns,
        min_amax=MIN_GRADIENT_AMAX,
        batch_invariant=batch_invariant,
    )
    r.target.gemms.k_grouped(r, columns, x_columns, d.batched(), m, accumulates=accumulates)


def _key_of(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """Layouts and alignments."""
    return tuple([None if x is None else (layout_of(x), x.data_ptr() % 16) for x in tensors])


_FORWARD_INPUTS = "x", "weight", "weight_scales", "y", "columns", "columns_scales", "bias"


def launch_forward(
    check: Callable[[], object],
    x: torch.Tensor,
    codes: _Codes,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor],
    blocks: bool,
    batch_invariant: bool,
) -> bool:
    """Write y and the column codes of x; False if an operand would have to be copied first.

    check: raises an error if operands are wrong; called once for each layout.
    y: bf16 [M, N], contiguous. columns: as `empty_columns` gives them.
    """
    key = (_OP, _key_of(x, *codes, bias), blocks, batch_invariant, current_driver().max_sms)

    def prepare() -> Launches:
        check()
        if not _is_simple(x, codes) or (bias is not None and not bias.is_contiguous()):
            return Launches((), 0)
        device_index = x.get_device()
        r = Record(target_of(device_index), _FORWARD_INPUTS)
        describe_forward(
            r,
            Tensor.of(x, "x"),
            Codes.of(*codes, "weight"),
            Tensor.of(y, "y"),
            Codes.of(*columns, "columns"),
            blocks=blocks,
            batch_invariant=batch_invariant,
            **layouts(bias=bias),
        )
        return prepare_launches(r, device_index)

    entry = prepared(key, prepare)
    if entry.launches:
        tensors = x, *codes, y, *columns
        bias_address = 0 if bias is None else bias.data_ptr()
        entry(x.get_device(), (*[z.data_ptr() for z in tensors], bias_address))
    return bool(entry.launches)


def forward_kernels(
    target: Target,
    most_tokens: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    bias: torch.dtype | None = None,
    blocks: bool = False,
    batch_invariant: bool = False,
) -> Iterator[Kernel]:
    """The kernels of a forward that saves column codes: weights [N, K], x at any address."""

    def describe(span: Span, alignment: int) -> Record:
        r, m = Record(target, _FORWARD_INPUTS, span=span), span.first
        describe_forward(
            r,
            Tensor.contiguous("x", m, k, dtype=dtype, alignment=alignment),
            Codes.contiguous("weight", n, k),
            Tensor.contiguous("y", m, n),
            column_codes(r, "x_columns", num_blocks(m), k, blocks=blocks),
            bias=None if bias is None else Tensor.contiguous("bias", n, dtype=bias),
            blocks=blocks,
            batch_invariant=batch_invariant,
        )
        return r

    return kernels_at_any_address(describe, most_tokens, dtype.itemsize)


_BACKWARD_INPUTS = "grad", "weight", "weight_scales", "x_columns", "x_columns_scales", "dx", "d"


def launch_backward(
    check: Callable[[], object],
    grad: torch.Tensor,
    codes: _Codes,
    x_columns: tuple[torch.Tensor, torch.Tensor],
    dx: torch.Tensor,
    d: torch.Tensor,
    accumulates: bool,
    batch_invariant: bool,
) -> bool:
    """Write dX, and write dW to d or add it; False if an operand would have to be copied first.

    check: as in `launch_forward`. codes: of W^T, [K, N]. x_columns: column codes of x.
    dx: bf16 [M, K], contiguous. d: [N, K].
    """
    options = accumulates, batch_invariant, current_driver().max_sms
    key = (_OP, "backward", _key_of(grad, *codes, *x_columns, d), *options)

    def prepare() -> Launches:
        check()
        if not (_is_simple(grad, codes) and all(map(fits, x_columns)) and d.stride(1) == 1):
            return Launches((), 0)
        device_index = grad.get_device()
        r = Record(target_of(device_index), _BACKWARD_INPUTS)
        describe_backward(
            r,
            Tensor.of(grad, "grad"),
            Codes.of(*codes, "weight"),
            Codes.of(*x_columns, "x_columns"),
            Tensor.of(dx, "dx"),
            Tensor.of(d, "d"),
            accumulates=accumulates,
            batch_invariant=batch_invariant,
        )
        return prepare_launches(r, device_index)

    entry = prepared(key, prepare)
    if entry.launches:
        tensors = grad, *codes, *x_columns, dx, d
        entry(grad.get_device(), tuple([z.data_ptr() for z in tensors]))
    return bool(entry.launches)


def backward_kernels(
    target: Target,
    most_tokens: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    accumulates: bool = False,
    blocks: bool = False,
    batch_invariant: bool = False,
) -> Iterator[Kernel]:
    """The kernels of a backward of BF16 gradients with weights [N, K], tensors at any addresses.

    dtype: of dW.
    """

    def describe(span: Span, alignment: int) -> Record:
        r, m = Record(target, _BACKWARD_INPUTS, span=span), span.first
        describe_backward(
            r,
            Tensor.contiguous("grad", m, n, alignment=alignment),
            Codes.contiguous("weight", k, n),
            column_codes(r, "saved_columns", num_blocks(m), k, blocks=blocks),
            Tensor.contiguous("dx", m, k),
            Tensor.contiguous("d", n, k, dtype=dtype, alignment=alignment),
            accumulates=accumulates,
            batch_invariant=batch_invariant,
        )
        return r

    return kernels_at_any_address(describe, most_tokens, torch.bfloat16.itemsize)
