"""Layers of routed experts on several ranks that others have written, or that we wrote as they do.

P ranks, E experts, k choices of a token, H hidden, I intermediate; T tokens of a rank, M at most.
Rank r of the default process group holds experts [r E/P, (r + 1) E/P).

A peer is a function (weights, rank, num_ranks, max_tokens, top_k) -> call. All ranks call it
together, with the same `max_tokens` and `top_k`, and then what it gives, equally often.
"""

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks import mega_kernel
from benchmarks.peers import first_line
from moefp8 import GroupedExperts

# (x bf16 [T, H], ids int64 [T, k] in [0, E), scores fp32 [T, k]) -> bf16 [T, H]
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (rows bf16 [S, H], int64 [S]: their experts, counted from this rank's first) -> bf16 [S, H]
OfRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Made = TypeVar("_Made")

SGLANG, HF_BF16, PAIRS = "SGLang mega-kernel", "transformers, BF16", "NCCL, BF16 pairs"


class Weights(NamedTuple):
    """Experts, all or a rank's, with scales of 128x128 blocks; H and I are multiples of 128.

    Attributes:
        gate_up_proj: e4m3 [E, 2I, H], gate rows first; its scales: fp32 [E, 2 I/128, H/128].
        down_proj: e4m3 [E, H, I]; its scales: fp32 [E, H/128, I/128].
    """

    gate_up_proj: torch.Tensor
    gate_up_proj_scale_inv: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scale_inv: torch.Tensor

    @classmethod
    def of(cls, experts: GroupedExperts) -> "Weights":
        """Those of a module, which share its memory."""
        return cls(*(experts.get_parameter(name).data for name in cls._fields))


def of_rank(weights: Weights, rank: int, num_ranks: int) -> Weights:
    """A rank's experts, which share the memory of all."""
    num_experts = len(weights.down_proj)
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts} experts do not divide into {num_ranks} equal parts")
    local = num_experts // num_ranks
    return Weights(*(x[rank * local : (rank + 1) * local] for x in weights))


def on_all(run: Callable[[], _Made]) -> _Made:
    """What `run` gives here; RuntimeError on all ranks, which tells of each, if it failed on any.

    A peer can be left out by this where ranks still meet: not in the midst of an exchange.
    """
    error = None
    try:
        made = run()
    except Exception as failed:  # an extension that does not fit this torch raises anything
        error = first_line(failed)
    errors: list[Any] = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    if any(errors):
        told = (f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)
        raise RuntimeError("; ".join(told))
    return made


# ---- SGLang ----


def sglang(
    weights: Weights,
    rank: int,
    num_ranks: int,
    max_tokens: int,
    top_k: int,
    kernels: Any = None,
) -> Call:
    """Dispatch, both GEMMs and combine in one kernel, which reads and writes other GPUs' memory.

    It is chosen by `max_tokens`, so what is timed should have as many tokens on some rank. Tokens
    are quantized in each call. Ids become int32 when a tensor of them is first seen, since SGLang's
    router gives that: whoever writes others into the same tensor gets results of the old ones.

    Let all ranks end their work before one of them drops the call: others write into its memory.

    kernels: the deep_gemm to take; None: the one of `benchmarks.mega_kernel`.
    """
    if kernels is None:
        kernels = on_all(mega_kernel.module)
    part = of_rank(weights, rank, num_ranks)
    device = part.down_proj.device
    num_experts, (h, i) = len(weights.down_proj), part.down_proj.shape[1:]
    with mock.patch.multiple("torch.distributed._symmetric_memory", **_memory(num_ranks, device)):
        # It never holds less than 64 tokens, as where it is timed on one rank.
        buffer = kernels.get_symm_buffer_for_sm90_mega_moe(
            dist.group.WORLD, num_experts, max(max_tokens, 64), top_k, h, i
        )
    gate_up, down = kernels.transform_weights_for_mega_moe_sm90(
        (part.gate_up_proj, part.gate_up_proj_scale_inv.clone()),
        (part.down_proj.clone(), part.down_proj_scale_inv.clone()),
    )
    bound = {"num_tokens_bound": max_tokens}  # the same on all ranks
    if not bound.keys() <= signature(kernels.fp8_mega_moe).parameters.keys():
        bound = {}
    inputs = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    seen: list[torch.Tensor] = []  # ids as they came, and as int32

    def call(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not seen or seen[0] is not ids:
            seen[:] = ids, ids.int().contiguous()
        y = torch.empty_like(x)
        kernels.mega_moe_pre_dispatch_sm90(x, seen[1], scores, *inputs, len(x))
        kernels.fp8_mega_moe(y, gate_up, down, buffer, **bound)
        return y

    return call


def _memory(num_ranks: int, device: torch.device) -> dict[str, Any]:
    """What stands for functions of PyTorch's symmetric memory while it is asked for some."""
    from torch.distributed import _symmetric_memory as symmetric

    if num_ranks == 1:  # then it is memory like any other
        return {
            "empty": lambda size, dtype, device: torch.empty(size, dtype=dtype, device=device),
            "rendezvous": lambda memory, group: SimpleNamespace(buffer_ptrs=[memory.data_ptr()]),
        }
    empty = symmetric.empty
    # The caller names a device without its number.
    return {"empty": lambda size, dtype, **_: empty(size, dtype=dtype, device=device)}


# ---- all_to_all ----


def transformers_bf16(
    weights: Weights, rank: int, num_ranks: int, max_tokens: int, top_k: int
) -> Call:
    """`AllToAllEP` of transformers 5.23 with its experts by `grouped_mm`, all in BF16."""
    gate_up, down = _module(of_rank(weights, rank, num_ranks)).dequantize()
    return _all_to_all(_grouped_mm(gate_up, down), len(weights.down_proj), num_ranks)


def pairs(weights: Weights, rank: int, num_ranks: int, max_tokens: int, top_k: int) -> Call:
    """The same exchange, but moefp8's experts: what they gain with nothing gained on the way."""
    experts = _module(of_rank(weights, rank, num_ranks))

    def of_rows(rows: torch.Tensor, experts_of_rows: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(rows), 1, device=rows.device)
        return experts.compute(rows, experts_of_rows.unsqueeze(1), ones)

    return _all_to_all(of_rows, len(weights.down_proj), num_ranks)


def _module(weights: Weights) -> GroupedExperts:
    """A module that shares the weights' memory."""
    num_experts, h, i = weights.down_proj.shape
    experts = GroupedExperts(num_experts, h, i, device="meta")
    for name, x in weights._asdict().items():
        setattr(experts, name, torch.nn.Parameter(x, requires_grad=False))
    return experts


def _all_to_all(experts: OfRows, num_experts: int, num_ranks: int) -> Call:
    """Each choice of a token travels by itself, in BF16, and its result comes back.

    Steps are those of `transformers.distributed.expert_parallel.AllToAllEP`: choices sorted by
    expert, an exchange of counts, sizes read by the host, an exchange of rows, this rank's experts,
    the exchange back, and the weighted sum in FP32 where the token is.
    """
    local = num_experts // num_ranks

    @torch.no_grad()
    def call(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        flat, top_k = ids.reshape(-1), ids.shape[1]
        order = torch.argsort(flat)
        rows = x[order // top_k]
        counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat)).view(num_ranks, local)
        others_counts = torch.empty_like(counts)
        dist.all_to_all_single(others_counts, counts)
        sent, received = torch.stack([counts.sum(dim=1), others_counts.sum(dim=1)]).tolist()
        came = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(came, rows, received, sent)
        of_came = torch.arange(local, device=x.device).repeat(num_ranks)
        of_came = of_came.repeat_interleave(others_counts.reshape(-1), output_size=len(came))
        results = experts(came, of_came)
        back = torch.empty_like(rows)
        dist.all_to_all_single(back, results, sent, received)
        of_choices = torch.empty_like(back)
        of_choices[order] = back
        weighted = of_choices.view(*ids.shape, x.shape[1]) * scores.unsqueeze(-1)
        return weighted.sum(dim=1).to(x.dtype)

    return call


def _grouped_mm(gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> OfRows:
    """The steps of transformers' `grouped_mm_experts_forward`; weights bf16, as in `Weights`."""
    num_experts = len(down_proj)

    def of_rows(rows: torch.Tensor, experts_of_rows: torch.Tensor) -> torch.Tensor:
        if not len(rows):
            return rows
        of_sorted, order = torch.sort(experts_of_rows)
        # torch.histc takes integers on GPUs alone, and floats, if it is to be deterministic, not.
        counted = of_sorted.float() if rows.device.type == "cpu" else of_sorted.int()
        counts = torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1)
        ends = counts.cumsum(dim=0, dtype=torch.int32)
        gate_up = torch._grouped_mm(rows[order], gate_up_proj.mT, offs=ends)
        gate, up = gate_up.chunk(2, dim=-1)
        y = torch._grouped_mm(F.silu(gate) * up, down_proj.mT, offs=ends)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return y[place]

    return of_rows


PEERS: dict[str, Callable[[Weights, int, int, int, int], Call]] = {
    SGLANG: sglang,
    HF_BF16: transformers_bf16,
    PAIRS: pairs,
}
