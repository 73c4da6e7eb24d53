"""The router's choice: which experts a token goes to, and with which weight.

T tokens, E experts. Everything is FP32. Of equal scores the lowest expert id wins, on every
device and every time.
"""

from typing import NamedTuple

import torch

from ..kernels.checks import check_same_device


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

    Args:
        logits: [T, E], any float dtype.
        renormalize: divide the k weights by their sum (`norm_topk_prob`).

    Raises:
        ValueError: `k` is not in [1, E], or `logits` is not two-dimensional.
    """
    _check("softmax_topk", logits, k)
    scores = logits.float().softmax(dim=-1)
    index = _stable_topk(scores, k)
    weights = scores.gather(1, index)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return TopK(index, weights)


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
    largest sum stay; among their experts the k best win. Weights: `sigmoid(logits)` of the
    winners, divided by (their sum + 1e-20) if `renormalize`, times `scaling_factor`
    (arXiv:2412.19437, section 2.1.2).

    Args:
        logits: [T, E], any float dtype.
        bias: [E] (`e_score_correction_bias`), FP32 for a reason: BF16 makes distinct values equal.
        num_groups: `n_group`, a divisor of E. 1, with `topk_groups` 1, means no limit.
        topk_groups: `topk_group`, the groups that stay.
        scaling_factor: `routed_scaling_factor`.

    Raises:
        ValueError: sizes that contradict one another, by name.
    """
    _check("sigmoid_group_topk", logits, k, bias, num_groups, topk_groups)
    scores = logits.float().sigmoid()
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
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return TopK(index, weights * scaling_factor)


def _stable_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    # torch.topk breaks ties differently from call to call and device to device.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _check(
    op: str,
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> None:
    if logits.ndim != 2:
        raise ValueError(f"{op}: logits must be [T, E], got shape {list(logits.shape)}")
    if not logits.is_floating_point():
        raise TypeError(f"{op}: logits must be a float dtype, got {logits.dtype}")
    check_choice(op, logits.shape[1], k, num_groups, topk_groups)
    check_same_device(op, logits=logits, bias=bias)
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(
            f"{op}: bias must be [E] = {list(logits.shape[1:])}, got {list(bias.shape)}"
        )


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
