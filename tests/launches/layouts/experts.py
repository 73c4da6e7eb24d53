"""Routed experts: frozen, trained and with adapters, and whole MoE layers."""

import torch
from torch import nn

from moefp8 import GroupedExperts, MoE
from moefp8.functional.training.gathered import GatheredWeight
from moefp8.kernels import E4M3, num_blocks, round_up
from tests.launches.layouts.draw import (
    ACTIVATION_SCALES,
    ALIGNED,
    ANY,
    BF16,
    DTYPES,
    FP32,
    LINEARS,
    MOSTLY,
    ROWS,
    WGRADS,
    Draw,
    Model,
    layouts,
    step,
)
from tests.launches.layouts.linears import adapt, train
from tests.launches.layouts.routing import choice

ops = torch.ops.moefp8
MANY = 40000, 100000  # of so many tokens, some models compute parts


def tokens_of(draw: Draw) -> int:
    return draw.among(MANY, "T") if draw.flag("many", 12) else draw.tokens()


def weights_of(draw: Draw, model: Model, num_experts: int) -> list[torch.Tensor]:
    """gate_up, down and their scales."""
    h, i, *_ = model
    places = draw.among((ALIGNED, ALIGNED, ROWS))
    gate_up = draw.weight("gate_up", num_experts, 2 * i, h, parts=2, places=places)
    return [*gate_up, *draw.weight("down", num_experts, h, i, places=places)]


def rank_of(draw: Draw, num_experts: int) -> tuple[int, int, int | None]:
    """How many experts are here, the id of the first one, and how many the whole model has."""
    if num_experts == 1 or not draw.flag("rank", 4):
        return num_experts, 0, None
    num_ranks = draw.among([x for x in (2, 4, 8) if x <= num_experts], "ranks")
    here = num_experts // num_ranks
    return here, here * draw.up_to(num_ranks - 1), num_experts


def activations(draw: Draw, name: str, num_tokens: int, h: int):
    """Rows [T, H], and their scales if they are codes."""
    if draw.flag(f"{name} quantized", 5):
        x = draw.tensor(name, (num_tokens, h), E4M3, ROWS)
        shape = num_tokens, num_blocks(h)
        return x, draw.scales(f"{name}_scale_inv", shape, ACTIVATION_SCALES)
    return draw.tensor(name, (num_tokens, h), draw.among(DTYPES, "dtype"), ANY), None


@layouts("experts", 260)
def experts(draw: Draw):
    model, num_tokens = draw.model(), tokens_of(draw)
    x, scales = activations(draw, "x", num_tokens, model.hidden_size)
    choices = draw.choices(num_tokens, model.top_k)
    here, *rank = rank_of(draw, model.num_experts)
    weights = weights_of(draw, model, here)
    addend = None
    if draw.flag("addend", 4):
        addend = draw.tensor("addend", (num_tokens, model.hidden_size), BF16, ANY)
    options = *draw.activation(), draw.flag("masked", 3), *rank, addend, scales
    op = ops.experts_saving if draw.flag("saving", 4) else ops.experts
    return lambda: op(x, *choices, *weights, *options)


@layouts("experts.backward", 130)
def experts_backward(draw: Draw):
    model, num_tokens = draw.model(), tokens_of(draw)
    h, i, e, k = model
    grad, grad_scales = activations(draw, "grad", num_tokens, h)
    choices, saved_scales = draw.choices(num_tokens, k), None
    if draw.flag("codes saved", 3):
        gate_up = draw.tensor("gate_up", (2 * num_tokens * k, i), E4M3, (*MOSTLY, "odd address"))
        shape = 2 * num_tokens * k, num_blocks(i)
        saved_scales = draw.scales("gate_up_scale_inv", shape, ("rows innermost", "own"))
    else:
        shape = num_tokens * k, 2, round_up(i, 8)
        gate_up = draw.tensor("gate_up", shape, BF16, (*MOSTLY, "odd address"))[..., :i]
    here, *rank = rank_of(draw, e)
    weights = weights_of(draw, model, here)
    keep_transposed, activation = draw.among((None, False, True)), draw.activation()
    saved = gate_up, saved_scales
    options = *activation, keep_transposed, *rank, grad_scales
    return lambda: ops.experts_backward(
        grad, *choices, *saved, *weights, None, None, None, *options
    )


def layer_of(draw: Draw, model: Model, is_whole: bool = False, **options) -> GroupedExperts:
    """All experts of a model, or perhaps those of one rank."""
    here, offset, num_global = model.num_experts, 0, None
    if not is_whole:
        here, offset, num_global = rank_of(draw, model.num_experts)
    sizes = here, model.hidden_size, model.intermediate_size
    options |= {
        "activation": draw.activation(),
        "layout": draw.among(("auto", "auto", "masked"), "layout"),
        "saved_dtype": draw.among((BF16, BF16, E4M3), "saved"),
        "bias": draw.biased(),
    }
    layer = GroupedExperts(*sizes, device="meta", **options)
    layer.expert_offset, layer.num_global_experts = offset, num_global
    return layer


def steps(draw: Draw, layer: nn.Module, model: Model, num_tokens: int, dtypes=DTYPES):
    """One or two steps of a layer; the second finds what the first one keeps."""
    h = model.hidden_size
    x = draw.tensor("x", (num_tokens, h), draw.among(dtypes, "dtype"), ANY)
    ids, scores = draw.choices(num_tokens, model.top_k)
    x.requires_grad_(not draw.flag("x frozen", 5))
    scores.requires_grad_(not draw.flag("scores frozen", 4))
    added = {}
    if draw.flag("addend", 6):
        added = {"addend": draw.tensor("addend", (num_tokens, h), BF16)}
    grad = draw.tensor("grad", (num_tokens, h), x.dtype, (*MOSTLY, "odd address"))
    count = draw.among((1, 1, 1, 2), "steps")

    def call():
        result = {}
        for _ in range(count):
            y = layer(x, ids, scores, **added)
            parameters = dict(layer.named_parameters())
            result = step(y, grad, x=x, scores=scores, **parameters)
        return result

    return call


@layouts("experts.layer", 70)
def frozen_layer(draw: Draw):
    model = draw.model()
    layer = draw.module(layer_of(draw, model))
    return steps(draw, layer, model, tokens_of(draw))


@layouts("experts.trained", 160)
def trained_layer(draw: Draw):
    model = draw.model()
    options = {"dtype": draw.among(DTYPES, "weights"), "wgrad": draw.among(WGRADS, "wgrad")}
    layer = layer_of(draw, model, trainable=True, **options)
    return steps(draw, train(draw, layer), model, tokens_of(draw))


@layouts("experts.adapted", 80)
def adapted_layer(draw: Draw):
    model = draw.model()
    layer = nn.ModuleDict({"experts": layer_of(draw, model)})
    rank, dtype = draw.among((1, 4, 8, 16), "rank"), draw.among((BF16, BF16, FP32), "adapter")
    targets = draw.among(("experts", "experts.gate_up_proj", "experts.down_proj"), "targets")
    adapt(draw, layer, rank, dtype, targets=[targets])
    draw.module(layer)
    return steps(draw, layer["experts"], model, draw.tokens(4096))


@layouts("moe", 70)
def moe(draw: Draw):
    h, i, e, k = model = draw.model()
    shared = draw.among((0, i, 2 * i), "shared")
    options = {
        "shared_intermediate_size": shared,
        "shared_expert_gate": bool(shared) and draw.flag("shared gate", 4),
        "activation": draw.activation(),
        "layout": draw.among(("auto", "masked"), "layout"),
        "trainable": draw.flag("trained", 3),
        "batch_invariant": draw.flag("batch_invariant", 5),
    }
    layer = draw.module(MoE(h, i, e, k, device="meta", **options, **choice(draw, e, k)))
    dtype = draw.among((BF16, BF16, FP32), "dtype")
    x = draw.tensor("x", (draw.tokens(4096), model.hidden_size), dtype)
    x.requires_grad_(draw.flag("gradient"))
    if not x.requires_grad:
        layer.requires_grad_(False)
    grad = draw.tensor("grad", x.shape, dtype)
    return lambda: step(layer(x), grad, x=x, **dict(layer.named_parameters()))


# ---- Codes that FSDP gathers in place of master weights ----


def gathered(draw: Draw, name: str, *shape: int, parts: int = 1) -> torch.Tensor:
    codes, scales = draw.weight(name, *shape, parts=parts)
    return GatheredWeight(codes, scales, parts, BF16)


@layouts("gathered.linear", 30)
def gathered_linear(draw: Draw):
    (n, k), num_tokens = draw.among(LINEARS, "N,K"), draw.tokens()
    x = draw.tensor("x", (num_tokens, k), draw.among(DTYPES, "dtype"), ANY)
    grad = draw.tensor("grad", (num_tokens, n), draw.among(DTYPES, "of"), ANY)
    weight, blocks = gathered(draw, "weight", n, k), draw.flag("blocks")
    d, alone = draw.tensor("d", (n, k), FP32), draw.flag("batch_invariant", 5)
    accumulates = draw.flag("accumulates")

    def call():
        y, *columns = ops.trained_linear(x, weight, None, True, True, blocks, alone)
        options = d, accumulates, True, alone
        return {"y": y, "dx": ops.trained_linear_backward(grad, weight, *columns, *options)}

    return call


@layouts("gathered.experts", 30)
def gathered_experts(draw: Draw):
    h, i, e, k = draw.model()
    num_tokens = draw.tokens()
    x = draw.tensor("x", (num_tokens, h), draw.among(DTYPES, "dtype"), ANY)
    grad = draw.tensor("grad", (num_tokens, h), BF16, ANY)
    choices = draw.choices(num_tokens, k)
    weights = gathered(draw, "gate_up", e, 2 * i, h, parts=2), gathered(draw, "down", e, h, i)
    targets = draw.tensor("d_gate_up", (e, 2 * i, h), FP32), draw.tensor("d_down", (e, h, i), FP32)
    activation, blocks = draw.activation(), draw.flag("blocks")

    def call():
        options = *activation, False, 0, None, None, True, True
        y, saved = ops.trained_experts(x, *choices, *weights, None, None, *options)
        args = grad, x, *choices, saved, None, *weights, None, *targets, None, None, True, False
        return {"y": y, "dx": ops.trained_experts_backward(*args, *activation, 0, None, blocks)}

    return call
