"""Linears, those of experts, and feed-forwards, frozen and trained; adapters beside linears."""

import torch
from torch import nn

from moefp8 import FP8Linear, adapters
from moefp8.functional.grouped_linear import grouped_linear
from moefp8.kernels import E4M3, num_blocks, round_up
from moefp8.layers.moe import SharedExperts
from tests.launches.gpu import with_memory
from tests.launches.layouts.draw import (
    ACTIVATION_SCALES,
    ALIGNED,
    ANY,
    BF16,
    DTYPES,
    FP32,
    INT32,
    LINEARS,
    MODELS,
    ROWS,
    WGRADS,
    Draw,
    layouts,
    step,
)

ops = torch.ops.moefp8
BIASES = None, None, *DTYPES


def bias_of(draw: Draw, n: int) -> torch.Tensor | None:
    dtype = draw.among(BIASES, "bias")
    return None if dtype is None else draw.tensor("bias", (n,), dtype, ("own", "own", "later"))


@layouts("linear", 120)
def linear(draw: Draw):
    (n, k), num_tokens = draw.among(LINEARS, "N,K"), draw.tokens()
    x = draw.tensor("x", (num_tokens, k), draw.among(DTYPES, "dtype"), ANY)
    weight, bias = draw.weight("weight", n, k, places=ROWS), bias_of(draw, n)
    alone = draw.flag("batch_invariant", 5)
    return lambda: ops.fp8_linear(x, *weight, bias, alone)


@layouts("linear.backward", 50)
def linear_backward(draw: Draw):
    (n, k), num_tokens = draw.among(LINEARS, "N,K"), draw.tokens()
    grad = draw.tensor("grad", (num_tokens, n), draw.among(DTYPES, "dtype"), ANY)
    weight = draw.weight("weight", n, k, places=ROWS)
    keep_transposed, alone = draw.among((None, False, True)), draw.flag("batch_invariant", 5)
    return lambda: ops.fp8_linear_backward(grad, *weight, keep_transposed, alone)


def train(draw: Draw, layer: nn.Module) -> nn.Module:
    """The layer, some of whose weights may be frozen, or have a `main_grad`."""
    for name, weight in draw.module(layer).named_parameters():
        weight.requires_grad_(not draw.flag(f"{name} frozen", 6))
        kind = draw.among(("", "", "added", "overwritten"), f"{name} main_grad")
        if kind and weight.requires_grad and "bias" not in name:
            weight.main_grad = draw.tensor(f"main_grad_of_{name}", weight.shape, FP32)
            weight.overwrite_main_grad = kind == "overwritten"
    return layer.train(not draw.flag("eval", 8))


def steps(draw: Draw, layer: nn.Module, x: torch.Tensor, width: int):
    """One or two steps of a layer; the second finds what the first one keeps."""
    x.requires_grad_(not draw.flag("x frozen", 5))
    grad = draw.tensor("grad", (len(x), width), x.dtype, ("own", "own", "own", "odd address"))
    count = draw.among((1, 1, 1, 2), "steps")

    def call():
        result = {}
        for _ in range(count):
            result = step(layer(x), grad, x=x, **dict(layer.named_parameters()))
        return result

    return call


@layouts("linear.trained", 110)
def trained_linear(draw: Draw):
    (n, k), num_tokens = draw.among(LINEARS, "N,K"), draw.tokens()
    options = {
        "bias": draw.flag("bias", 4),
        "dtype": draw.among(DTYPES, "weights"),
        "wgrad": draw.among(WGRADS, "wgrad"),
        "batch_invariant": draw.flag("batch_invariant", 5),
    }
    layer = FP8Linear(k, n, device="meta", trainable=True, **options)
    x = draw.tensor("x", (num_tokens, k), draw.among(DTYPES, "dtype"), ANY)
    return steps(draw, train(draw, layer), x, n)


@layouts("linear.adapted", 30)
def adapted_linear(draw: Draw):
    (n, k), num_tokens = draw.among(LINEARS, "N,K"), draw.tokens()
    layer = nn.Sequential(FP8Linear(k, n, bias=False, device="meta"))
    dtype, rank = draw.among((BF16, FP32), "adapter"), draw.among((1, 8, 12), "rank")
    adapt(draw, layer, rank, dtype)
    x = draw.tensor("x", (num_tokens, k), draw.among(DTYPES, "dtype"), ALIGNED)
    return steps(draw, draw.module(layer), x, n)


def adapt(draw: Draw, layer: nn.Module, rank: int, dtype: torch.dtype, **options) -> None:
    """Put adapters beside the weights of a layer, which must not seem to be on the meta device."""
    with with_memory():
        adapters.add_lora(layer, rank, dtype=dtype, **options)


# ---- Linears of experts ----


def grouped(draw: Draw) -> tuple[torch.Tensor, tuple[int, int, int], torch.Tensor]:
    """Rows, the shape of the experts' weights, and where each expert's rows begin."""
    h, i, e, k = draw.model()
    n, width = draw.among(((h, i), (2 * i, h)), "N,K")
    num_rows = k * draw.tokens(4096)
    offsets = draw.tensor("expert_offsets", (e + 1,), INT32)
    return (
        draw.tensor("rows", (num_rows, width), draw.among(DTYPES, "dtype"), ANY),
        (
            e,
            n,
            width,
        ),
        offsets,
    )


@layouts("grouped_linear", 50)
def frozen_grouped_linear(draw: Draw):
    rows, shape, offsets = grouped(draw)
    weight = draw.weight("weight", *shape, places=ALIGNED)
    rows.requires_grad_(draw.flag("gradient"))
    grad = draw.tensor("grad", (len(rows), shape[1]), BF16, ALIGNED)
    keep_transposed = draw.among((None, False, True))

    def call():
        y = grouped_linear("layer", rows, *weight, offsets, keep_transposed)
        return step(y, grad, rows=rows)

    return call


@layouts("grouped_linear.dgrad", 30)
def grouped_dgrad(draw: Draw):
    h, i, e, k = draw.model()
    num_rows, parts = k * draw.tokens(4096), draw.among((1, 2), "parts")
    n, width = (h, i) if parts == 1 else (2 * i, h)
    columns = n if parts == 1 else 2 * round_up(i, 128)
    data = draw.tensor("data", (num_rows, columns), E4M3, ALIGNED)
    scales = draw.scales("scale_inv", (num_rows, num_blocks(columns)), ACTIVATION_SCALES)
    offsets = draw.tensor("expert_offsets", (e + 1,), INT32)
    if draw.flag("trained"):
        weight = draw.tensor("weight", (e, n, width), draw.among(DTYPES, "weights"), ALIGNED)
        return lambda: ops.trained_dgrad(data, scales, weight, offsets, parts)
    frozen = draw.weight("weight", e, n, width, parts=parts, places=ALIGNED)
    return lambda: ops.grouped_dgrad(data, scales, *frozen, offsets, parts, None)


@layouts("grouped_linear.trained", 50)
def trained_grouped_linear(draw: Draw):
    rows, (e, n, width), offsets = grouped(draw)
    is_backward = draw.flag("backward")
    shape = (e, width, n) if is_backward else (e, n, width)
    weight = draw.tensor("weight", shape, draw.among(DTYPES, "weights"), ALIGNED)
    makes = draw.among(((True, False), (True, True), (False, True)), "makes")
    blocks = draw.flag("blocks")
    return lambda: ops.trained_grouped_linear(rows, weight, offsets, is_backward, *makes, blocks)


# ---- Feed-forwards ----


def feed_forward_weights(draw: Draw, h: int, i: int) -> list[torch.Tensor]:
    """gate, up and down with their scales; gate and up as parts of one weight, or apart."""
    if draw.flag("stacked"):
        data, scales = draw.weight("gate_up", 2 * i, h, parts=2, places=ALIGNED)
        halves = zip(data.tensor_split(2), scales.tensor_split(2), strict=True)
        gate_up = [x for half in halves for x in half]
    else:
        places = ROWS if draw.flag("anywhere", 4) else ("own",)
        gate_up = [*draw.weight("gate", i, h, places=places)]
        gate_up += draw.weight("up", i, h, places=places)
    return [*gate_up, *draw.weight("down", h, i, places=ROWS)]


@layouts("feed_forward", 90)
def feed_forward(draw: Draw):
    (h, i, *_), num_tokens = draw.model(), draw.tokens()
    x = draw.tensor("x", (num_tokens, h), draw.among(DTYPES, "dtype"), ANY)
    weights = feed_forward_weights(draw, h, i)
    options = *draw.activation(), draw.flag("batch_invariant", 4)
    op = ops.feed_forward_saving if draw.flag("saving", 3) else ops.feed_forward
    return lambda: op(x, *weights, *options)


@layouts("feed_forward.backward", 60)
def feed_forward_backward(draw: Draw):
    (h, i, *_), num_tokens = draw.model(), draw.tokens()
    grad = draw.tensor("grad", (num_tokens, h), draw.among(DTYPES, "dtype"), ANY)
    whole = draw.tensor("gate_up", (num_tokens, 2, round_up(i, 8)), BF16, ("own", "own", "later"))
    weights = feed_forward_weights(draw, h, i)
    activation, keep_transposed = draw.activation(), draw.among((None, False, True))
    options = *activation, keep_transposed, draw.flag("batch_invariant", 4)
    return lambda: ops.feed_forward_backward(grad, whole[..., :i], *weights, *options)


@layouts("feed_forward.trained", 70)
def trained_feed_forward(draw: Draw):
    name = draw.among(MODELS, "model")
    h, i, *_ = MODELS[name]
    options = {
        "activation": draw.activation(),
        "dtype": draw.among(DTYPES, "weights"),
        "wgrad": draw.among(WGRADS, "wgrad"),
        "batch_invariant": draw.flag("batch_invariant", 5),
    }
    layer = SharedExperts(h, i, device="meta", trainable=True, **options)
    x = draw.tensor("x", (draw.tokens(), h), draw.among(DTYPES, "dtype"), ANY)
    return steps(draw, train(draw, layer), x, h)
