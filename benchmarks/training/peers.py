"""Who makes a training step: moefp8, torch in BF16, TransformerEngine, torchao and SonicMoE.

moefp8 is timed with column codes of inputs in 128x1 and in 128x128 blocks (`wgrad`), with weights
that are quantized once, as in the micro-batches behind the first one of an optimizer's step, or in
every step. TransformerEngine tells the two apart by `is_first_microbatch`; torchao quantizes in
every step. SonicMoE computes in BF16.
"""

import os
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gradient_peers import sorted_by_expert
from benchmarks.peers import BF16, OURS, Peer, has
from benchmarks.training import sonic
from benchmarks.training.cases import LayerStep, LinearStep, Step
from moefp8 import GroupedExperts
from moefp8.functional.training.grouped_linear import grouped_linear
from moefp8.functional.training.linear import linear
from moefp8.functional.training.weights import codes_stay, requantize
from moefp8.functional.training.wgrad import Wgrad
from moefp8.kernels import E4M3
from moefp8.routing import softmax_topk

BLOCKS, EVERY, EVERY_BLOCKS = "moefp8_128x128", "moefp8_every_step", "moefp8_every_step_128x128"
SAVED_FP8, SAVED_FP8_BLOCKS = "moefp8_e4m3", "moefp8_e4m3_128x128"
TE_ONCE, TE_EVERY, TORCHAO, SONIC = "te_once", "te_every_step", "torchao", "sonicmoe"
OF_OURS = OURS, BLOCKS, EVERY, EVERY_BLOCKS, SAVED_FP8, SAVED_FP8_BLOCKS
MAY_BE_CAPTURED = *OF_OURS, BF16, SONIC  # as CUDA graphs; others are called one by one
# What TransformerEngine's path of grouped tensors takes at most; beyond it is told all loads on the
# host, and multiplies one expert after the other.
MOST_EXPERTS_OF_TE = 64
_LAYER = "benchmarks.training"  # who is named in errors


# ---- moefp8 ----


def our_linear(wgrad: Wgrad, *, every: bool = False) -> Callable[[LinearStep], Step]:
    def prepare(operands: LinearStep) -> Step:
        x, weight = operands.x, operands.weight_anew if every else operands.weight
        offsets = None if operands.counts is None else operands.offsets

        def forward() -> torch.Tensor:
            if offsets is None:
                return linear(_LAYER, x, weight, None, wgrad)
            return grouped_linear(_LAYER, x, weight, offsets, wgrad)

        return _our_step(forward, (x, weight), operands.grad, [weight], every)

    return prepare


def our_layer(
    wgrad: Wgrad, *, every: bool = False, saved_dtype: torch.dtype = torch.bfloat16
) -> Callable[[LayerStep], Step]:
    def prepare(operands: LayerStep) -> Step:
        weights = operands.anew if every else (operands.gate_up, operands.down)
        experts = GroupedExperts.from_weights(*weights, trainable=True, wgrad=wgrad).train()
        experts.saved_dtype = saved_dtype

        def forward() -> torch.Tensor:
            chosen = softmax_topk(operands.logits(), operands.case.model.top_k, renormalize=False)
            y: torch.Tensor = experts(operands.x, *chosen)
            return y

        leaves = operands.x, operands.router, *weights
        return _our_step(forward, leaves, operands.grad, weights, every)

    return prepare


def _our_step(
    forward: Callable[[], torch.Tensor],
    leaves: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    weights: Collection[torch.Tensor],
    every: bool,
) -> Step:
    """Weights are quantized before every step, also in a graph, or stay what they are."""
    if every:
        return Step(forward, leaves, grad, before=lambda: requantize(weights))
    return Step(forward, leaves, grad, within=codes_stay)


# ---- BF16 ----


def bf16_linear(operands: LinearStep) -> Step:
    x, weight, ends = operands.x, operands.weight, operands.ends
    if operands.counts is None:
        return operands.step(lambda: F.linear(x, weight))
    return operands.step(lambda: F.grouped_mm(x, weight.mT, offs=ends))


def bf16_layer(operands: LayerStep) -> Step:
    """Rows sorted by expert, grouped products, and sums of rows at their tokens."""
    x, (num_experts, top_k) = operands.x, operands.case.model[1:3]

    def forward() -> torch.Tensor:
        scores, index = operands.route()
        order, ends = sorted_by_expert(index, num_experts)
        token = order // top_k
        gate, up = F.grouped_mm(x[token], operands.gate_up.mT, offs=ends).chunk(2, dim=-1)
        rows = F.grouped_mm(F.silu(gate) * up, operands.down.mT, offs=ends)
        rows = rows * scores.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(x).index_add(0, token, rows)

    return operands.step(forward)


# ---- Libraries ----


def te_linear(*, once: bool) -> Callable[[LinearStep], Step]:
    """`Linear` or `GroupedLinear` with blockwise scaling; with `once`, behind a first step."""

    def prepare(operands: LinearStep) -> Step:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8BlockScaling

        x, counts, recipe = operands.x, operands.counts, Float8BlockScaling()
        n, k = operands.weight.shape[-2:]
        given: tuple[Any, ...] = (x,)
        if counts is None:
            module = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16)
        else:
            native = len(counts) <= MOST_EXPERTS_OF_TE
            module = te.GroupedLinear(
                *(len(counts), k, n),
                bias=False,
                params_dtype=torch.bfloat16,
                use_grouped_tensor=native,
            )
            given = x, torch.tensor(counts, device=x.device) if native else counts
        parameters = tuple(module.parameters())
        _give(operands.weight, parameters)

        def forward(first: bool | None) -> torch.Tensor:
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                y: torch.Tensor = module(*given, is_first_microbatch=first)
                return y

        def step(first: bool | None) -> Step:
            return Step(lambda: forward(first), (x, *parameters), operands.grad)

        if not once:
            return step(None)
        step(True)()
        return step(False)

    return prepare


def _give(weight: torch.Tensor, parameters: Collection[torch.Tensor]) -> None:
    """Copy a weight to the parameters of a module: one, or one of each expert."""
    parts = [weight.detach()]
    if len(parameters) > 1:
        parts = [*weight.detach()]
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.view(part.shape).copy_(part)


def torchao_linear(operands: LinearStep) -> Step:
    x, weight, ends = operands.x, operands.weight, operands.ends
    if operands.counts is None:
        from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

        # With True its GEMMs are Triton's, and half as fast.
        return operands.step(lambda: fp8_blockwise_mm.apply(x, weight, 128, torch.bfloat16, False))
    from torchao.prototype.moe_training.blockwise_fp8.grouped_mm import (
        _to_fp8_blockwise_then_scaled_grouped_mm as grouped_mm,
    )

    return operands.step(lambda: grouped_mm(x, weight.mT, ends))


def sonic_layer(operands: LayerStep) -> Step:
    sonic.check_it_ends(str(operands.case))
    return sonic_step(operands)


def sonic_step(operands: LayerStep) -> Step:
    """SonicMoE wants experts innermost; gate and up, and scores, mean something else to it."""
    os.environ.setdefault(*sonic.ONE_COMPILER)
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    x, router, top_k = operands.x, operands.router, operands.case.model.top_k
    gate_up, down = (
        weight.detach().permute(1, 2, 0).requires_grad_()
        for weight in (operands.gate_up, operands.down)
    )

    def forward() -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        y: torch.Tensor
        y, *_ = moe_TC_softmax_topk_layer(x, router, gate_up, None, down, None, top_k, stream)
        return y

    return Step(forward, (x, router, gate_up, down), operands.grad)


_torchao_linear = has("torchao.prototype.blockwise_fp8_training.linear", "fp8_blockwise_mm")
_torchao_grouped = has(
    "torchao.prototype.moe_training.blockwise_fp8.grouped_mm",
    "_to_fp8_blockwise_then_scaled_grouped_mm",
)
_TORCHAO = "pip install torchao==0.18.0, which wants DeepGEMM for grouped products"
_TE = "pip install transformer-engine[pytorch]>=2.20, and cuBLAS 13.8.1 or newer"


def _te(title: str, *, once: bool) -> Peer:
    return Peer(
        f"TransformerEngine{title}",
        "block_scaled",
        te_linear(once=once),
        needs=has("transformer_engine.pytorch", "GroupedLinear"),
        remedy=_TE,
    )


def _torchao(needs: Callable[[], object]) -> Peer:
    return Peer("torchao, every step", "block_scaled", torchao_linear, needs=needs, remedy=_TORCHAO)


def _linears(bf16: str, torchao: Peer) -> dict[str, Peer]:
    return {
        OURS: Peer("moefp8, 128x1", "block_scaled", our_linear("128x1")),
        BLOCKS: Peer("moefp8, 128x128", "block_scaled", our_linear("128x128")),
        EVERY: Peer("moefp8, 128x1, every step", "block_scaled", our_linear("128x1", every=True)),
        EVERY_BLOCKS: Peer(
            "moefp8, 128x128, every step", "block_scaled", our_linear("128x128", every=True)
        ),
        BF16: Peer(bf16, "bf16", bf16_linear),
        TE_ONCE: _te("", once=True),
        TE_EVERY: _te(", every step", once=False),
        TORCHAO: torchao,
    }


LINEARS = _linears("BF16, cuBLAS", _torchao(_torchao_linear))
GROUPED = _linears("BF16, grouped_mm", _torchao(_torchao_grouped))
LAYERS = {
    OURS: Peer("moefp8, 128x1", "block_scaled", our_layer("128x1")),
    BLOCKS: Peer("moefp8, 128x128", "block_scaled", our_layer("128x128")),
    EVERY: Peer("moefp8, 128x1, every step", "block_scaled", our_layer("128x1", every=True)),
    EVERY_BLOCKS: Peer(
        "moefp8, 128x128, every step", "block_scaled", our_layer("128x128", every=True)
    ),
    SAVED_FP8: Peer(
        "moefp8, 128x1, saved in E4M3", "block_scaled", our_layer("128x1", saved_dtype=E4M3)
    ),
    SAVED_FP8_BLOCKS: Peer(
        "moefp8, 128x128, saved in E4M3", "block_scaled", our_layer("128x128", saved_dtype=E4M3)
    ),
    BF16: Peer("BF16, grouped_mm", "bf16", bf16_layer),
    SONIC: Peer(
        "SonicMoE, BF16",
        "bf16",
        sonic_layer,
        needs=has("sonicmoe.functional", "moe_TC_softmax_topk_layer"),
        remedy="pip install sonicmoe, in a version built for this torch",
    ),
}
NOT_COMPARED = (SONIC,)  # it computes another function of the same weights, at the same cost
