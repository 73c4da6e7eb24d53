"""Peers of experts that ranks share: each gives what one process gives that has all experts."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks import mega_kernel
from benchmarks.expert_parallel import table
from benchmarks.expert_parallel.peers import (
    HF_BF16,
    PAIRS,
    PEERS,
    SGLANG,
    Weights,
    of_rank,
    on_all,
    sglang,
)
from benchmarks.expert_parallel.providers import EAGER, NCCL_ROWS, ONE
from benchmarks.moe_cases import Model, random_experts
from moefp8 import GroupedExperts
from moefp8.testing import relative_error
from tests.distributed.ranks import ranks

SMALL = Model("small", 6, 3, 256, 128)
NUM_RANKS = 2
NEEDS_GROUPED_MM = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="torch's runs on a CPU from 2.10 on"
)
NEEDS_GLOO = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


def layer() -> GroupedExperts:
    torch.manual_seed(0)
    return random_experts(SMALL, device="cpu").requires_grad_(False)


def tokens_of(rank: int, num_tokens: int, first: int, last: int) -> tuple[torch.Tensor, ...]:
    """Tokens whose choices are among experts [first, last), in any order."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, SMALL.hidden_size, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, last - first, generator=generator)
    scores, ids = scores.topk(SMALL.top_k, dim=-1)
    return x, ids + first, scores


def error_of(name: str, tokens: tuple[torch.Tensor, ...]) -> float:
    """A rank's, called twice, against one process, whose experts are BF16 if the peer's are."""
    experts = layer()
    whole = experts.to_plain() if name == HF_BF16 else experts
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    call = on_all(lambda: PEERS[name](Weights.of(experts), rank, num_ranks, 16, SMALL.top_k))
    first, y = call(*tokens), call(*tokens)
    assert torch.equal(first, y)
    assert (y.dtype, y.shape) == (torch.bfloat16, tokens[0].shape)
    return relative_error(y, whole(*tokens)) if len(y) else 0.0


def fail_on_rank_1() -> str:
    def run() -> int:
        if dist.get_rank() == 1:
            raise KeyError("nothing\nmore")
        return 3

    return str(on_all(run))


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    with ranks(NUM_RANKS, tmp_path_factory.mktemp("ranks")) as made:
        yield made


@NEEDS_GLOO
@pytest.mark.parametrize("name", [pytest.param(HF_BF16, marks=NEEDS_GROUPED_MM), PAIRS])
@pytest.mark.parametrize(
    ("sizes", "first", "last"),
    [((7, 7), 0, 6), ((5, 0), 0, 6), ((4, 6), 0, 3), ((4, 6), 3, 6)],
    ids=["any", "a rank without tokens", "all to rank 0", "all to rank 1"],
)
def test_an_exchange_gives_what_one_process_gives(group, name, sizes, first, last):
    given = [(name, tokens_of(rank, n, first, last)) for rank, n in enumerate(sizes)]
    errors = group.run(error_of, given)
    assert all(not isinstance(x, str) and x < 0.01 for x in errors), errors


@NEEDS_GLOO
def test_what_fails_on_one_rank_is_told_on_all(group):
    told = group.run(fail_on_rank_1, [()] * NUM_RANKS)
    assert told == ["RuntimeError: rank 1: KeyError: 'nothing\\nmore'"] * NUM_RANKS


def test_the_mega_kernel_gets_a_ranks_experts_and_ids_of_all(monkeypatch):
    """And memory of the device that the weights are on."""
    asked = []

    def empty(size, dtype, device):
        asked.append(device)
        return torch.empty(size, dtype=dtype, device=device)

    def get_buffer(group, num_experts, max_tokens, top_k, h, i):
        from torch.distributed import _symmetric_memory as memory

        assert (num_experts, max_tokens, top_k, h, i) == (6, 64, 3, 256, 128)
        x = memory.empty(max_tokens * h, dtype=torch.bfloat16, device="cuda")
        shape = max_tokens, top_k
        ids, scores = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        return SimpleNamespace(x=x.view(-1, h), x_sf=None, topk_idx=ids, topk_weights=scores)

    def pre_dispatch(x, ids, scores, buf_x, buf_x_sf, buf_ids, buf_scores, num_tokens):
        assert ids.dtype == torch.int32
        buf_x[:num_tokens], buf_ids[:num_tokens], buf_scores[:num_tokens] = x, ids, scores

    def mega(y, gate_up, down, buffer, num_tokens_bound):
        assert num_tokens_bound == 9
        part = GroupedExperts(3, 256, 128, device="meta")
        for name, value in zip(Weights._fields, (*gate_up, *down), strict=True):
            setattr(part, name, torch.nn.Parameter(value, requires_grad=False))
        part.expert_offset, part.num_global_experts = 3, 6
        given = (z[: len(y)] for z in (buffer.x, buffer.topk_idx, buffer.topk_weights))
        y.copy_(part(*given))

    monkeypatch.setattr("torch.distributed._symmetric_memory.empty", empty)
    kernels = SimpleNamespace(
        get_symm_buffer_for_sm90_mega_moe=get_buffer,
        transform_weights_for_mega_moe_sm90=lambda gate_up, down: (gate_up, down),
        mega_moe_pre_dispatch_sm90=pre_dispatch,
        fp8_mega_moe=mega,
    )
    monkeypatch.setattr(mega_kernel, "module", lambda: kernels)
    experts = layer()
    call = sglang(Weights.of(experts), 1, NUM_RANKS, 9, SMALL.top_k)
    assert asked == [torch.device("cpu")]
    for seed in (0, 1):
        tokens = tokens_of(seed, 9, 3, 6)
        assert torch.equal(call(*tokens), experts(*tokens))


def test_experts_divide_among_ranks():
    weights = Weights.of(layer())
    assert torch.equal(of_rank(weights, 2, 3).down_proj_scale_inv, weights.down_proj_scale_inv[4:])
    with pytest.raises(ValueError, match="6 experts do not divide into 4"):
        of_rank(weights, 0, 4)


def test_graphs_are_compared_with_graphs():
    """And what Python launches with ours launched by Python; the ratios are to our graph."""
    peers = {ONE: 1.5, EAGER: 2.0, NCCL_ROWS: 20.0, SGLANG: 1.2}
    row = {"ranks": 2, "peers": {name: {"ratio": ratio} for name, ratio in peers.items()}}
    assert table.speedup(row, NCCL_ROWS) == 10
    assert table.speedup(row, SGLANG) == 1.2
    assert table.speedup(row, ONE) == 3.0
    assert table.speedup(row, HF_BF16) is None
    del row["peers"][EAGER]
    assert table.speedup(row, NCCL_ROWS) is None
