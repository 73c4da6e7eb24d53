"""Describe `top_k.cu`, the router's choice on a Hopper GPU, and launch it.

T tokens, k choices each, E experts; a warp has a token.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.common.checks import INPUTS
from ..kernels.common.prepared import layout_of, prepared
from ..kernels.jit import Kernel, Launch
from ..kernels.program import Arguments, Place, Record, Tensor, prepare_launch
from ..kernels.targets import target_of
from .logits_launch import Sums

_SOURCE = Path(__file__).with_name("top_k.cu")
WARP = 32
MAX_WARPS, THREADS_WITH_SUMS = 4, 256  # `kMaxWarps` and `kMaxThreads` in top_k.cuh
MAX_EXPERTS = 512  # a lane holds every 32nd in registers


class Choice(NamedTuple):
    """The options of a choice of k experts: see `routing.sigmoid_group_topk`."""

    k: int
    num_groups: int
    topk_groups: int
    renormalize: bool
    scaling_factor: float


class TopKInputs(NamedTuple):
    """The arguments of `sigmoid_group_topk`: see `routing.sigmoid_group_topk`."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    k: int
    num_groups: int
    topk_groups: int
    renormalize: bool
    scaling_factor: float

    @property
    def choice(self) -> Choice:
        groups = self.num_groups, self.topk_groups
        return Choice(self.k, *groups, self.renormalize, self.scaling_factor)


def softmax_inputs(logits: torch.Tensor, k: int, renormalize: bool) -> TopKInputs:
    """The arguments of `routing.softmax_topk` in the form that its kernel takes."""
    return TopKInputs(logits, None, k, 1, 1, renormalize, 1.0)


def can_launch(logits: torch.Tensor, *_: object) -> bool:
    """Whether a kernel takes this many experts; the op's checks refuse what is no matrix."""
    return logits.ndim != 2 or logits.shape[1] <= MAX_EXPERTS


def kernel_of(
    op: str, num_experts: int, dtype: torch.dtype = torch.float32, parts_of_group: int = 0
) -> Kernel:
    """parts_of_group: that of `Sums`, if logits come as sums; 0: they come as one tensor."""
    items = ceil_div(num_experts, WARP)
    return Kernel(_SOURCE, f"{op}_kernel<{INPUTS[dtype]}, {items}, {parts_of_group}>")


def launch_top_k(op: str, inputs: TopKInputs, index: torch.Tensor, weights: torch.Tensor) -> None:
    """Write the choice of each token into index and weights: one kernel on the current stream.

    Logits of other dtypes than bf16, fp16 and fp32 are copied first, and so is a bias that is not
    contiguous fp32. There is at least one token.
    """
    logits, bias = inputs[:2]
    if logits.dtype not in INPUTS:
        logits = logits.float()
    if bias is not None:
        bias = bias.float().contiguous()
    key = (op, layout_of(logits), inputs.choice)
    launch = prepared(key, lambda: _prepare(op, inputs._replace(logits=logits)))
    tensors = logits, bias, index, weights
    addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])
    launch.on(logits.get_device(), addresses)


def _prepare(op: str, inputs: TopKInputs) -> Launch:
    logits, device_index = inputs.logits, inputs.logits.get_device()
    r = Record(target_of(device_index), ("logits", "bias", "top_k_index", "top_k_weights"))
    bias = Place("bias")  # address 0 in calls without a bias
    results = Place("top_k_index"), Place("top_k_weights")
    describe_top_k(r, op, Tensor.of(logits, "logits"), bias, inputs.choice, *results)
    return prepare_launch(r, device_index)


def describe_top_k(
    r: Record,
    op: str,
    logits: Tensor | Sums,
    bias: Place | None,
    choice: Choice,
    top_k_index: Place,
    top_k_weights: Place,
) -> None:
    """One step that chooses experts. It reads the bias early.

    op: "softmax_topk" or "sigmoid_group_topk".
    logits: [T, E] in bf16, fp16 or fp32, or sums that the step before writes; T and E at least 1.
    bias: fp32 [E], contiguous. top_k_index: int64 [T, k]. top_k_weights: fp32 [T, k].
    """
    arguments = {
        "bias": bias,
        "top_k_index": top_k_index,
        "top_k_weights": top_k_weights,
        "top_k": choice.k,
        "num_groups": choice.num_groups,
        "topk_groups": choice.topk_groups,
        "group_lanes": 1 << (max(1, WARP // choice.num_groups).bit_length() - 1),
        "renormalize": choice.renormalize,
        "scaling_factor": choice.scaling_factor,
    }
    kernel = kernel_of(op, logits.shape[1], *kind_of(logits))
    step_for_logits(r, kernel, logits, arguments, early=bias)


def kind_of(logits: Tensor | Sums) -> tuple[torch.dtype, int]:
    """The dtype and the parts of a group for which a kernel is compiled."""
    if isinstance(logits, Sums):
        return torch.float32, logits.parts_of_group
    return logits.dtype, 0


def step_for_logits(
    r: Record,
    kernel: Kernel,
    logits: Tensor | Sums,
    arguments: Arguments,
    early: Place | None = None,
) -> None:
    """A step with a warp for each token, which may start early if sums are added up.

    arguments: all but those about logits and the grid.
    """
    num_tokens, num_experts = logits.shape
    tokens_of_cta = min(MAX_WARPS, ceil_div(num_tokens, r.target.num_sms))
    if isinstance(logits, Sums):
        threads, layout = THREADS_WITH_SUMS, {"num_parts": logits.num_parts}
    else:
        row_bytes, expert_bytes = (logits.bytes_of_stride(axis) for axis in (0, 1))
        threads = tokens_of_cta * WARP
        layout = {"row_bytes": row_bytes, "expert_bytes": expert_bytes}
    r.step(
        kernel,
        ceil_div(num_tokens, tokens_of_cta),
        threads,
        {
            "logits": logits.place,
            "num_tokens": num_tokens,
            "num_experts": num_experts,
            "tokens_of_cta": tokens_of_cta,
            **layout,
            **arguments,
        },
        early=(early,),
        programmatic=isinstance(logits, Sums),
    )
