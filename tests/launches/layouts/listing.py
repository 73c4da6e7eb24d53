"""Which kernels `precompile` lists for a layer."""

from typing import Any

from torch import nn

from moefp8 import FP8Linear, GroupedExperts, MoE, TopKRouter
from moefp8.kernels.targets import target_with
from moefp8.layers.moe import SharedExperts
from moefp8.precompile.layers import kernels_of
from tests.gpu import ARCH
from tests.launches.layouts.draw import (
    BF16,
    DTYPES,
    FP32,
    LINEARS,
    WGRADS,
    Draw,
    Listed,
    Model,
    layouts,
)
from tests.launches.layouts.ranks import group_of
from tests.launches.layouts.routing import choice

MOST_TOKENS = 1, 64, 512, 1024, 4096


def listing(draw: Draw, layer: nn.Module, top_k: int | None = None, backward: bool = False):
    options = {
        "max_tokens": draw.among(MOST_TOKENS, "T"),
        "dtype": draw.among(DTYPES, "dtype"),
        "updating": draw.among((None, None, BF16, FP32), "updating"),
        "backward": backward,
        "top_k": top_k,
    }
    return lambda: Listed(kernels_of(layer, target=target_with(ARCH, draw.num_sms), **options))


def trains(draw: Draw) -> dict[str, Any]:
    if not draw.flag("trained", 3):
        return {}
    weights, wgrad = draw.among((BF16, FP32), "weights"), draw.among(WGRADS, "wgrad")
    return {"trainable": True, "dtype": weights, "wgrad": wgrad}


@layouts("precompile.linear", 20)
def linear(draw: Draw):
    n, k = draw.among(LINEARS, "N,K")
    options = {"bias": draw.flag("bias"), "batch_invariant": draw.flag("alone", 4)}
    layer = FP8Linear(k, n, device="meta", **trains(draw), **options)
    return listing(draw, layer, backward=draw.flag("backward"))


@layouts("precompile.experts", 30)
def experts(draw: Draw):
    h, i, e, k = model = draw.model()
    layout = draw.among(("auto", "auto", "masked"), "layout")
    trained, bias = trains(draw), draw.biased()
    layer = GroupedExperts(e, h, i, device="meta", layout=layout, bias=bias, **trained)
    if draw.flag("ranks", 4):
        share(draw, layer, model)
    return listing(draw, layer, k, draw.flag("backward"))


def share(draw: Draw, layer: GroupedExperts, model: Model) -> None:
    """Let the layer have other ranks beside it."""
    from moefp8.distributed.expert_parallel.experts import ParallelExperts

    num_ranks = draw.among((2, 8), "P")
    layer.parallel = ParallelExperts(group_of(draw, 0, [1] * num_ranks), model.num_experts)
    layer.num_global_experts = model.num_experts * num_ranks


@layouts("precompile.feed_forward", 15)
def feed_forward(draw: Draw):
    h, i, *_ = draw.model()
    layer = SharedExperts(h, i, device="meta", **trains(draw))
    return listing(draw, layer, backward=draw.flag("backward"))


@layouts("precompile.router", 15)
def router(draw: Draw):
    h, _, e, k = draw.model()
    layer = TopKRouter(h, e, k, device="meta", **choice(draw, e, k))
    return listing(draw, layer, backward=draw.flag("backward"))


@layouts("precompile.moe", 10)
def moe(draw: Draw):
    h, i, e, k = draw.model()
    layer = MoE(h, i, e, k, device="meta", shared_intermediate_size=i, **choice(draw, e, k))
    return listing(draw, layer, k, draw.flag("backward"))
