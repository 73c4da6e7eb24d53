"""`precompile` of experts that ranks share: what brings tokens, what computes, what sums."""

import copy
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moefp8
from moefp8 import GroupedExperts
from moefp8.adapters import add_lora
from moefp8.distributed.expert_parallel.agreement import Call
from moefp8.distributed.expert_parallel.collective import CollectiveTransport
from moefp8.distributed.expert_parallel.experts import ParallelExperts
from moefp8.distributed.expert_parallel.group import ExpertGroup
from moefp8.distributed.expert_parallel.peers import PeerTransport
from moefp8.kernels import E4M3, jit
from moefp8.precompile.variants import Exchange
from moefp8.routing.dispatch import dispatch_kernel_of
from tests.distributed.expert_parallel.local_ranks import LocalAgreement
from tests.distributed.expert_parallel.peers_cases import HostPeers
from tests.distributed.expert_parallel.transport_cases import LoopBack
from tests.precompile.test_precompile import (
    NEEDS_GROUPED_MM_ON_A_CPU,
    IdleDriver,
    ids_of,
    kernels_of,
)
from tests.sampling import pairs

BF16, FP32 = torch.bfloat16, torch.float32
MOST, TOP_K, NUM_EXPERTS = 700, 2, 8
SIZES = 1, 2, 5, 17, 40, 90, 130, 333, MOST
NUM_RANKS = 2, 4


class Alike(LocalAgreement):
    """All ranks do what this one does."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(1, timedelta(seconds=1))
        self.num_ranks = num_ranks

    def agree(self, call: Call) -> list[Call]:
        return [call] * self.num_ranks


class RankOfPeers(ExpertGroup):
    """Rank 0 of P."""

    def __init__(self, num_ranks: int) -> None:
        agreement: Any = Alike(num_ranks)
        peers = HostPeers(agreement)
        super().__init__(0, num_ranks, agreement, peers, transport=PeerTransport)


def part_of(experts: GroupedExperts, group: ExpertGroup) -> nn.Sequential:
    """The experts of rank 0."""
    if group.size > 1:
        moefp8.shard(experts, {"": "experts"}, 0, group.size)
    experts.parallel = ParallelExperts(group, NUM_EXPERTS)
    return nn.Sequential(experts)


def experts_of(what: str, h: int, layout: str = "auto") -> GroupedExperts:
    made = GroupedExperts(NUM_EXPERTS, h, 144, layout=layout, trainable=what == "trained")
    return made.requires_grad_(what == "trained")


def launched(
    model: nn.Sequential, dtype: torch.dtype, *, backward: bool, sizes: Iterable[int] = SIZES
) -> set[jit.Kernel]:
    h = model[0].hidden_size
    with jit.using(IdleDriver()) as gpu, torch.set_grad_enabled(backward):
        for tokens in sizes:
            ids = ids_of("distinct", tokens, TOP_K, NUM_EXPERTS)
            x = torch.zeros(tokens, h, dtype=dtype, requires_grad=backward)
            y = model[0](x, ids, torch.ones(tokens, TOP_K))
            if backward:
                y.sum().backward()
    return set(gpu.kernels)


def listed(model: nn.Sequential, dtype: torch.dtype, *, backward: bool) -> set[jit.Kernel]:
    return kernels_of(model, MOST, dtype=dtype, top_k=TOP_K, backward=backward)


def needed_and_listed(
    model: nn.Sequential, dtype: torch.dtype, *, backward: bool
) -> tuple[set[jit.Kernel], set[jit.Kernel]]:
    needed = launched(model, dtype, backward=backward)
    named = listed(model, dtype, backward=backward)
    assert needed - named == set()
    return needed, named


def adapt(model: nn.Sequential, what: str) -> None:
    if what == "adapted":
        add_lora(model, rank=8, alpha=8.0)


WHAT = "frozen", "trained", "adapted"
WIDTHS = (256, BF16), (264, FP32), (204, BF16), (203, FP32)


@pytest.mark.parametrize(
    ("num_ranks", "what", "h", "dtype"),
    [
        pytest.param(num, what, *size, marks=[NEEDS_GROUPED_MM_ON_A_CPU] * (what == "adapted"))
        for num, what, size in pairs(NUM_RANKS, WHAT, WIDTHS)
    ],
)
def test_it_lists_what_peers_need(num_ranks, what, h, dtype):
    model = part_of(experts_of(what, h), RankOfPeers(num_ranks))
    adapt(model, what)
    for backward in (False, True):
        needed, _ = needed_and_listed(model, dtype, backward=backward)
        exchange = {kernel.source.name for kernel in needed} & {"push.cu", "give_back.cu"}
        assert exchange == {"push.cu", "give_back.cu"}


@pytest.mark.parametrize("layout", ["auto", "masked"])
def test_tokens_of_all_ranks_come_to_frozen_experts_as_codes(layout):
    """Nothing is listed of experts that get bf16 tokens."""
    model = part_of(experts_of("frozen", 256, layout), RankOfPeers(4))
    for backward in (False, True):
        _, named = needed_and_listed(model, BF16, backward=backward)
        assert not any("Floats" in kernel.name for kernel in named)
        assert not any("push_rows" in kernel.name for kernel in named)
        for vectorized in (True, False):
            kernel = dispatch_kernel_of(
                E4M3, vectorized=vectorized, masked=layout == "masked", is_counted=False
            )
            assert kernel in named


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_it_lists_little_else(num_ranks):
    model = part_of(experts_of("frozen", 256), RankOfPeers(num_ranks))
    needed = launched(
        model, BF16, backward=False, sizes=(*range(1, 130), *range(130, MOST + 1, 19))
    )
    named = listed(model, BF16, backward=False)
    assert needed - named == set()
    assert all("false" in kernel.name for kernel in named - needed - of_sizes(named))
    assert len(of_sizes(named) - needed) <= 6  # slots are multiples of P


def of_sizes(kernels: set[jit.Kernel]) -> set[jit.Kernel]:
    """Those that a number of tokens chooses; others are for what lies unaligned."""
    return {x for x in kernels if x.source.name in ("gemm.cu", "give_back.cu", "combine.cu")}


def test_of_more_ranks_it_lists_kernels_of_more_tokens():
    alone, many = (part_of(experts_of("frozen", 256), RankOfPeers(n)) for n in (1, 8))
    few, more = (
        {x for x in listed(model, BF16, backward=False) if x.name.startswith("gemm")}
        for model in (alone, many)
    )
    assert few != more


@pytest.fixture(scope="module")
def process_group(tmp_path_factory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("group")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "what", ["frozen", "trained", pytest.param("adapted", marks=NEEDS_GROUPED_MM_ON_A_CPU)]
)
@pytest.mark.parametrize(("h", "dtype"), [(256, BF16), (203, FP32)])
def test_it_lists_what_collectives_need(process_group, what, h, dtype):
    """It is not known yet how tokens travel, so both are listed."""
    model = moefp8.distributed.expert_parallel(nn.Sequential(experts_of(what, h)), process_group)
    adapt(model, what)
    by_peers = part_of(copy.deepcopy(experts_of(what, h)), RankOfPeers(1))
    adapt(by_peers, what)
    for backward in (False, True):
        needed, named = needed_and_listed(model, dtype, backward=backward)
        assert not any(kernel.source.name == "push.cu" for kernel in needed)
        of_peers = listed(by_peers, dtype, backward=backward)
        assert of_peers <= named
        of_fp32 = {x for x in named if "quantize" in x.name and "kFloat" in x.name}
        assert bool(of_fp32 - of_peers) == (what == "frozen" and dtype == FP32)


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("auto", (PeerTransport, CollectiveTransport)),
        ("peers", (PeerTransport,)),
        ("collective", (CollectiveTransport,)),
        (LoopBack, (LoopBack,)),
    ],
)
def test_what_was_asked_for_is_listed(transport, expected):
    nobody: Any = None
    agreement: Any = Alike(2)
    group = ExpertGroup(0, 2, agreement, nobody, transport=transport)
    needed = Exchange.of(ParallelExperts(group, NUM_EXPERTS))
    assert (needed.num_ranks, needed.transports) == (2, expected)
    names = {
        kernel.source.name
        for kernel in listed(part_of(experts_of("frozen", 256), group), BF16, backward=False)
    }
    assert ("push.cu" in names) == (PeerTransport in expected)
    assert ("quantize.cu" in names) == (expected != (PeerTransport,))


@pytest.mark.parametrize(("max_tokens", "most"), [(1, 4), (7, 16), (8, 16), (9, 20)])
def test_ranks_that_share_a_batch_divide_it(max_tokens, most):
    batch: Any = type("Batch", (), {"size": 2})()
    parallel = ParallelExperts(RankOfPeers(4), NUM_EXPERTS, batch)
    assert Exchange.of(parallel).most_received(max_tokens) == most
