"""Quantization and transposition of tensors, and the kernels of SwiGLU."""

import torch

from moefp8.kernels import E4M3, num_blocks, round_up
from moefp8.quant.both import quantize_128x128_both
from moefp8.quant.transpose import transpose_codes
from tests.launches.layouts.draw import (
    ANY,
    BF16,
    DTYPES,
    INT32,
    LINEARS,
    MOSTLY,
    ROWS,
    SCORES,
    Draw,
    layouts,
)

ops = torch.ops.moefp8
AMAX = 1e-4, 1e-4, 2.0**-60
WIDTHS = 1, 7, 8, 64, 100, 128, 129, 133, 200, 264, 331, 512, 768, 1408, 1536, 2048, 2880, 7168


def matrix(draw: Draw, name: str, places=ANY) -> torch.Tensor:
    shape = draw.tokens(), draw.among(WIDTHS, "K")
    return draw.tensor(name, shape, draw.among(DTYPES, "dtype"), places)


@layouts("quantize.rows", 70)
def rows(draw: Draw):
    x, ue8m0 = matrix(draw, "x"), draw.flag("ue8m0", 4)
    if draw.flag("stacked", 5):
        shape = draw.among((2, 3), "E"), *x.shape
        x = draw.tensor("x", shape, x.dtype, ROWS)
    if draw.flag("gradient", 4):
        return lambda: ops.quantize_gradient_1x128(x)
    min_amax = draw.among(AMAX, "min_amax")
    return lambda: ops.quantize_1x128(x, ue8m0, min_amax)


def weights(draw: Draw, dtype: torch.dtype, places=ROWS) -> torch.Tensor:
    """[N, K] or [E, N, K], with an even N."""
    n, k = draw.among(LINEARS, "N,K")
    batch = draw.among(((), (), (1,), (6,), (128,)), "E")
    return draw.tensor("w", (*batch, n + n % 2, k), dtype, places)


@layouts("quantize.blocks", 50)
def blocks(draw: Draw):
    w, ue8m0 = weights(draw, draw.among(DTYPES, "dtype"), ANY), draw.flag("ue8m0", 4)
    return lambda: ops.quantize_128x128(w, ue8m0)


@layouts("quantize.both", 40)
def both(draw: Draw):
    w, parts = weights(draw, draw.among(DTYPES, "dtype")), draw.among((1, 2), "parts")
    return lambda: quantize_128x128_both(w, parts)


@layouts("quantize.each", 40)
def each(draw: Draw):
    n, k = draw.among([x for x in LINEARS if max(x) < 9000], "N,K")
    dtype, parts = draw.among(DTYPES, "dtype"), draw.among((1, 2), "parts")
    stack = parts * draw.among((1, 4, 60, 128, 150), "S")
    count = max(1, draw.up_to(stack))
    draw.note(f"M={count}")
    data = draw.tensor("data", (stack, n, k), E4M3)
    scales = draw.scales("scale_inv", (stack, num_blocks(n), num_blocks(k)))
    transposed = None
    if draw.flag("transposed"):
        width = draw.among((n, round_up(n, 128)), "width")
        shape = stack // parts, k, parts * width
        transposed = draw.tensor("transposed", shape, E4M3, (*MOSTLY, "wide", "odd address"))
    if draw.flag("as a stack", 3):
        matrices = [draw.tensor("w", (count, n, k), dtype)]
    else:
        places = MOSTLY if draw.flag("aligned") else ("own", "later")
        matrices = [draw.tensor(f"w{i}", (n, k), dtype, places) for i in range(count)]
    places = list(reversed(range(stack)))[:count]
    return lambda: ops.quantize_128x128_each_into(data, scales, transposed, parts, matrices, places)


@layouts("quantize.columns", 80)
def columns(draw: Draw):
    x = matrix(draw, "x")
    options = draw.flag("ue8m0", 5), draw.among(AMAX, "min_amax"), draw.flag("blocks")
    offsets = to_token = None
    if draw.flag("grouped"):
        groups = draw.among((1, 4, 60, 128), "E")
        offsets = draw.tensor("expert_offsets", (groups + 1,), INT32)
    if draw.flag("both ways"):
        return lambda: ops.quantize_1x128_and_128x1(x, offsets, *options)
    if draw.flag("gathered"):
        num_rows = max(1, len(x) * draw.among((1, 2, 8), "k"))
        to_token = draw.tensor("row_to_token", (num_rows,), INT32)
    return lambda: ops.quantize_128x1(x, offsets, to_token, *options)


@layouts("transpose", 50)
def transpose(draw: Draw):
    w, parts = weights(draw, E4M3), draw.among((1, 2), "parts")
    return lambda: transpose_codes(w, parts)


# ---- SwiGLU between GEMMs ----


def saved(draw: Draw, num_rows: int, size: int, places=("own", "8 bytes on")) -> torch.Tensor:
    """What a forward keeps of gate and up: bf16 [R, 2, I]."""
    if draw.flag("in order", 8):
        return draw.tensor("gate_up", (num_rows, 2, size), BF16, places)
    whole = draw.tensor("gate_up", (num_rows, 2, round_up(size, 8)), BF16)
    return whole[..., :size]


@layouts("activation", 30)
def activation_rows(draw: Draw):
    gate_up = saved(draw, draw.tokens(), draw.among(WIDTHS, "I"))
    activation = draw.activation()
    return lambda: ops.activation_rows(gate_up, *activation)


def rows_of_choices(draw: Draw) -> tuple[torch.Tensor, ...]:
    """The gradient of what is activated, the rows of choices, and scores."""
    num_tokens, top_k, size = draw.tokens(), draw.among((1, 2, 4, 8, 10), "k"), draw.among(WIDTHS)
    draw.note(f"I={size}")
    grad = draw.tensor("grad", (num_tokens * top_k, size), BF16, ROWS)
    to_row = draw.tensor("token_to_row", (num_tokens, top_k), INT32)
    scores = draw.tensor("scores", (num_tokens, top_k), draw.among(SCORES, "scores"), ANY)
    return grad, to_row, scores


@layouts("activation.backward", 40)
def activation_rows_backward(draw: Draw):
    grad, *choices = rows_of_choices(draw)
    gate_up, activation = saved(draw, *grad.shape), draw.activation()
    return lambda: ops.activation_rows_backward(grad, gate_up, *choices, *activation)


@layouts("activation.columns", 60)
def activation_columns_backward(draw: Draw):
    grad, *choices = rows_of_choices(draw)
    (num_rows, size), scales = grad.shape, None
    if draw.flag("codes"):
        gate_up = draw.tensor("gate_up", (2 * num_rows, size), E4M3, (*MOSTLY, "odd address"))
        shape = 2 * num_rows, num_blocks(size)
        scales = draw.scales("gate_up_scale_inv", shape, ("rows innermost", "own"))
    else:
        gate_up = saved(draw, num_rows, size)
    offsets = draw.tensor("expert_offsets", (draw.among((1, 8, 60, 128), "E") + 1,), INT32)
    activation, by_blocks = draw.activation(), draw.flag("blocks")
    inputs = grad, gate_up, scales, offsets, *choices
    return lambda: ops.activation_columns_backward(*inputs, *activation, by_blocks)
