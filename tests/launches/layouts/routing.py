"""The router and its gradient; plans, dispatch and combine alone."""

import torch

from moefp8 import TopKRouter
from moefp8.routing import build_plan, combine, dispatch, sigmoid_group_topk, softmax_topk
from tests.launches.layouts.draw import (
    ALIGNED,
    ANY,
    BF16,
    DTYPES,
    FP32,
    INT32,
    INT64,
    MODELS,
    ROWS,
    SCORES,
    TURNED,
    Draw,
    layouts,
    step,
)

ops = torch.ops.moefp8
MANY_TOKENS = 70000  # the logits of so many are computed in parts


def choice(draw: Draw, num_experts: int, top_k: int) -> dict:
    """Further arguments of a `TopKRouter`."""
    if draw.among(("softmax", "sigmoid"), "scoring") == "softmax":
        return {"renormalize": draw.flag("renormalize")}
    divisors = [x for x in (1, 2, 4, 8) if num_experts % x == 0]
    groups = draw.among(divisors, "groups")
    enough = [x for x in range(1, groups + 1) if x * (num_experts // groups) >= top_k]
    return {
        "scoring": "sigmoid",
        "renormalize": draw.flag("renormalize"),
        "num_groups": groups,
        "topk_groups": draw.among(enough, "topk_groups"),
        "scaling_factor": draw.among((1.0, 2.5), "factor"),
        "correction_bias": draw.flag("bias"),
    }


@layouts("router", 150)
def router(draw: Draw):
    h, _, e, k = draw.model()
    num_tokens = MANY_TOKENS if draw.flag("many", 20) else draw.tokens()
    made = draw.module(TopKRouter(h, e, k, device="meta", **choice(draw, e, k)))
    x = draw.tensor("x", (num_tokens, h), draw.among(DTYPES, "dtype"), ANY)
    if draw.flag("odd weight", 6):
        made.weight = torch.nn.Parameter(draw.tensor("weight", (e, h), FP32, ROWS))
    grads = draw.among(("", "x", "weight", "both"), "gradients")
    made.weight.requires_grad_(grads in ("weight", "both"))
    x.requires_grad_(grads in ("x", "both"))
    grad = draw.tensor("grad", (num_tokens, k), FP32, TURNED)

    def call():
        index, weights = made(x)
        return {"index": index, **step(weights, grad, x=x, weight=made.weight)}

    return call


def logits_of(draw: Draw) -> torch.Tensor:
    num_experts = draw.among((x.num_experts for x in MODELS.values()), "E")
    return draw.tensor("logits", (draw.tokens(), num_experts), draw.among(DTYPES, "dtype"), ANY)


@layouts("top_k", 80)
def top_k(draw: Draw):
    logits = logits_of(draw)
    num_experts = logits.shape[1]
    k = min(num_experts, draw.among((1, 2, 4, 6, 8, 10), "k"))
    logits.requires_grad_(draw.flag("gradient"))
    grad = draw.tensor("grad", (len(logits), k), FP32, TURNED)
    options = choice(draw, num_experts, k)
    if "scoring" not in options:

        def call():
            index, weights = softmax_topk(logits, k, options["renormalize"])
            return {"index": index, **step(weights, grad, logits=logits)}

        return call
    bias = draw.tensor("bias", (num_experts,), FP32) if options.pop("correction_bias") else None
    options.pop("scoring")

    def call_sigmoid():
        index, weights = sigmoid_group_topk(logits, bias, k, **options)
        return {"index": index, **step(weights, grad, logits=logits)}

    return call_sigmoid


@layouts("top_k.backward", 30)
def top_k_backward(draw: Draw):
    logits, k = logits_of(draw), draw.among((1, 2, 4), "k")
    k = min(k, logits.shape[1])
    grad = draw.tensor("grad", (len(logits), k), draw.among((FP32, BF16), "of"), TURNED)
    index = draw.tensor("index", (len(logits), k), INT64, TURNED)
    options = draw.flag("by_sigmoid"), draw.flag("renormalize"), draw.among((1.0, 2.5), "factor")
    return lambda: ops.top_k_backward(grad, logits, index, *options)


def ids_of(draw: Draw, num_tokens: int, top_k: int) -> torch.Tensor:
    return draw.tensor("ids", (num_tokens, top_k), draw.among((INT64, INT32), "ids"), TURNED)


def rank(draw: Draw, num_experts: int) -> dict:
    """Whether these are the experts of one rank, and of which."""
    if not draw.flag("rank", 4):
        return {}
    others = draw.among((1, 3, 7), "others") * num_experts
    return {"expert_offset": others // 2, "num_global_experts": others + num_experts}


@layouts("plan", 60)
def plan(draw: Draw):
    _, _, e, k = draw.model()
    num_tokens = MANY_TOKENS if draw.flag("many", 10) else draw.tokens()
    ids, options = ids_of(draw, num_tokens, k), rank(draw, e)
    if draw.flag("masked", 3):
        options |= {"layout": "masked", "max_m": num_tokens + draw.among((0, 0, 5), "spare")}
    else:
        options |= {"alignment": draw.among((1, 1, 4, 128), "alignment")}
    return lambda: vars(build_plan(ids, e, **options))


@layouts("dispatch and combine", 60)
def dispatch_and_combine(draw: Draw):
    h, _, e, k = draw.model()
    num_tokens = draw.tokens(4096)
    ids = ids_of(draw, num_tokens, k)
    x = draw.tensor("x", (num_tokens, h), draw.among(DTYPES, "dtype"), ANY)
    layout = draw.among(("contiguous", "contiguous", "masked"), "layout")
    scores = draw.tensor("scores", (num_tokens, k), draw.among(SCORES, "scores"), TURNED)
    grad = draw.tensor("grad", (num_tokens, h), x.dtype)
    x.requires_grad_(draw.flag("gradient", 3))

    def call():
        made = build_plan(ids, e, layout)
        return step(combine(dispatch(x, made), made, scores), grad, x=x)

    return call


@layouts("combine", 60)
def combine_alone(draw: Draw):
    h, _, _, k = draw.model()
    num_tokens = draw.tokens()
    rows = draw.tensor(
        "rows", (num_tokens * k, h), draw.among((BF16,) * 9 + (FP32,), "rows"), ALIGNED
    )
    to_row = draw.tensor("token_to_row", (num_tokens, k), INT32, TURNED)
    scores = draw.tensor("scores", (num_tokens, k), draw.among(SCORES, "scores"), ANY)
    return lambda: ops.combine(rows, to_row, scores)


@layouts("quantized_rows", 40)
def quantized_rows(draw: Draw):
    h, _, e, k = draw.model()
    num_tokens = draw.tokens()
    grad = draw.tensor("grad", (num_tokens, h), draw.among(DTYPES, "dtype"), ANY)
    ids, options = ids_of(draw, num_tokens, k), rank(draw, e)
    offset, total = options.get("expert_offset", 0), options.get("num_global_experts")
    return lambda: ops.quantized_rows(grad, ids, e, offset, total)
