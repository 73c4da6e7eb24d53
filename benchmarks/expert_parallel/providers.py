"""Who computes a layer whose experts lie on all ranks, and who has them all on one GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.expert_parallel.cases import Layer, Tokens, part_of
from benchmarks.expert_parallel.peers import HF_BF16, PAIRS, PEERS, SGLANG, Weights, on_all
from moefp8 import GroupedExperts
from moefp8.distributed import ExpertParallel

ONE, OURS, EAGER = "one GPU, all experts", "moefp8", "moefp8, without a graph"
NCCL_ROWS = "NCCL, FP8 rows"
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


def _peer(name: str) -> Callable[[Given], Call]:
    def prepare(given: Given) -> Call:
        sizes = given.rank, given.num_ranks, len(given.tokens[0]), given.layer.top_k
        call = on_all(lambda: PEERS[name](Weights.of(given.whole), *sizes))
        return lambda: call(*given.tokens)

    return prepare


PROVIDERS = {
    ONE: Provider(_alone, True, "each rank computes its tokens with all experts"),
    OURS: Provider(_parallel("peers"), True, "kernels that write into the other GPUs' memory"),
    EAGER: Provider(_parallel("peers"), False, "the same, launched by Python"),
    NCCL_ROWS: Provider(
        _parallel("collective"),
        False,
        "moefp8's `all_to_all_single`: FP8 codes once for each token and rank, the same GEMMs",
    ),
    PAIRS: Provider(
        _peer(PAIRS),
        False,
        "`all_to_all_single` of each choice in BF16, as transformers does, the same GEMMs",
    ),
    HF_BF16: Provider(
        _peer(HF_BF16),
        False,
        "the same with experts in BF16, by PyTorch's grouped GEMM, as transformers has them",
    ),
    SGLANG: Provider(
        _peer(SGLANG),
        True,
        "one kernel for all of it, of sgl-deep-gemm 0.2.5 or newer, where that is installed",
    ),
}
