"""What a rank does on its GPU, in a process of its own, in tests of the exchange by kernels."""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moefp8.distributed import ExpertParallel
from tests.distributed.expert_parallel.cases import Kind, Tokens, moved, parallel, whole
from tests.distributed.expert_parallel.looping_rank import SECONDS

MAY_SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def calls(kind: Kind, tokens: list[Tokens]) -> list[torch.Tensor]:
    """Results of calls that follow one another without a wait; ranks are late in turns."""
    experts, found = parallel(kind).to("cuda"), []
    given = [moved(z, "cuda") for z in tokens]
    with torch.no_grad():
        for number, z in enumerate(given):
            if number % dist.get_world_size() == dist.get_rank():
                torch.cuda._sleep(1_000_000)
            found.append(experts(*z[:3]))
    return [y.cpu() for y in found]


def captured(
    experts: ExpertParallel, given: Sequence[torch.Tensor]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of a call, and its result."""
    with torch.no_grad():
        experts(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(*given)
    return graph, y


def replays(kind: Kind, tokens: list[Tokens]) -> list[torch.Tensor]:
    """Results of one graph."""
    given, found = [moved(z, "cuda")[:3] for z in tokens], []
    static = [x.clone() for x in given[0]]
    graph, y = captured(parallel(kind).to("cuda"), static)
    for z in given:
        for x, new in zip(static, z, strict=True):
            x.copy_(new)
        graph.replay()
        found.append(y.clone())
    return [y.cpu() for y in found]


def replays_the_graph_of(which: int | None, kind: Kind, tokens: Tokens) -> None:
    """One of two layers, or of none."""
    group = dist.new_group(list(range(dist.get_world_size())))
    layers = [
        ExpertParallel(
            whole(kind).cuda(), group, timeout=timedelta(seconds=SECONDS), transport="peers"
        )
        for _ in range(2)
    ]
    graphs = [captured(x, moved(tokens, "cuda")[:3])[0] for x in layers]
    if which is not None:
        graphs[which].replay()
    torch.cuda.synchronize()


def insists_on_peers(may_share: bool, kind: Kind, tokens: Tokens) -> None:
    if may_share:
        os.environ[MAY_SHARE] = "1"
    experts = ExpertParallel(whole(kind).cuda(), dist.group.WORLD, transport="peers")
    experts(*moved(tokens, "cuda")[:3])


class Late(TorchDispatchMode):
    """The GPU pauses before each copy: so between a push of tokens and where they are read.

    In a capture, so does each replay. cycles: of the GPU's clock, 2 million a ms.
    """

    def __init__(self, cycles: int = 40_000_000) -> None:
        super().__init__()
        self.cycles = cycles

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            torch.cuda._sleep(self.cycles)
        return op(*args, **(kwargs or {}))


def late(is_late: bool) -> Any:
    return Late() if is_late else nullcontext()


def gradients(way: str, kind: Kind, tokens: Tokens) -> list[torch.Tensor]:
    """Of a residual block, twice in a row."""
    experts, found = parallel(kind).to("cuda"), []
    weights = [w for w in experts.parameters() if w.requires_grad]
    x, ids, scores, _, grad = moved(tokens, "cuda")

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + experts(x, ids, scores)

    for _ in range(2):
        own = x.clone().requires_grad_()
        y = checkpoint(block, own, use_reentrant=False) if way == "checkpoint" else block(own)
        inputs = weights if way == "weights" else [own, *weights]
        found += [y.detach(), *torch.autograd.grad(y, inputs, grad)]
    torch.cuda.synchronize()
    return [z.cpu() for z in found]


def late_gradients(way: str, is_late: bool, kind: Kind, tokens: Tokens) -> list[bool]:
    """Whether they have the bits of a run in which nobody is late."""
    gradients(way, kind, tokens)
    wanted = gradients(way, kind, tokens)
    with late(is_late):
        came = gradients(way, kind, tokens)
    return [torch.equal(x, y) for x, y in zip(came, wanted, strict=True)]


def replayed_gradients(is_late: bool, kind: Kind, tokens: list[Tokens]) -> list[bool]:
    """Whether a graph gives those of weights, though nobody asks for those of tokens.

    Then eager ones again.
    """
    experts, given = parallel(kind).to("cuda"), [moved(z, "cuda") for z in tokens]
    weights = [w for w in experts.parameters() if w.requires_grad]
    x, ids, scores, grad = (z.clone() for z in given[0] if z is not None)
    x.requires_grad_()

    def compute() -> list[torch.Tensor]:
        return list(torch.autograd.grad(experts(x, ids, scores), weights, grad))

    def take(z: Tokens) -> None:
        with torch.no_grad():
            for own, new in zip((x, ids, scores, grad), (*z[:3], z.grad), strict=True):
                own.copy_(new)

    wanted = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for z in given:
            take(z)
            wanted.append(compute())
    torch.cuda.synchronize()
    graph, same = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph), late(is_late):
        out = compute()
    for z, results in zip(given, wanted, strict=True):
        take(z)
        graph.replay()
        same += [torch.equal(a, b) for a, b in zip(out, results, strict=True)]
    same += [torch.equal(a, b) for a, b in zip(compute(), wanted[-1], strict=True)]
    return same


def on_two_streams(kinds: list[Kind], tokens: list[Tokens], is_captured: bool) -> list[bool]:
    """Whether layers that run side by side give what they give one after the other."""
    layers = [parallel(kind).to("cuda") for kind in kinds]
    given = [moved(z, "cuda")[:3] for z in tokens]
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    main.wait_stream(torch.cuda.current_stream())

    def both() -> list[torch.Tensor]:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            first = layers[0](*given[0])
        second = layers[1](*given[1])
        here.wait_stream(side)
        return [first, second]

    with torch.no_grad(), torch.cuda.stream(main):
        wanted = [layer(*z) for layer, z in zip(layers, given, strict=True)]
        run, came = both, []
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                outputs = both()

            def run() -> list[torch.Tensor]:
                graph.replay()
                return [y.clone() for y in outputs]

        for number in range(8):
            if number % dist.get_world_size() == dist.get_rank():
                torch.cuda._sleep(1_000_000)
            came += run()
        torch.cuda.synchronize()
    return [torch.equal(y, wanted[i % 2]) for i, y in enumerate(came)]


def replays_on_two_streams(kind: Kind, tokens: Tokens) -> None:
    """Replay two graphs of a layer; the first pauses after its push, before what reads it."""
    group = dist.new_group(list(range(dist.get_world_size())))
    layer = ExpertParallel(whole(kind).cuda(), group, transport="peers")
    x, ids, scores = moved(tokens, "cuda")[:3]
    given, graphs = (x, ids, scores.float()), []  # to convert scores would be a copy before a push
    for number in range(2):
        with torch.no_grad():
            layer(*given)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            # However late a busy host replays the second graph, the first is at its pause.
            with torch.cuda.graph(graphs[-1]), Late(2_000_000_000 if number == 0 else 0):
                layer(*given)
    for graph in graphs:
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.replay()
        time.sleep(0.1)  # until the GPU has begun it
    torch.cuda.synchronize()


def replays_after_growth(kind: Kind, few: Tokens, many: Tokens) -> list[bool]:
    """Whether a graph gives the same when the group has other memory, and eager calls do."""
    group = dist.new_group(list(range(dist.get_world_size())))
    layer = ExpertParallel(whole(kind).cuda(), group, transport="peers")
    given = moved(few, "cuda")[:3]
    graph, y = captured(layer, given)
    graph.replay()
    wanted, same = y.clone(), []
    with torch.no_grad():
        for _ in range(2):
            layer(*moved(many, "cuda")[:3])
            filled = [torch.full((1 << 20,), 0xFF, dtype=torch.uint8).cuda() for _ in range(8)]
            graph.replay()
            same += [torch.equal(y, wanted), torch.equal(layer(*given), wanted)]
            del filled
    return same
