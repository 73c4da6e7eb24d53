"""The router's choice: which experts a token goes to, and with which weight.

T tokens, E experts. Everything is FP32. Of equal scores the lowest expert id wins, and NaN is the
largest score, on every device and every time. On a Hopper GPU one kernel chooses among up to 512
experts. PyTorch's operations choose among more, and on other GPUs, with a warning.
"""

from functools import partial, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..kernels.common.checks import INPUTS, check_same_device
from ..kernels.registry import register_inputs
from .top_k_backward_launch import TopKBackwardInputs, launch_top_k_backward
from .top_k_launch import TopKInputs, can_launch, launch_top_k, softmax_inputs

Chosen = tuple[torch.Tensor, torch.Tensor]  # the tensors of a `TopK`
_SOFTMAX, _SIGMOID = "softmax_topk", "sigmoid_group_topk"


class TopK(NamedTuple):
    """The choices of T tokens, in the order in which `GroupedExperts.forward` takes them.

    Attributes:
        top_k_index: int64 [T, k], expert ids, best first.
        top_k_weights: fp32 [T, k].
    """

    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor


def softmax_topk(logits: torch.Tensor, k: int, renormalize: bool) -> TopK:
    """Softmax over all experts, then the k best (Qwen3-MoE, Mixtral).

    The k largest logits are chosen: experts whose logits differ are no tie, even where their
    softmax is rounded to one number. A row with NaN or +Inf has `top_k_weights` of NaN.

    Args:
        logits: [T, E], any float dtype.
        renormalize: divide the `top_k_weights` by their sum (`norm_topk_prob`).

    Raises:
        TypeError: `logits` is not of a float dtype.
        ValueError: `k` is not in [1, E], or `logits` is not two-dimensional.
    """
    return TopK(*_SoftmaxTopK.apply(logits, k, renormalize))


def sigmoid_group_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
) -> TopK:
    """DeepSeek-V3's choice: sigmoid scores, a bias that steers but does not weigh, group limits.

    The score of an expert is `sigmoid(logits) + bias`. The `topk_groups` groups whose two best
    scores have the largest sum stay, all other scores become -Inf, and the k best win. Their
    `top_k_weights` are `sigmoid(logits)`, divided by (their sum + 1e-20) if `renormalize`, times
    `scaling_factor` (arXiv:2412.19437, section 2.1.2). The sigmoid is rounded correctly but for
    1e-5 ulp; it and `top_k_weights` are equal bit for bit on every device.

    Args:
        logits: [T, E], any float dtype.
        bias: [E] (`e_score_correction_bias`), FP32 for a reason: BF16 makes distinct values equal.
        num_groups: `n_group`, a divisor of E. 1, with `topk_groups` 1, means no limit.
        topk_groups: `topk_group`, the groups that stay.
        scaling_factor: `routed_scaling_factor`.

    Raises:
        TypeError: `logits` is not of a float dtype.
        ValueError: sizes contradict one another; the message names them.
    """
    inputs = logits, bias, k, num_groups, topk_groups, renormalize, scaling_factor
    return TopK(*_SigmoidTopK.apply(*inputs))


class _SoftmaxTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, k: int, renormalize: bool) -> Chosen:
        index, weights = choose_by_softmax(logits, k, renormalize)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)  # index has none
        ctx.save_for_backward(logits, index)
        ctx.renormalize = renormalize
        return index, weights

    @staticmethod
    def backward(ctx: Any, _: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, index = ctx.saved_tensors
        return _backward(grad, logits, index, False, ctx.renormalize, 1.0), None, None


class _SigmoidTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> Chosen:
        index, weights = choose_by_sigmoid(logits, bias, *rest)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)  # index has none
        ctx.save_for_backward(logits, index)
        ctx.rest = rest
        return index, weights

    @staticmethod
    def backward(ctx: Any, _: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, index = ctx.saved_tensors
        grad_logits = _backward(grad, logits, index, True, *ctx.rest[-2:])
        return grad_logits, None, *(None for _ in ctx.rest)


# ---- Gradients ----


def _backward(grad: torch.Tensor | None, *rest: Any) -> torch.Tensor | None:
    if grad is None:
        return None
    if torch.is_grad_enabled():  # there are gradients of gradients
        return grad_of_logits(TopKBackwardInputs(grad, *rest))
    grad_logits: torch.Tensor = top_k_backward(grad, *rest)
    return grad_logits


def softmax_grad(
    grad: torch.Tensor, logits: torch.Tensor, index: torch.Tensor, renormalize: bool
) -> torch.Tensor:
    """The gradient of logits for `softmax_topk`; grad: of top_k_weights, index: what it chose."""
    scores = logits.float().softmax(dim=-1)
    if renormalize:
        grad = _grad_of_parts(grad, scores.gather(1, index), 0.0)
    grad = torch.zeros_like(scores).scatter(1, index, grad)
    grad = scores * (grad - (grad * scores).sum(dim=-1, keepdim=True))
    return grad.to(logits.dtype)


def sigmoid_grad(
    grad: torch.Tensor,
    logits: torch.Tensor,
    index: torch.Tensor,
    renormalize: bool,
    scaling_factor: float,
) -> torch.Tensor:
    """The gradient of logits for `sigmoid_group_topk`, likewise."""
    scores = logits.float().gather(1, index).sigmoid()
    grad = grad * scaling_factor
    if renormalize:
        grad = _grad_of_parts(grad, scores, 1e-20)
    grad = grad * scores * (1 - scores)
    return torch.zeros_like(logits).scatter(1, index, grad.to(logits.dtype))


def _grad_of_parts(grad: torch.Tensor, x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The gradient of x, where `grad` is that of `x / (x.sum(-1) + epsilon)`."""
    total = x.sum(dim=-1, keepdim=True) + epsilon
    return (grad - (grad * x).sum(dim=-1, keepdim=True) / total) / total


def grad_of_logits(inputs: TopKBackwardInputs) -> torch.Tensor:
    """The gradient of logits by PyTorch's operations, which it can differentiate again."""
    grad, logits, index, by_sigmoid, renormalize, scaling_factor = inputs
    if by_sigmoid:
        return sigmoid_grad(grad, logits, index, renormalize, scaling_factor)
    return softmax_grad(scaling_factor * grad, logits, index, renormalize)


def _contiguous_grad(inputs: TopKBackwardInputs) -> torch.Tensor:
    return grad_of_logits(inputs).contiguous()


def _empty_grad(inputs: TopKBackwardInputs) -> torch.Tensor:
    return torch.empty_like(inputs.logits, memory_format=torch.contiguous_format)


def _launch_backward(inputs: TopKBackwardInputs) -> torch.Tensor:
    logits = inputs.logits
    if logits.dtype not in INPUTS:
        return _launch_backward(inputs._replace(logits=logits.float())).to(logits.dtype)
    grad_logits = _empty_grad(inputs)
    if logits.numel():
        launch_top_k_backward(inputs, grad_logits)
    return grad_logits


top_k_backward = register_inputs(
    "top_k_backward",
    TopKBackwardInputs,
    "Tensor",
    reference=_contiguous_grad,
    fake=_empty_grad,
    kernels=_launch_backward,
    cuda=_contiguous_grad,
    kernels_take=lambda grad, logits, *_: can_launch(logits),
)
"""`TopKBackwardInputs` -> the gradient of the logits, contiguous and in their dtype."""


# ---- The ops ----


def check_choice(op: str, num_experts: int, k: int, num_groups: int, topk_groups: int) -> None:
    """Raise ValueError, naming `op`, unless k of E experts can be chosen under the group limit."""
    if not 1 <= k <= num_experts:
        raise ValueError(f"{op}: top_k must be in [1, E] = [1, {num_experts}], got {k}")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"{op}: num_groups must divide E = {num_experts}, got {num_groups}")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(
            f"{op}: topk_groups must be in [1, num_groups] = [1, {num_groups}], got {topk_groups}"
        )
    open_experts = topk_groups * (num_experts // num_groups)
    if k > open_experts:
        raise ValueError(
            f"{op}: top_k must be at most the {open_experts} experts of {topk_groups} groups, "
            f"got {k}"
        )


def _allocate(op: str, inputs: TopKInputs) -> Chosen:
    """Check, then allocate experts and top_k_weights. Also the fake body."""
    logits, bias, k, num_groups, topk_groups, *_ = inputs
    if logits.ndim != 2:
        raise ValueError(f"{op}: logits must be [T, E], got shape {list(logits.shape)}")
    if not logits.is_floating_point():
        raise TypeError(f"{op}: logits must be a float dtype, got {logits.dtype}")
    num_tokens, num_experts = logits.shape
    check_choice(op, num_experts, k, num_groups, topk_groups)
    check_same_device(op, logits=logits, bias=bias)
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"{op}: bias must be [E] = {[num_experts]}, got {list(bias.shape)}")
    index = logits.new_empty((num_tokens, k), dtype=torch.int64)
    return index, logits.new_empty((num_tokens, k), dtype=torch.float32)


def _launch(op: str, inputs: TopKInputs) -> Chosen:
    chosen = _allocate(op, inputs)
    if inputs.logits.numel():
        launch_top_k(op, inputs, *chosen)
    return chosen


# ---- In PyTorch ----


def _stable_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    # torch.topk breaks ties differently from call to call and device to device.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """[T, 1], added up in the order of the choices, as the kernel does."""
    return reduce(torch.add, weights.split(1, dim=1))


# ln(2)^i / i!, the Taylor series of 2^x: |x| <= 1/2 leaves an error of 2.2e-13.
_EXP2_TERMS = list(accumulate(range(1, 11), lambda x, i: x * 0.6931471805599453 / i, initial=1.0))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid of fp32 x, rounded once from FP64: within 1e-5 ulp of the correct rounding.

    PyTorch's own sigmoids differ from device to device. These operations are exactly rounded and
    never contracted; `sigmoid.cuh` has the same ones.
    """
    power = x.abs().clamp(max=128).double() * -1.4426950408889634  # beyond, FP32 has 0 and 1
    whole = power.round()
    fraction = power - whole
    e = torch.full_like(power, _EXP2_TERMS[-1])  # exp(-|x|) = 2^power
    for term in _EXP2_TERMS[-2::-1]:
        e = e.mul_(fraction).add_(term)
    e = e.mul_((whole.long() + 1023 << 52).view(torch.float64))
    positive = 1 / (1 + e)
    return torch.where(x < 0, e * positive, positive).float()


def _softmax_topk(inputs: TopKInputs) -> Chosen:
    _allocate(_SOFTMAX, inputs)
    logits = inputs.logits.float()
    index = _stable_topk(logits, inputs.k)
    weights = logits.softmax(dim=-1).gather(1, index)
    return index, weights / _sum(weights) if inputs.renormalize else weights


def _sigmoid_group_topk(inputs: TopKInputs) -> Chosen:
    _allocate(_SIGMOID, inputs)
    logits, bias, k, num_groups, topk_groups, renormalize, scaling_factor = inputs
    scores = _sigmoid(logits.float())
    for_choice = scores if bias is None else scores + bias.float()
    if topk_groups < num_groups:
        by_group = for_choice.unflatten(1, (num_groups, -1))
        best_two = by_group.sort(dim=-1, descending=True).values[..., :2]
        chosen_groups = _stable_topk(best_two.sum(dim=-1), topk_groups)
        is_open = torch.zeros_like(by_group[..., 0], dtype=torch.bool)
        is_open = is_open.scatter(1, chosen_groups, True)
        for_choice = by_group.masked_fill(~is_open[..., None], float("-inf")).flatten(1)
    index = _stable_topk(for_choice, k)
    weights = scores.gather(1, index)
    if renormalize:
        weights = weights / (_sum(weights) + 1e-20)
    return index, weights * scaling_factor


choose_by_softmax = register_inputs(
    _SOFTMAX,
    softmax_inputs,
    "(Tensor, Tensor)",
    reference=_softmax_topk,
    fake=partial(_allocate, _SOFTMAX),
    kernels=partial(_launch, _SOFTMAX),
    kernels_take=can_launch,
)
choose_by_sigmoid = register_inputs(
    _SIGMOID,
    TopKInputs,
    "(Tensor, Tensor)",
    reference=_sigmoid_group_topk,
    fake=partial(_allocate, _SIGMOID),
    kernels=partial(_launch, _SIGMOID),
    kernels_take=can_launch,
)
