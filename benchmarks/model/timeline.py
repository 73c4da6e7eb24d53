"""Where the time of a call goes: marks on its stream, before and after the parts of a model.

A part lasts from its mark to the next one, so the parts of a call sum up to all of it. In a CUDA
graph marks are nodes, and cost about a microsecond each: some of them lie in a part, others in
what is "rest". On a CPU they are times of the host.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

Call = Callable[[], object]
Parts = dict[str, list[float]]  # us of each layer, and last what lies in no layer

ROUTER, EXPERTS, SHARED, REST = "router", "experts", "shared experts", "rest"
MOE = ROUTER, EXPERTS, SHARED
PARTS = "attention", *MOE, "dense MLP", "norms", "head", REST


class Mark(NamedTuple):
    """From here on `part` of a layer runs. moment: an event, or a time of the host in seconds."""

    part: str
    layer: int
    moment: Any


def moment(device: torch.device, in_graph: bool = False) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, external=in_graph)
    event.record()
    return event


def us_between(first: Any, second: Any) -> float:
    """Both must have passed."""
    if isinstance(first, float):
        return (second - first) * 1e6
    us: float = first.elapsed_time(second) * 1e3
    return us


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize()


def us_without_rest(call: Call, repeats: int, device: torch.device) -> float:
    """How long one of many calls in a row takes, of the host or the device: the median."""
    synchronize(device)
    moments = [moment(device)]
    for _ in range(repeats):
        call()
        moments.append(moment(device))
    synchronize(device)
    return statistics.median(us_between(*pair) for pair in pairwise(moments))


def moe_blocks(model: Any) -> dict[int, nn.Module]:
    """The MoE blocks of a model, router included, by their layers."""
    layers = enumerate(model.model.layers)
    return {i: layer.mlp for i, layer in layers if hasattr(layer.mlp, "experts")}


def _parts_of(model: Any) -> Iterator[tuple[nn.Module, str, int, bool]]:
    """(module, part, layer, whether the rest follows it)."""
    layers = model.model.layers
    for i, layer in enumerate(layers):
        yield layer.input_layernorm, "norms", i, False
        yield layer.self_attn, "attention", i, True
        yield layer.post_attention_layernorm, "norms", i, False
        if i not in moe_blocks(model):
            yield layer.mlp, "dense MLP", i, True
            continue
        yield layer.mlp.gate, ROUTER, i, False
        yield layer.mlp.experts, EXPERTS, i, False
        if hasattr(layer.mlp, "shared_experts"):
            yield layer.mlp.shared_experts, SHARED, i, False
    yield model.model.norm, "norms", len(layers), False
    yield model.lm_head, "head", len(layers), True


@contextmanager
def _marking(model: Any, mark: Callable[[str, int], None]) -> Iterator[None]:
    def before(part: str, layer: int) -> Callable[..., None]:
        return lambda *_: mark(part, layer)

    hooks = []
    for module, part, layer, rest_follows in _parts_of(model):
        hooks.append(module.register_forward_pre_hook(before(part, layer)))
        if rest_follows:
            hooks.append(module.register_forward_hook(before(REST, layer)))
    for layer, block in moe_blocks(model).items():
        hooks.append(block.register_forward_hook(before(REST, layer)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def parts_of_call(
    model: Any, call: Call, device: torch.device, repeats: int, *, in_graph: bool
) -> Parts:
    """The parts of a call that runs `model` or blocks of it, medians over `repeats`.

    in_graph: of replays of a CUDA graph, each after another one, so that the GPU has no rest.
    """
    marks: list[Mark] = []
    num_layers = len(model.model.layers)

    def mark(part: str, layer: int) -> None:
        marks.append(Mark(part, layer, moment(device, in_graph)))

    def marked_call() -> None:
        marks.clear()
        with _marking(model, mark):
            mark(REST, num_layers)
            call()
            mark(REST, num_layers)

    run = marked_call
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            marked_call()

        def run() -> None:
            graph.replay()
            graph.replay()

    times: list[list[float]] = []
    for _ in range(repeats):
        run()
        synchronize(device)
        times.append([us_between(x.moment, y.moment) for x, y in pairwise(marks)])
    return _summed(marks, [statistics.median(us) for us in zip(*times, strict=True)], num_layers)


def _summed(marks: Sequence[Mark], us: Sequence[float], num_layers: int) -> Parts:
    parts: Parts = {part: [0.0] * (num_layers + 1) for part in PARTS}
    for mark, taken in zip(marks[:-1], us, strict=True):
        parts[mark.part][mark.layer] += taken
    return {part: us for part, us in parts.items() if any(us)}


def moe_us(parts: Parts) -> float:
    """Of all MoE blocks."""
    return sum(sum(parts.get(part, ())) for part in MOE)
