"""What ranks do that goes wrong, or is done to a layer; each function runs on one rank.

They return what was raised as its text, as `tests.distributed.ranks` does.
"""

import copy
import gc
import os
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moefp8
from moefp8 import GroupedExperts, MoE
from moefp8.distributed import ExpertParallel, expert_parallel
from moefp8.distributed.expert_parallel import host_words
from tests.distributed.expert_parallel.cases import (
    BF16,
    Kind,
    Results,
    Tokens,
    parallel,
    run,
    run_parallel,
    whole,
)

SECONDS = 2.0  # the timeout of groups that are meant to fail


def told(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def share_no_words() -> None:
    """As ranks of several hosts do not."""
    host_words.FOLDER = Path("none")


def in_order(kinds: Sequence[Kind], tokens: Tokens) -> list[Any]:
    """Layers in this order; they were made in the same one on all ranks."""
    return [told(lambda kind=kind: run_parallel(kind, tokens, False)) for kind in kinds]


def forward_and(then: str, kind: Kind, tokens: Tokens) -> Any:
    """A forward, and what comes then."""
    experts = parallel(kind)
    x = tokens.x.clone().requires_grad_()
    y = experts(x, tokens.ids, tokens.scores)
    if then == "backward":
        return told(lambda: y.backward(tokens.grad))
    return told(lambda: experts(x, tokens.ids, tokens.scores))


def calls_with(kind: Kind, x: Any, ids: Any, scores: Any, addend: Any = None) -> torch.Tensor:
    with torch.no_grad():
        return parallel(kind)(x, ids, scores, addend=addend)


def backward_of(what: str, kind: Kind, tokens: Tokens) -> Any:
    """A backward whose gradients are those of weights alone, or of all; and another right call."""
    experts, x = parallel(kind), tokens.x.clone().requires_grad_()
    weights = [z.requires_grad_() for z in experts.parameters()]
    y = experts(x, tokens.ids, tokens.scores)
    inputs = weights if what == "weights" else [x, *weights]
    found = told(lambda: torch.autograd.grad(y, inputs, tokens.grad))
    if isinstance(found, str):
        return found
    return told(lambda: run_parallel(kind, tokens).y)


def made_with(**options: Any) -> Any:
    group = dist.new_group(list(range(dist.get_world_size())))
    return told(lambda: bool(ExpertParallel(whole(Kind()), group, **options)))


def made_alike_or_not(rank: int) -> list[Any]:
    seconds = timedelta(seconds=10 + rank)
    return [
        made_with(transport=("peers", "collective")[rank]),
        made_with(transport=("auto", None)[rank]),
        made_with(timeout=seconds),
    ]


def forks(kind: Kind, tokens: Tokens, has_child: bool) -> Any:
    """A child calls the layer, and both of a group of its own and of the other rank's go on.

    What the child was told, and what this rank's next call gives.
    """
    experts, said = parallel(kind), b""
    run(experts, tokens, with_gradients=False)
    if has_child:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            one = Tokens(*(None if x is None else x[:1] for x in tokens))  # others see whose call
            error = told(lambda: run(experts, one, with_gradients=False))
            os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(read, 10_000)
    with torch.no_grad():
        return said.decode(), told(lambda: run(experts, tokens, with_gradients=False).y)


def asks_for_weights(kind: Kind, tokens: Tokens, asks: bool) -> Any:
    """A frozen weight of one rank asks for a gradient."""
    experts = parallel(kind)
    scale_inv = experts.experts.down_proj_scale_inv.requires_grad_(asks)
    found = told(lambda: run_with_input(experts, tokens))
    scale_inv.requires_grad_(False)
    return found


def run_with_input(experts: Any, tokens: Tokens) -> None:
    x = tokens.x.clone().requires_grad_()
    experts(x, tokens.ids, tokens.scores).backward(tokens.grad)


_short: list[ExpertParallel] = []  # the last `short_layer`


def short_layer() -> bool:
    """Make a layer of a group of its own, which waits for two seconds; return whether it works."""
    group, experts = dist.new_group(list(range(dist.get_world_size()))), whole(Kind())
    dist.barrier()  # so that both begin together
    _short[:] = [ExpertParallel(experts, group, timeout=timedelta(seconds=SECONDS))]
    dist.barrier()
    return bool(run(_short[0], short_tokens()).y.abs().max() > 0)


def short_tokens() -> Tokens:
    x = torch.randn(3, Kind().hidden_size).to(BF16)
    return Tokens(x, torch.tensor([[0], [3], [5]]), torch.ones(3, 1), None, x)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.monotonic()
    return told(function), time.monotonic() - begin


def calls_short_layer() -> list[tuple[Any, float]]:
    """Twice; of one rank, while the other calls nothing."""
    return [timed(lambda: run(_short[0], short_tokens())) for _ in range(2)]


def never_made(comes: bool) -> tuple[Any, float]:
    group = dist.new_group(list(range(dist.get_world_size())))
    if not comes:
        return "", 0.0
    seconds = timedelta(seconds=SECONDS)
    return timed(lambda: ExpertParallel(whole(Kind()), group, timeout=seconds))


def loops(kind: Kind, tokens: Tokens) -> str:
    """Call until it fails."""
    experts = parallel(kind)
    while True:
        error = told(lambda: run(experts, tokens))
        if isinstance(error, str):
            return error


def wrong_layers(rank: int) -> dict[str, Any]:
    world, small = dist.group.WORLD, lambda: GroupedExperts(4, 16, 8)
    other = moefp8.shard(small(), {"": "experts"}, 1 - rank, 2)
    one_of_two = moefp8.shard(small(), {"": "experts"}, rank, 2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "experts"))
    adapted = small()
    moefp8.adapters.add_lora(adapted, rank=2)
    return {
        "another rank's part": told(lambda: ExpertParallel(other, world)),
        "this rank's part": told(lambda: bool(ExpertParallel(one_of_two, world))),
        "twice": told(lambda: expert_parallel(one_of_two, world)),
        "fewer experts": told(lambda: ExpertParallel(GroupedExperts(1, 16, 8), world)),
        "MoE of fewer experts": told(lambda: MoE(16, 8, 1, 1, expert_mesh=world)),
        "another timeout": told(
            lambda: ExpertParallel(small(), world, timeout=timedelta(seconds=9))
        ),
        "no experts": told(lambda: ExpertParallel(torch.nn.Linear(4, 4), world)),
        "no experts in a model": told(lambda: expert_parallel(torch.nn.Linear(4, 4), world)),
        "two dimensions": told(lambda: ExpertParallel(small(), mesh)),
        "one of two": told(lambda: bool(ExpertParallel(small(), mesh["experts"]))),
        "no mesh": told(lambda: ExpertParallel(small(), 2)),
        "adapters": told(lambda: ExpertParallel(adapted, world)),
    }


def destroyed(store: str, kind: Kind, tokens: Tokens) -> tuple[list[bool], list[Results], Any]:
    """Whether groups are left once they are destroyed, and what layers of each have given.

    Twice there are a default group and another one. Then, what a layer that is kept says of its
    group.
    """
    rank, size, groups, found = dist.get_rank(), dist.get_world_size(), [], []
    dist.destroy_process_group()
    import_module("torch.distributed.nn")  # its functions keep the default group that it finds
    for number in range(2):
        dist.init_process_group("gloo", f"file://{store}{number}", rank=rank, world_size=size)
        for group in (dist.group.WORLD, dist.new_group(list(range(size)))):
            layer = ExpertParallel(whole(kind), group)
            found.append(run(layer, tokens))
            groups.append(ref(group))
        del group
        dist.destroy_process_group()
    gc.collect()
    kept = layer.experts.parallel.group
    return [x() is not None for x in groups], found, told(lambda: kept.process_group)


def copied(kind: Kind, tokens: Tokens) -> Results:
    """A copy is a layer of its own, also after it was changed."""
    experts = parallel(kind)
    twin, scale_inv = copy.deepcopy(experts), experts.experts.down_proj_scale_inv
    assert twin.experts.parallel.number > experts.experts.parallel.number
    scale_inv.mul_(2)
    found = run(twin, tokens)
    scale_inv.div_(2)
    return found


def pickled(kind: Kind) -> Any:
    return told(lambda: pickle.dumps(parallel(kind)))


class Model(torch.nn.Module):
    """Experts between two norms."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(kind.hidden_size, dtype=BF16)
        self.experts = ExpertParallel(whole(kind), dist.group.WORLD)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.norm(self.experts(self.norm(x), ids, scores))


def ways(kind: Kind, tokens: Tokens, names: Sequence[str]) -> list[Results]:
    """A model as it is, compiled, and with activations that are computed again."""
    model = Model(kind)
    compiled = torch.compile(model, backend="aot_eager")

    def checkpointed(*given: torch.Tensor, addend: None) -> torch.Tensor:
        return checkpoint(model, *given, use_reentrant=False)

    made = {
        "plain": lambda x, ids, scores, addend: model(x, ids, scores),
        "compiled": lambda x, ids, scores, addend: compiled(x, ids, scores),
        "checkpointed": checkpointed,
    }
    found = []
    for name in names:
        model.zero_grad()
        run_way = Way(model, made[name])
        found.append(run(run_way, tokens))
    return found


class Way:
    """A model's parameters, and another way to call it."""

    def __init__(self, model: torch.nn.Module, call: Callable[..., torch.Tensor]) -> None:
        self.parameters, self.call = model.parameters, call

    def __call__(self, x: Any, ids: Any, scores: Any, *, addend: Any) -> torch.Tensor:
        return self.call(x, ids, scores, addend=addend)


def fullgraph(kind: Kind, tokens: Tokens) -> Any:
    compiled = torch.compile(Model(kind), backend="eager", fullgraph=True)
    return told(lambda: compiled(tokens.x, tokens.ids, tokens.scores))
