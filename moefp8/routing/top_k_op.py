"""The router's choice: of E experts the k best for each of T tokens, and their weights.

All is FP32, NaN is the largest number, and of equals the lowest id wins. Every device chooses the
same: softmax rises with the logits, so these are compared; the sigmoid is made of operations that
all round alike, and so are its weights.
"""

from functools import reduce

import torch

from ..kernels.common.checks import check_same_device
from ..kernels.common.registry import register
from .top_k_launch import Choice, can_launch, launch_top_k

_SOFTMAX, _SIGMOID = "softmax_topk", "sigmoid_group_topk"


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


def _allocate(
    op: str,
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check, then allocate experts and weights."""
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


def _allocate_softmax(
    logits: torch.Tensor, k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _allocate(_SOFTMAX, logits, k)


def _allocate_sigmoid(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _allocate(_SIGMOID, logits, k, bias, num_groups, topk_groups)


# ---- In PyTorch ----


def _stable_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    # torch.topk breaks ties differently from call to call and device to device.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """[T, 1]: added in the order of the choices, as the kernel does."""
    return reduce(torch.add, weights.split(1, dim=1))


def _exp2_terms() -> list[float]:
    """ln(2)^i / i!, the Taylor series of 2^x: |x| <= 1/2 leaves an error of 2.2e-13."""
    terms = [1.0]
    for i in range(1, 11):
        terms.append(terms[-1] * 0.6931471805599453 / i)
    return terms


_EXP2_TERMS = _exp2_terms()


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid of fp32 x, rounded once from FP64: as accurate as can be but for 1e-5 ulp.

    PyTorch's own sigmoids differ from device to device. These operations are exactly rounded and
    never contracted: `sigmoid.cuh` has the same ones.
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


def _softmax_topk(
    logits: torch.Tensor, k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    _allocate_softmax(logits, k, renormalize)
    logits = logits.float()
    index = _stable_topk(logits, k)
    weights = logits.softmax(dim=-1).gather(1, index)
    return index, weights / _sum(weights) if renormalize else weights


def _sigmoid_group_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    _allocate(_SIGMOID, logits, k, bias, num_groups, topk_groups)
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


# ---- On Hopper ----


def launch_softmax_topk(
    logits: torch.Tensor, k: int, renormalize: bool, *, programmatic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax_topk` on a Hopper GPU: one kernel on the current stream; nothing waits for it.

    programmatic: it may be launched before the stream's previous kernel ends, and then waits.
    """
    outputs = _allocate_softmax(logits, k, renormalize)
    choice = Choice(_SOFTMAX, k, 1, 1, renormalize, 1.0)
    launch_top_k(choice, logits, None, *outputs, programmatic=programmatic)
    return outputs


def launch_sigmoid_group_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling_factor: float,
    *,
    programmatic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sigmoid_group_topk` on a Hopper GPU, by one kernel; see the launcher above."""
    outputs = _allocate(_SIGMOID, logits, k, bias, num_groups, topk_groups)
    choice = Choice(_SIGMOID, k, num_groups, topk_groups, renormalize, scaling_factor)
    launch_top_k(choice, logits, bias, *outputs, programmatic=programmatic)
    return outputs


softmax_topk = register(
    "softmax_topk(Tensor logits, int k, bool renormalize) -> (Tensor, Tensor)",
    _softmax_topk,
    _allocate_softmax,
    launch_softmax_topk,
    hopper_takes=can_launch,
)
sigmoid_group_topk = register(
    "sigmoid_group_topk(Tensor logits, Tensor? bias, int k, int num_groups, int topk_groups, "
    "bool renormalize, float scaling_factor) -> (Tensor, Tensor)",
    _sigmoid_group_topk,
    _allocate_sigmoid,
    launch_sigmoid_group_topk,
    hopper_takes=can_launch,
)
