"""Expert parallel: what one rank of several launches, whose GPUs write each other's memory.

T tokens of a rank, P ranks. Only this file knows how a layer's exchange is put together.
"""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from moefp8.distributed.expert_parallel.experts import ParallelExperts
from moefp8.distributed.expert_parallel.group import ExpertGroup
from moefp8.distributed.expert_parallel.peer_group import PeerGroup
from moefp8.distributed.expert_parallel.peer_memory import PeerMemory
from moefp8.distributed.expert_parallel.peers import PeerTransport
from tests.launches.layouts.draw import (
    BF16,
    DTYPES,
    FP32,
    TOKENS,
    WGRADS,
    Draw,
    Model,
    layouts,
)
from tests.launches.layouts.experts import layer_of, steps
from tests.launches.layouts.linears import adapt, train


class Peers(PeerGroup):
    """The GPU of one rank of P. The others' memory is at addresses that nothing here uses."""

    def __init__(self, draw: Draw, agreement: Any) -> None:
        super().__init__("", agreement)
        self._draw, self._num_ranks = draw, len(agreement.ranks)

    def memory_for(self, device: torch.device, receiving: int, returning: int) -> PeerMemory:
        old = self._memory
        if old is None or old.receiving < receiving or old.returning < returning:
            areas = PeerMemory.sizes(receiving, returning, old)
            size = PeerMemory.num_bytes(*areas)
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            self._memory = PeerMemory(memory, [0] * self._num_ranks, *areas)
            self._draw.inputs |= {"peers": memory, "state": self._memory.state}
        return self.memory


def group_of(draw: Draw, rank: int, num_tokens: list[int]) -> ExpertGroup:
    """The group of a rank; num_tokens: those of each rank."""
    agreement: Any = SimpleNamespace(
        timeout=timedelta(minutes=5),
        ranks=[*range(len(num_tokens))],
        agree=lambda call: [call._replace(num_tokens=n) for n in num_tokens],
        checked=lambda failed, check: check(),
    )
    peers = Peers(draw, agreement)
    return ExpertGroup(rank, len(num_tokens), agreement, peers, transport=PeerTransport)


def on_ranks(draw: Draw, layer: nn.Module, model: Model, rank: int, num_ranks: int) -> int:
    """Let the layer be that of a rank; return how many tokens it has."""
    own = draw.tokens(8192)
    others = [draw.among(x for x in TOKENS if x <= 8192) for _ in range(num_ranks)]
    if draw.flag("alike"):
        others = [own] * num_ranks
    others[rank] = own
    draw.note(f"others={max(others)}")
    layer.parallel = ParallelExperts(group_of(draw, rank, others), model.num_experts)
    return own


def part_of(draw: Draw, **options: Any):
    """A rank's part of a model's experts, and which part of how many it is."""
    model = draw.model()
    num_ranks = draw.among([x for x in (1, 2, 4, 8, 16) if x <= model.num_experts], "P")
    rank = draw.up_to(num_ranks - 1)
    draw.note(f"of rank {rank}")
    begin, end = (r * model.num_experts // num_ranks for r in (rank, rank + 1))
    layer = layer_of(draw, model._replace(num_experts=end - begin), is_whole=True, **options)
    if num_ranks > 1:
        layer.expert_offset, layer.num_global_experts = begin, model.num_experts
    return layer, model, rank, num_ranks


@layouts("ranks.frozen", 90)
def frozen(draw: Draw):
    layer, *place = part_of(draw)
    return steps(draw, draw.module(layer), place[0], on_ranks(draw, layer, *place))


@layouts("ranks.trained", 60)
def trained(draw: Draw):
    options = {"dtype": draw.among(DTYPES, "weights"), "wgrad": draw.among(WGRADS, "wgrad")}
    layer, *place = part_of(draw, trainable=True, **options)
    return steps(draw, train(draw, layer), place[0], on_ranks(draw, layer, *place))


@layouts("ranks.adapted", 30)
def adapted(draw: Draw):
    layer, *place = part_of(draw)
    whole = nn.ModuleDict({"experts": layer})
    adapt(draw, whole, 8, draw.among((BF16, FP32), "adapter"), targets=["experts"])
    draw.module(whole)
    return steps(draw, layer, place[0], on_ranks(draw, layer, *place))
