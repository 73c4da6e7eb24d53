"""Who computes a layer whose experts lie on all ranks, and who has them all on one GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.expert_parallel.cases import Layer, Tokens, part_of
from moefp8 import GroupedExperts
from moefp8.distributed import ExpertParallel

ONE, OURS, EAGER = "one GPU, all experts", "moefp8", "moefp8, without a graph"
NCCL_ROWS, NCCL_PAIRS = "NCCL, FP8 rows", "NCCL, BF16 pairs"
Call = Callable[[], torch.Tensor]


class Provider(NamedTuple):
    """How a call is made; captures: whether it is timed as a CUDA graph."""

    prepare: Callable[["Given"], Call]
    captures: bool
    about: str


class Given(NamedTuple):
    """What a rank gives a provider. groups: a process group for each transport."""

    layer: Layer
    whole: GroupedExperts
    rank: int
    num_ranks: int
    tokens: Tokens
    groups: dict[str, Any]


def _alone(given: Given) -> Call:
    return lambda: given.whole(*given.tokens)


def _parallel(transport: Any) -> Callable[[Given], Call]:
    def prepare(given: Given) -> Call:
        part = part_of(given.whole, given.rank, given.num_ranks)
        layer = ExpertParallel(part, given.groups[transport], transport=transport)
        return lambda: layer(*given.tokens)

    return prepare


def _pairs(given: Given) -> Call:
    """Each choice of a token travels by itself in BF16, and sizes are read by the host.

    So `torch` users write it, and transformers does: sort by expert, exchange counts, then rows.
    """
    part = part_of(given.whole, given.rank, given.num_ranks)
    (x, ids, scores), group = given.tokens, given.groups["collective"]
    num_ranks, num_here = given.num_ranks, part.num_experts

    def call() -> torch.Tensor:
        flat, top_k = ids.reshape(-1), ids.shape[1]
        order = torch.argsort(flat)
        rows = x[order // top_k]
        sent = torch.bincount(flat, minlength=given.layer.num_experts).view(num_ranks, num_here)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        num_sent, num_received = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        came = rows.new_empty(sum(num_received), rows.shape[1])
        dist.all_to_all_single(came, rows, num_received, num_sent, group=group)
        experts = torch.arange(num_here, device=x.device).repeat(num_ranks) + part.expert_offset
        of_rows = experts.repeat_interleave(received.reshape(-1), output_size=len(came))[:, None]
        y = part(came, of_rows, torch.ones_like(of_rows, dtype=torch.float32))
        back = torch.empty_like(rows)
        dist.all_to_all_single(back, y, num_sent, num_received, group=group)
        by_choice = torch.empty_like(back)
        by_choice[order] = back
        return (by_choice.view(*ids.shape, -1) * scores[:, :, None]).sum(1).bfloat16()

    return call


PROVIDERS = {
    ONE: Provider(_alone, True, "each rank computes its tokens with all experts"),
    OURS: Provider(_parallel("peers"), True, "kernels that write into the other GPUs' memory"),
    EAGER: Provider(_parallel("peers"), False, "the same, launched by Python"),
    NCCL_ROWS: Provider(
        _parallel("collective"),
        False,
        "moefp8's `all_to_all_single`: FP8 codes once for each token and rank, the same GEMMs",
    ),
    NCCL_PAIRS: Provider(
        _pairs,
        False,
        "`all_to_all_single` of each choice in BF16, as transformers does, the same GEMMs",
    ),
}
