"""The router's choice: which experts a token goes to, and with which weight.

T tokens, E experts. Everything is FP32. Of equal scores the lowest expert id wins, and NaN is the
largest score, on every device and every time. A Hopper GPU chooses among up to 512 experts by one
kernel; among more, as other GPUs do, by PyTorch's operations, with a warning.
"""

from typing import Any, NamedTuple

import torch

from . import top_k_op as kernels


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

    Choice: the k largest logits, which are those of the largest softmax; so experts whose logits
    differ are no tie, however equal the softmax rounds them. A row with NaN or +Inf has weights
    of NaN.

    Args:
        logits: [T, E], any float dtype.
        renormalize: divide the k weights by their sum (`norm_topk_prob`).

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

    Choice: of `sigmoid(logits) + bias`, the `topk_groups` groups whose two best experts have the
    largest sum stay; the scores of other experts count as -Inf, and the k best win. Weights:
    `sigmoid(logits)` of the winners, divided by (their sum + 1e-20) if `renormalize`, times
    `scaling_factor` (arXiv:2412.19437, section 2.1.2). The sigmoid is rounded correctly but for
    1e-5 ulp; it and the weights are equal bit for bit on every device.

    Args:
        logits: [T, E], any float dtype.
        bias: [E] (`e_score_correction_bias`), FP32 for a reason: BF16 makes distinct values equal.
        num_groups: `n_group`, a divisor of E. 1, with `topk_groups` 1, means no limit.
        topk_groups: `topk_group`, the groups that stay.
        scaling_factor: `routed_scaling_factor`.

    Raises:
        TypeError: `logits` is not of a float dtype.
        ValueError: sizes that contradict one another, by name.
    """
    groups = num_groups, topk_groups
    return TopK(*_SigmoidTopK.apply(logits, bias, k, *groups, renormalize, scaling_factor))


class _SoftmaxTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index, weights = kernels.softmax_topk(logits, k, renormalize)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(logits, index)
        ctx.renormalize = renormalize
        return index, weights

    @staticmethod
    def backward(ctx: Any, _: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, index = ctx.saved_tensors
        scores = logits.float().softmax(dim=-1)
        if ctx.renormalize:
            grad = _grad_of_parts(grad, scores.gather(1, index), 0.0)
        grad = torch.zeros_like(scores).scatter(1, index, grad)
        grad = scores * (grad - (grad * scores).sum(dim=-1, keepdim=True))
        return grad.to(logits.dtype), None, None


class _SigmoidTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, bias: torch.Tensor | None, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index, weights = kernels.sigmoid_group_topk(logits, bias, *rest)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(logits, index)
        ctx.rest = rest
        return index, weights

    @staticmethod
    def backward(ctx: Any, _: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, index = ctx.saved_tensors
        *_, renormalize, scaling_factor = ctx.rest
        scores = logits.float().gather(1, index).sigmoid()
        grad = grad * scaling_factor
        if renormalize:
            grad = _grad_of_parts(grad, scores, 1e-20)
        grad = grad * scores * (1 - scores)
        grad = torch.zeros_like(logits).scatter(1, index, grad.to(logits.dtype))
        return grad, None, *(None for _ in ctx.rest)


def _grad_of_parts(grad: torch.Tensor, x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The gradient in x of `x / (x.sum(-1) + epsilon)`, of which `grad` is that of the result."""
    total = x.sum(dim=-1, keepdim=True) + epsilon
    return (grad - (grad * x).sum(dim=-1, keepdim=True) / total) / total
