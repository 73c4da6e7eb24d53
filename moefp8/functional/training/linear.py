"""A linear layer whose weight is trained: forward, dX and dW by FP8 GEMMs. M rows, K in, N out.

The weight is the master weight; `weights.codes_of` keeps its codes. In a forward one kernel makes
both codes of x: those of rows for the GEMM, and those of columns (128 rows of a feature), which are
what is saved. A backward does the same to dY: its rows are multiplied by W for dX = dY W, and its
columns by those of x for dW = dY^T X. All kernels of either are one prepared launch.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from ...kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX, TMA_BYTES, num_blocks
from ...kernels.common.checks import (
    FLOATS,
    check_bias,
    check_same_device,
    check_shape,
    check_tensor,
)
from ...kernels.common.prepared import Launches, layout_of, prepared
from ...kernels.common.registry import Written, register_inputs, without_autocast
from ...kernels.common.tma_operands import fits
from ...kernels.gemm.dense import fp8_gemm_nt
from ...kernels.gemm.k_grouped import k_grouped_gemm
from ...kernels.gemm.k_grouped.k_grouped import describe_k_grouped
from ...kernels.gemm.launch import describe_gemm
from ...kernels.gemm.operands import check_sizes
from ...kernels.gemm.tuned import dense_config, target_of
from ...kernels.jit import Kernel, current_driver
from ...kernels.program import (
    Codes,
    Record,
    Span,
    Target,
    Tensor,
    kernels_of,
    layouts,
    prepare_launches,
)
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
"""How the inputs of a gradient in weights are held: in FP8 with a scale for 128 tokens of a
feature, or of 128 features; or in BF16, and then so are the gradients that they meet."""


def check_wgrad(layer: str, wgrad: str) -> None:
    if wgrad not in get_args(Wgrad):
        raise ValueError(f"{layer}: wgrad must be '128x1', '128x128' or 'bf16', got {wgrad!r}")


class TrainedLinearInputs(NamedTuple):
    """What `trained_linear` takes.

    x: [M, K] bf16, fp16 or fp32. weight: [N, K] bf16, fp16 or fp32. bias: [N], or None.
    trusts: as in `codes_of`.
    saves: whether column codes of x are made.
    blocks: whether they have one scale for 128 features.
    batch_invariant: a row of the result has the same bits whatever M is, see `fp8_gemm_nt`.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    trusts: bool
    saves: bool
    blocks: bool
    batch_invariant: bool


Saved = tuple[torch.Tensor, torch.Tensor]  # column codes and their scales
Trained = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # what an op gives, and `Saved`


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
    """In the place of column codes that nobody needs."""
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
    x, weight, bias, trusts, saves, blocks, batch_invariant = inputs
    codes = codes_of(weight, trusts=trusts)
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
    x, weight, bias, trusts, saves, blocks, batch_invariant = inputs
    if not saves or x.ndim != 2 or x.dtype not in FLOATS or x.shape[1:] != weight.shape[1:]:
        return _body(inputs)
    codes = codes_of(weight, trusts=trusts)
    y, columns = _empty(x, len(weight)), empty_columns(*_blocks_of(x), x.device, blocks=blocks)
    of_w, check = _Codes(codes.data, codes.scale_inv), partial(_check, inputs)
    if launch_forward(check, x, of_w, bias, y, columns, blocks, batch_invariant):
        return y, *columns
    return _body(inputs)


def _blocks_of(x: torch.Tensor) -> tuple[int, int]:
    return num_blocks(x.shape[0]), x.shape[1]


trained_linear = register_inputs(
    _OP,
    TrainedLinearInputs,
    "(Tensor, Tensor, Tensor)",
    cpu=_body,
    fake=_allocate,
    hopper=_launch,
)
"""`TrainedLinearInputs` -> (bf16 [M, N], column codes of x and their scales, or empty ones)."""


# ---- The gradient ----


class TrainedLinearBackwardInputs(NamedTuple):
    """What `trained_linear_backward` takes.

    grad: [M, N] bf16, fp16 or fp32. weight: as in the forward.
    of_x, of_x_scale_inv: column codes of x, as the forward gave them.
    d: bf16 or fp32 [N, K], where the gradient of the weight goes; None: it is not wanted.
    accumulates: whether it is added to what is there, in fp32.
    wants_x: whether dX is wanted, which else is empty.
    batch_invariant: as in the forward, for dX.
    """

    grad: torch.Tensor
    weight: torch.Tensor
    of_x: torch.Tensor
    of_x_scale_inv: torch.Tensor
    d: Written | None
    accumulates: bool
    wants_x: bool
    batch_invariant: bool


def _allocate_backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    """Check, then allocate dX; this is also the fake body."""
    grad, weight = inputs.grad, inputs.weight
    check_same_device(_BACKWARD, grad=grad, weight=weight, of_x=inputs.of_x, d=inputs.d)
    check_tensor(_BACKWARD, "grad", grad, FLOATS, 2)
    check_shape(_BACKWARD, "grad", grad, [len(grad), len(weight)], "[M, N] for weight [N, K]")
    return _empty(grad, weight.shape[1] if inputs.wants_x else 0)


def _backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    dx = _allocate_backward(inputs)
    grad, weight, *of_x, d, accumulates, wants_x, batch_invariant = inputs
    codes = codes_of(weight, is_backward=True) if wants_x else None
    found: tuple[torch.Tensor, ...] = ()
    if d is not None:
        found = quantize_1x128_and_128x1(grad, None, False, MIN_GRADIENT_AMAX)
    elif wants_x:
        found = quantize_1x128(grad, False, MIN_GRADIENT_AMAX)
    if codes:
        of_w = codes.transposed, codes.scale_inv.mT
        fp8_gemm_nt((found[0], found[1]), of_w, dx, batch_invariant=batch_invariant)
    if d is not None:
        k_grouped_gemm(*found[2:], *of_x, d, None, len(grad), accumulates)
    return dx


def _launch_backward(inputs: TrainedLinearBackwardInputs) -> torch.Tensor:
    grad, weight, of_x, scale_inv, d, accumulates, wants_x, batch_invariant = inputs
    if d is None or not wants_x:
        return _backward(inputs)
    codes = codes_of(weight, is_backward=True)
    dx, of_w = _empty(grad, weight.shape[1]), _Codes(codes.transposed, codes.scale_inv.mT)
    check, columns = partial(_allocate_backward, inputs), (of_x, scale_inv)
    if launch_backward(check, grad, of_w, columns, dx, d, accumulates, batch_invariant):
        return dx
    return _backward(inputs)


trained_linear_backward = register_inputs(
    _BACKWARD,
    TrainedLinearBackwardInputs,
    "Tensor",
    cpu=_backward,
    fake=_allocate_backward,
    hopper=_launch_backward,
)
"""`TrainedLinearBackwardInputs` -> bf16 dX [M, K]; dW = dY^T X goes to d."""


def weight_gradient(
    weight: torch.Tensor,
    of_y: Saved,
    of_x: Saved,
    num_tokens: int,
    expert_offsets: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """What a backward returns for a weight whose gradient is dY^T X: see `main_grad`.

    weight: [N, K], or [E, N, K] with expert_offsets.
    of_y, of_x: column codes of dY and of X.
    """
    d, accumulates = main_grad.target(weight)
    written = as_written(d)
    k_grouped_gemm(*of_y, *of_x, written, expert_offsets, num_tokens, accumulates)
    return main_grad.result(weight, d if written is d else d.copy_(written))


class Trainee(NamedTuple):
    """A weight as a forward saved it.

    weight: [N, K]. master: what `main_grad.master` gave for it. wgrad: see `Wgrad`.
    """

    weight: torch.Tensor
    master: torch.Tensor | None
    wgrad: Wgrad


def gradients(
    grad: torch.Tensor,
    trainee: Trainee,
    of_x: Sequence[torch.Tensor],
    needs: tuple[bool, bool],
    batch_invariant: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dX, in bf16, and what a backward returns for the weight.

    grad: that of the result, [M, N]. of_x: x [M, K] itself with wgrad "bf16", else its column codes
        and their scales; neither if the weight needs no gradient. needs: which of both are wanted.
    """
    weight, master, wgrad = trainee.weight, trainee.master, trainee.wgrad
    master = weight if master is None else master
    needs_x, needs_weight = needs
    needs_weight = needs_weight and main_grad.is_asked_for(master)
    if needs_weight and wgrad != "bf16":
        d, accumulates = main_grad.target(master)
        written, options = as_written(d), (accumulates, needs_x, batch_invariant)
        dx = trained_linear_backward(grad, weight, *of_x, written, *options)
        of_weight = main_grad.result(master, d if written is d else d.copy_(written))
        return (dx if needs_x else None), of_weight
    dx = of_weight = None
    if needs_x:
        options = False, True, batch_invariant
        dx = trained_linear_backward(grad, weight, *nothing_of(grad), None, *options)
    if needs_weight:
        of_weight = _bf16_gradient(master, grad, of_x[0])
    return dx, of_weight


class _TrainedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wgrad: Wgrad,
        trusts: bool,
        batch_invariant: bool,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        needs_weight = ctx.needs_input_grad[4]
        saves = needs_weight and wgrad != "bf16"
        options = trusts, saves, wgrad == "128x128", batch_invariant
        y: torch.Tensor
        y, *columns = trained_linear(x, weight, bias, *options)
        ctx.wgrad, ctx.dtype, ctx.batch_invariant = wgrad, x.dtype, batch_invariant
        ctx.bias_dtype = None if bias is None else bias.dtype
        of_x = columns if saves else [x] if needs_weight else []
        ctx.save_for_backward(weight, *of_x)
        ctx.master = main_grad.master(weight)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *of_x = ctx.saved_tensors
        *_, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        needs = needs_x, needs_weight
        held = Trainee(weight, ctx.master, ctx.wgrad)
        dx, of_weight = gradients(grad, held, of_x, needs, ctx.batch_invariant)
        of_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs_bias else None
        return None, None, None, None if dx is None else dx.to(ctx.dtype), of_weight, of_bias


def as_written(d: torch.Tensor) -> torch.Tensor:
    """d itself, or FP32 in its place where it has a dtype that the GEMM does not write."""
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
    trusts: bool = True,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """bf16 [M, N], with gradients in x, weight and bias, all by FP8 GEMMs.

    layer: who is named in errors. wgrad: see `Wgrad`. trusts: see `codes_of`. batch_invariant: see
        `TrainedLinearInputs`.
    """
    y: torch.Tensor
    if records(layer, x, weight, bias):
        y = _TrainedLinear.apply(wgrad, trusts, batch_invariant, x, weight, bias)
    else:
        y, *_ = trained_linear(x, weight, bias, trusts, False, False, batch_invariant)
    return y


# ---- Launches ----


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
    """Both codes of x [M, K], and y [M, N], the product of its rows with the weights [N, K]."""
    (m, k), n = x.shape, weights.data.shape[0]
    check_sizes(_OP, m, n, k)
    rows = r.codes("rows", (1, m, k)).first()
    describe_columns(r, x, columns, m, rows=rows, min_amax=min_amax, blocks=blocks)
    config = dense_config(r, m, n, k, batch_invariant)
    describe_gemm(r, config, rows, weights, y, m, bias=bias)


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
    """dX [M, K] of grad [M, N] and the codes of W^T [K, N], and dW [N, K] into d or to it."""
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
    describe_k_grouped(r, columns, x_columns, d.batched(), m, accumulates=accumulates)


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

    check: raises what is wrong with the operands; called for layouts that are new.
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

    found = prepared(key, prepare)
    if found.launches:
        tensors = x, *codes, y, *columns
        of_bias = 0 if bias is None else bias.data_ptr()
        found(x.get_device(), (*[z.data_ptr() for z in tensors], of_bias))
    return bool(found.launches)


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
    """The kernels of a forward that saves column codes, with weights [N, K], x at any address."""

    def describe(span: Span, alignment: int) -> Record:
        r, m = Record(target, _FORWARD_INPUTS, span=span), span.first
        describe_forward(
            r,
            Tensor.contiguous("x", m, k, dtype=dtype, alignment=alignment),
            Codes.contiguous("weight", n, k),
            Tensor.contiguous("y", m, n),
            column_codes(r, "of_x", num_blocks(m), k, blocks=blocks),
            bias=None if bias is None else Tensor.contiguous("bias", n, dtype=bias),
            blocks=blocks,
            batch_invariant=batch_invariant,
        )
        return r

    for alignment in (TMA_BYTES, dtype.itemsize):
        yield from kernels_of(partial(describe, alignment=alignment), most_tokens)


_BACKWARD_INPUTS = "grad", "weight", "weight_scales", "x_columns", "x_columns_scales", "dx", "d"


def launch_backward(
    check: Callable[[], object],
    grad: torch.Tensor,
    codes: _Codes,
    of_x: tuple[torch.Tensor, torch.Tensor],
    dx: torch.Tensor,
    d: torch.Tensor,
    accumulates: bool,
    batch_invariant: bool,
) -> bool:
    """Write dX, and dW into d or to what is there; False if an operand must be copied first.

    check: as for `launch_forward`. codes: those of W^T, [K, N]. of_x: column codes of x. dx: bf16
        [M, K], contiguous. d: [N, K].
    """
    options = accumulates, batch_invariant, current_driver().max_sms
    key = (_OP, "backward", _key_of(grad, *codes, *of_x, d), *options)

    def prepare() -> Launches:
        check()
        if not (_is_simple(grad, codes) and all(map(fits, of_x)) and d.stride(1) == 1):
            return Launches((), 0)
        device_index = grad.get_device()
        r = Record(target_of(device_index), _BACKWARD_INPUTS)
        describe_backward(
            r,
            Tensor.of(grad, "grad"),
            Codes.of(*codes, "weight"),
            Codes.of(*of_x, "x_columns"),
            Tensor.of(dx, "dx"),
            Tensor.of(d, "d"),
            accumulates=accumulates,
            batch_invariant=batch_invariant,
        )
        return prepare_launches(r, device_index)

    found = prepared(key, prepare)
    if found.launches:
        tensors = grad, *codes, *of_x, dx, d
        found(grad.get_device(), tuple([z.data_ptr() for z in tensors]))
    return bool(found.launches)


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
            column_codes(r, "of_x", num_blocks(m), k, blocks=blocks),
            Tensor.contiguous("dx", m, k),
            Tensor.contiguous("d", n, k, dtype=dtype, alignment=alignment),
            accumulates=accumulates,
            batch_invariant=batch_invariant,
        )
        return r

    for alignment in (TMA_BYTES, torch.bfloat16.itemsize):
        yield from kernels_of(partial(describe, alignment=alignment), most_tokens)
