"""What ranks compute together, and what one process with all experts computes for each of them.

T tokens of a rank, k choices each, E experts, P ranks, H hidden, I intermediate.
"""

import copy
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import strategies as st

import moefp8
from moefp8 import GroupedExperts
from moefp8.distributed import ExpertParallel
from tests.distributed.ranks import PATIENCE_S

BF16 = torch.bfloat16
# Ranks that wait until such a timeout have not answered in time: the test fails.
LONG = timedelta(seconds=2 * PATIENCE_S)


class Kind(NamedTuple):
    """Which experts: E, H, I, whether they have adapters or are trained, and whether biases, which
    then ask for gradients."""

    num_experts: int = 6
    hidden_size: int = 200
    intermediate_size: int = 72
    what: str = "frozen"
    layout: str = "auto"
    saved_dtype: torch.dtype = BF16
    bias: bool = False


class Tokens(NamedTuple):
    """What one rank is given, and the gradient of what it gets."""

    x: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    addend: torch.Tensor | None
    grad: torch.Tensor


class Results(NamedTuple):
    y: torch.Tensor
    dx: torch.Tensor
    of_scores: torch.Tensor
    of_weights: list[torch.Tensor]


def moved(tokens: Tokens, device: str) -> Tokens:
    return Tokens(*(None if x is None else x.to(device) for x in tokens))


def whole(kind: Kind) -> GroupedExperts:
    """All experts, the same in every process."""
    torch.manual_seed(1)
    e, h, i = kind[:3]
    trains = kind.what == "trained"
    options: dict[str, Any] = {"layout": kind.layout, "saved_dtype": kind.saved_dtype}
    experts = GroupedExperts(e, h, i, trainable=trains, bias=kind.bias, **options)
    experts.requires_grad_(trains)
    for bias in experts.biases.values():
        bias.requires_grad_()
    return experts


def adapt(experts: Any, kind: Kind) -> None:
    """Add adapters, whose parameters are the same for an expert wherever it lies."""
    if kind.what != "adapted":
        return
    moefp8.adapters.add_lora(experts, rank=4)
    adapters = [x for name, x in experts.named_parameters() if "lora" in name]
    for number, adapter in enumerate(adapters):
        for expert, x in enumerate(adapter.data):
            torch.manual_seed(10 * (experts.expert_offset + expert) + number)
            x.normal_(std=0.1)


@lru_cache(maxsize=16)
def part(kind: Kind, rank: int, num_ranks: int) -> GroupedExperts:
    """The experts of a rank, which gives its part of the sum for any tokens."""
    experts = copy.deepcopy(whole(kind))
    moefp8.shard(experts, {"": "experts"}, rank, num_ranks)
    adapt(experts, kind)
    return experts


@lru_cache(maxsize=16)
def parallel(kind: Kind) -> ExpertParallel:
    experts = ExpertParallel(whole(kind), dist.group.WORLD, timeout=LONG)
    adapt(experts.experts, kind)
    return experts


def run(experts: Any, tokens: Tokens, *, with_gradients: bool = True) -> Results:
    """Forward and backward."""
    asked = [x.requires_grad_() for x in experts.parameters() if x.requires_grad]
    x, scores = (z.clone().requires_grad_(with_gradients) for z in (tokens.x, tokens.scores))
    for weight in asked:
        weight.grad = None
    y = experts(x, tokens.ids, scores, addend=tokens.addend)
    if not with_gradients:
        return Results(y.detach(), x.new_zeros(len(x), 0), scores.new_zeros(len(x), 0), [])
    y.backward(tokens.grad)
    assert x.grad is not None
    assert scores.grad is not None
    grads = [torch.zeros(0) if w.grad is None else w.grad for w in asked]
    return Results(y.detach(), x.grad, scores.grad, grads)


def run_parallel(
    kind: Kind, tokens: Tokens, with_gradients: bool = True, device: str = "cpu"
) -> Results:
    experts, given = parallel(kind).to(device), moved(tokens, device)
    with torch.set_grad_enabled(with_gradients):
        found = run(experts, given, with_gradients=with_gradients)
    cpu = [x.cpu() for x in found[:3]]
    return Results(*cpu, [x.cpu() for x in found.of_weights])


def expected(
    kind: Kind, tokens: Sequence[Tokens], *, with_gradients: bool = True, device: str = "cpu"
) -> list[Results]:
    """The FP32 sum, in the order of the ranks, of what each rank's experts give, by source rank.

    Gradients of weights are those of a rank's experts, of all tokens. Tokens in FP16 are given to
    experts in FP32, as small outputs would be rounded to fewer bits in FP16.
    """
    num_ranks = len(tokens)
    sizes = [len(z.x) for z in tokens]
    everything = [torch.cat([z[i] for z in tokens]).to(device) for i in (0, 1, 2, 4)]
    x, ids, scores, grad = (z.float() if z.dtype == torch.float16 else z for z in everything)
    given = Tokens(x, ids, scores, None, grad)
    each = []
    for rank in range(num_ranks):
        experts = part(kind, rank, num_ranks).to(device)
        with torch.set_grad_enabled(with_gradients):
            found = run(experts, given, with_gradients=with_gradients)
        each.append(found)
    results = []
    for rank, own in enumerate(tokens):
        begin = sum(sizes[:rank])
        parts = [[z[begin : begin + sizes[rank]].float().cpu() for z in x[:3]] for x in each]
        y, dx, of_scores = (sum_of(z) for z in zip(*parts, strict=True))
        y = y.to(BF16) if own.addend is None else y.to(BF16) + own.addend
        of_weights = [x.cpu() for x in each[rank].of_weights]
        y, dx = y.to(own.x.dtype), dx.to(BF16).to(own.x.dtype)
        results.append(Results(y, dx, of_scores.to(own.scores.dtype), of_weights))
    return results


def sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0])
    for x in parts:
        total = total + x
    return total


def draw(
    kind: Kind,
    sizes: Sequence[int],
    top_k: int,
    seed: int,
    *,
    dtype: torch.dtype = BF16,
    first: int = 0,
    last: int | None = None,
    has_addend: bool = False,
) -> list[Tokens]:
    """Tokens of each rank with ids in [first, last); E itself is of no one."""
    generator = torch.Generator().manual_seed(seed)
    last = kind.num_experts + 1 if last is None else last
    drawn = []
    for num_tokens in sizes:
        x, addend, grad = (
            torch.randn(num_tokens, kind.hidden_size, generator=generator) for _ in range(3)
        )
        ids = torch.randint(first, last, (num_tokens, top_k), generator=generator)
        scores = torch.rand(num_tokens, top_k, generator=generator)
        added = addend.to(BF16) if has_addend else None
        drawn.append(Tokens(x.to(dtype), ids, scores.to(dtype), added, grad.to(dtype)))
    return drawn


@st.composite
def routings(
    pick: Callable[..., Any],
    num_ranks: int,
    kinds: Sequence[Kind],
    *,
    max_tokens: int,
    max_top_k: int,
) -> tuple[Kind, dict[str, Any], bool]:
    """A kind, what else `draw` takes, and whether there are gradients."""
    kind, numbers = pick(st.sampled_from(kinds)), st.integers(0, max_tokens)
    first = pick(st.integers(0, kind.num_experts))
    arguments = {
        "sizes": pick(st.lists(numbers, min_size=num_ranks, max_size=num_ranks)),
        "top_k": pick(st.integers(1, max_top_k)),
        "seed": pick(st.integers(0, 2**16)),
        "dtype": pick(st.sampled_from([BF16, torch.float32, torch.float16])),
        "first": first,
        "last": pick(st.integers(first + 1, kind.num_experts + 1)),
        "has_addend": pick(st.booleans()),
    }
    return kind, arguments, pick(st.booleans())


def assert_same(came: Sequence[Results], wanted: Sequence[Results]) -> None:
    """To the bit, of each rank."""
    for rank, (ours, theirs) in enumerate(zip(came, wanted, strict=True)):
        assert not isinstance(ours, str), ours
        for name, x, y in zip(ours._fields, ours, theirs, strict=True):
            torch.testing.assert_close(
                x, y, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name, r=rank: f"{n} {r}: {m}"
            )
