"""New weights for a model that serves: `python -m benchmarks.updating`.

The experts of Qwen3-30B-A3B, 48 layers of 128, take BF16 weights that are on the GPU already, as
`moefp8.updating` writes them: stacked, a call for each layer; then one by one, 18,432 tensors. Both
also with W^T that is kept, as backwards keep it. Beside them, copies of the same BF16 bytes on the
device: `copy_` of the stacks, and `torch._foreach_copy_` of the tensors one by one. Times are from
the first call until the GPU is done, so the host counts; all take turns, in random order, and the
median of the rounds counts. What was written is compared with `quantize_128x128` first.

A few layers' weights are sent again and again, since all of them, their copies and the model do not
fit into a GPU; no cache holds one layer. `--device cpu` with small sizes tries it without a GPU.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import moefp8
from benchmarks.circumstances import circumstances, require_gpu
from moefp8.functional.transposed import transposed
from moefp8.quant import quantize_128x128

RESULTS = Path(__file__).parent / "results" / "updating.json"
STACKED, ONE_BY_ONE = "stacked", "expert by expert"
WITH_TRANSPOSED = " with W^T"
COPY = "copy"
COPIES = {STACKED: "copy_", ONE_BY_ONE: "torch._foreach_copy_"}
GOALS = {STACKED: 0.85, ONE_BY_ONE: 1.0}  # times the copy's time
GOAL_WITH_TRANSPOSED = 1.1
_NUM_SOURCES = 12  # layers whose weights there are

Weights = dict[str, torch.Tensor]
Bucket = list[tuple[str, torch.Tensor]]
Rows = dict[str, dict[str, Any]]


class Layer(nn.Module):
    def __init__(self, sizes: tuple[int, int, int], device: str) -> None:
        super().__init__()
        experts = moefp8.GroupedExperts(*sizes, device="meta").to_empty(device=device)
        self.mlp = nn.ModuleDict({"experts": experts})


def model_of(num_layers: int, sizes: tuple[int, int, int], device: str) -> nn.Module:
    layers = nn.ModuleList(Layer(sizes, device) for _ in range(num_layers))
    return nn.ModuleDict({"layers": layers})


def weights_of(sizes: tuple[int, int, int], device: str) -> Weights:
    e, h, i = sizes
    shapes = {"gate_up_proj": (e, 2 * i, h), "down_proj": (e, h, i)}
    return {
        name: torch.randn(shape, device=device, dtype=torch.bfloat16) / 32
        for name, shape in shapes.items()
    }


def one_by_one(weights: Weights) -> Weights:
    """The experts of a layer, each tensor with memory of its own."""
    found = {}
    for expert, (gate_up, down) in enumerate(zip(*weights.values(), strict=True)):
        named = dict(zip(("gate", "up", "down"), (*gate_up.chunk(2), down), strict=True))
        found |= {f"{expert}.{name}_proj.weight": x.clone() for name, x in named.items()}
    return found


def buckets_of(sources: list[Weights], num_layers: int) -> list[Bucket]:
    """A bucket for each layer."""
    return [
        [(f"layers.{n}.mlp.experts.{name}", x) for name, x in sources[n % len(sources)].items()]
        for n in range(num_layers)
    ]


def update(model: nn.Module, buckets: list[Bucket]) -> None:
    with moefp8.updating(model) as block:
        for bucket in buckets:
            block.add(bucket)


def copies_of(sources: list[Weights], num_layers: int) -> tuple[Any, Any]:
    """(targets, sources) of the same bytes; a target may be written several times."""
    targets = [[torch.empty_like(x) for x in each.values()] for each in sources]
    pairs = [
        pair
        for n in range(num_layers)
        for pair in zip(targets[n % len(sources)], sources[n % len(sources)].values(), strict=True)
    ]
    return tuple(map(list, zip(*pairs, strict=True)))


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def keep_transposed(model: nn.Module) -> None:
    """Keep W^T of all experts, as a backward does."""
    for module in model.modules():
        if isinstance(module, moefp8.GroupedExperts):
            transposed(module.gate_up_proj, True, 2)
            transposed(module.down_proj, True)


def check(model: nn.Module, sources: list[Weights]) -> None:
    """Raise ValueError unless the last layer holds what its weights are quantized to."""
    layers = list(model.get_submodule("layers").children())
    experts = layers[-1].get_submodule("mlp.experts")
    weights = sources[(len(layers) - 1) % len(sources)]
    for name, parts in (("gate_up_proj", 2), ("down_proj", 1)):
        data, scale_inv = quantize_128x128(weights[name].unflatten(1, (parts, -1)))
        same = torch.equal(
            experts.get_parameter(name).view(torch.uint8), data.flatten(1, 2).view(torch.uint8)
        )
        scales = experts.get_parameter(f"{name}_scale_inv")
        if not (same and torch.equal(scales, scale_inv.flatten(1, 2))):
            raise ValueError(f"updating: {name} of the last layer is not what it was sent")


def times_of(calls: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, Any]:
    """Milliseconds until the device is done, and until the host is, of each call."""
    wait: Callable[[], object] = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    order = random.Random(0)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for number in range(rounds + 2):
        for name in order.sample(list(calls), len(calls)):
            wait()
            begin = time.perf_counter()
            calls[name]()
            host = time.perf_counter() - begin
            wait()
            whole = time.perf_counter() - begin
            if number >= 2:  # the first ones compile, and look at the model
                found[name][0].append(1e3 * whole)
                found[name][1].append(1e3 * host)
    return {
        name: {"ms": round(statistics.median(ms), 3), "host_ms": round(statistics.median(host), 3)}
        for name, (ms, host) in found.items()
    }


def measure(num_layers: int, sizes: tuple[int, int, int], device: str, rounds: int) -> Rows:
    """All times, and as shares of the copies'."""
    stacks = [weights_of(sizes, device) for _ in range(min(_NUM_SOURCES, num_layers))]
    rows: Rows = {}
    for form, name in ((dict, STACKED), (one_by_one, ONE_BY_ONE)):
        sources = list(map(form, stacks))
        buckets, copy = buckets_of(sources, num_layers), copies_of(sources, num_layers)
        copy_all = copy_each if name == STACKED else torch._foreach_copy_
        model = model_of(num_layers, sizes, device)
        calls = {name: partial(update, model, buckets), COPY: partial(copy_all, *copy)}
        for suffix in ("", WITH_TRANSPOSED):
            if suffix:
                keep_transposed(model)
            update(model, buckets)
            check(model, stacks)
            times = times_of(calls, rounds, device)
            share = times[name]["ms"] / times[COPY]["ms"]
            rows[name + suffix] = {
                "num_tensors": sum(map(len, buckets)),
                **times[name],
                "copy_ms": times[COPY]["ms"],
                "share_of_copy": round(share, 4),
            }
        del model, calls, buckets, copy, sources  # before the next ones are made
    return rows


def lines_of(rows: Rows) -> list[str]:
    """What is printed."""
    lines = []
    for name, row in rows.items():
        goal = GOALS.get(name, GOAL_WITH_TRANSPOSED)
        verdict = "met" if row["share_of_copy"] <= goal else "MISSED"
        lines.append(
            f"{name}, {row['num_tensors']} tensors: {row['ms']:.1f} ms, host {row['host_ms']:.1f}, "
            f"{row['share_of_copy']:.2f} of {COPIES[name.removesuffix(WITH_TRANSPOSED)]}'s "
            f"{row['copy_ms']:.1f} ms  goal {goal:.2f}: {verdict}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--intermediate-size", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.device != "cpu":
        require_gpu("benchmarks.updating")
    sizes = args.experts, args.hidden_size, args.intermediate_size
    rows = measure(args.layers, sizes, args.device, args.rounds)
    print(*lines_of(rows), sep="\n")
    results = {**circumstances(), "layers": args.layers, "sizes": list(sizes), "rows": rows}
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
