"""Ranks that have the same tokens share the work; and any function may be a rank's experts."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from moefp8.distributed.expert_parallel.experts import ParallelExperts
from moefp8.distributed.expert_parallel.group import ExpertGroup
from moefp8.distributed.expert_parallel.local import LocalExperts
from moefp8.distributed.expert_parallel.shared_batch import SharedBatch
from tests.distributed.expert_parallel.cases import (
    BF16,
    Kind,
    Results,
    Tokens,
    adapt,
    draw,
    expected,
    run,
    whole,
)
from tests.distributed.ranks import Ranks, ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
FROZEN, TRAINED, ADAPTED = Kind(), Kind(what="trained"), Kind(what="adapted")


@pytest.fixture(scope="module", params=[2, 3])
def group(request, tmp_path_factory) -> Iterator[Ranks]:
    with ranks(request.param, tmp_path_factory.mktemp("ranks")) as made:
        yield made


def exchange(num_experts: int, is_shared: bool) -> ParallelExperts:
    batch = SharedBatch(dist.group.WORLD) if is_shared else None
    return ParallelExperts(ExpertGroup.of(dist.group.WORLD), num_experts, batch)


@lru_cache(maxsize=16)
def sharing(kind: Kind) -> Any:
    import moefp8

    experts = whole(kind)
    moefp8.shard(experts, {"": "experts"}, dist.get_rank(), dist.get_world_size())
    adapt(experts, kind)
    experts.parallel = exchange(kind.num_experts, True)
    return experts


def run_sharing(kind: Kind, tokens: Tokens, with_gradients: bool) -> Results:
    with torch.set_grad_enabled(with_gradients):
        return run(sharing(kind), tokens, with_gradients=with_gradients)


@given(data=st.data())
@settings(max_examples=12, phases=[Phase.generate])  # ranks that failed answer no more
def test_a_shared_batch_gives_what_its_parts_give(group, data):
    size = len(group.pipes)
    num_tokens = data.draw(st.integers(0, 9))
    kind = data.draw(st.sampled_from([FROZEN, TRAINED, ADAPTED]))
    dtype, has_addend = data.draw(st.sampled_from([BF16, torch.float32])), data.draw(st.booleans())
    seed = data.draw(st.integers(0, 2**16))
    (tokens,) = draw(kind, [num_tokens], 3, seed, dtype=dtype, has_addend=has_addend)
    bounds = [rank * num_tokens // size for rank in range(size + 1)]
    spans = [slice(*bounds[rank : rank + 2]) for rank in range(size)]
    parts = [Tokens(*(None if x is None else x[span] for x in tokens)) for span in spans]
    with_gradients = data.draw(st.booleans())
    wanted = expected(kind, parts, with_gradients=with_gradients)
    came = group.run(run_sharing, [(kind, tokens, with_gradients)] * size)
    for rank, ours in enumerate(came):
        assert not isinstance(ours, str), ours
        for i in range(3):
            assert torch.equal(ours[i], torch.cat([x[i] for x in wanted])), ours._fields[i]
        for x, y in zip(ours.of_weights, wanted[rank].of_weights, strict=True):
            assert torch.equal(x, y)


class Scaled(nn.Module):
    """Experts that are no GroupedExperts: each multiplies by a vector of its own."""

    def __init__(self, num_experts: int, first: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(num_experts, 40)[first : first + size])

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As experts of transformers may: what is not chosen takes no part in the graph."""
        y = torch.zeros_like(x)
        for expert in range(len(self.scale)):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            if len(token):
                rows = (x[token] * self.scale[expert]).tanh() * scores[token, choice, None]
                y = y.index_add(0, token, rows)
        return y


def run_scaled(num_experts: int, tokens: Tokens, is_shared: bool) -> Results:
    rank, size = dist.get_rank(), dist.get_world_size()
    first, end = (r * num_experts // size for r in (rank, rank + 1))
    module = Scaled(num_experts, first, end - first)
    layer = LocalExperts(40, first, end - first, module, list(module.parameters()))
    x, scores = (z.clone().requires_grad_() for z in (tokens.x, tokens.scores))
    y = exchange(num_experts, is_shared)(layer, x, tokens.ids, scores, None)
    y.backward(tokens.grad)
    grads = x.grad, scores.grad, module.scale.grad
    assert all(grad is not None for grad in grads)
    return Results(y.detach(), grads[0], grads[1], [grads[2]])


def assert_near(x: torch.Tensor, y: torch.Tensor) -> None:
    assert x.shape == y.shape
    assert (x - y).norm() <= 2**-7 * y.norm()


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "first", "last"),
    [(11, 0, 7), (1, 0, 7), (0, 0, 7), (7, 0, 1), (7, 6, 7)],
    ids=["any", "one token", "no tokens", "all on the first expert", "of no one"],
)
def test_any_function_as_experts(group, is_shared, num_tokens, first, last):
    """Results and gradients are rounded to BF16 on the way; weights see all tokens once."""
    size, kind = len(group.pipes), Kind(6, 40, 8)
    sizes = [num_tokens] if is_shared else [num_tokens + 2 * rank for rank in range(size)]
    tokens = draw(kind, sizes, 2, 3, dtype=torch.float32, first=first, last=last)
    each = tokens * size if is_shared else tokens
    came = group.run(run_scaled, [(6, z, is_shared) for z in each])
    module, wanted = Scaled(6, 0, 6), []
    for z in tokens:
        x, scores = (t.clone().requires_grad_() for t in (z.x, z.scores))
        y = module(x, z.ids, scores)
        if y.requires_grad:
            y.backward(z.grad)
        wanted.append(
            [y, *(torch.zeros_like(t) if t.grad is None else t.grad for t in (x, scores))]
        )
    of_weights = torch.zeros(6, 40) if module.scale.grad is None else module.scale.grad
    for rank, ours in enumerate(came):
        assert not isinstance(ours, str), ours
        for x, y in zip(ours[:3], wanted[0 if is_shared else rank], strict=True):
            assert_near(x, y.detach())
        own = of_weights[rank * 6 // size : (rank + 1) * 6 // size]
        assert_near(ours.of_weights[0], own)
