"""Whole MoE layers, router included, on one Hopper GPU: `python -m benchmarks.moe_layers`.

`MoE` of DeepSeek-V3 and Qwen3-30B-A3B is called with BF16 hidden states, beside the same layers
made of peers' parts (`benchmarks.moe_layer_peers`), and so is the router alone. They are timed as
the routed experts are by `benchmarks.moe`: on the device, as eager calls, as CUDA graphs, and
without rest.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import mega_kernel
from benchmarks.circumstances import require_gpu
from benchmarks.figures import Row, fastest_us, told_mode, told_ratio, verdict
from benchmarks.moe import times_of
from benchmarks.moe_cases import MODELS
from benchmarks.moe_layer_cases import OPTIONS, TOKENS, Layer, random_moe
from benchmarks.moe_layer_peers import LAYERS, ROUTERS
from benchmarks.moe_peers import MEGA
from benchmarks.options import numbers, some_of
from benchmarks.peers import DEEP_GEMM, OURS, Peer, available
from benchmarks.session import Rest, about_this_run, finish, first_calls, measured
from benchmarks.without_rest import num_copies

RESULTS = Path(__file__).parent / "results" / "moe_layers.json"
LAYER, ROUTER = "layer", "router"
PEERS: dict[str, dict[str, Peer]] = {LAYER: LAYERS, ROUTER: ROUTERS}
# (what, model, tokens) -> (figure, at most so many us).
GOALS = {
    (LAYER, "deepseek_v3", 1): ("graph_us", 105.0),
    (ROUTER, "deepseek_v3", 1): ("us", 5.0),
    (ROUTER, "deepseek_v3", 4096): ("us", 75.0),
}
FIGURES = {"us": "device", "eager_us": "eager", "graph_us": "graph"}


def measure(what: str, model: str, layer: Layer, names: Iterable[str], rest: Rest) -> Row:
    torch.cuda.empty_cache()
    peers = PEERS[what]
    calls, first, found = first_calls(peers, names, layer, layer)
    for name, times in times_of(calls, 15).items():
        found[name] |= times
    if what == LAYER:
        for name, error in layer.errors(first).items():
            found[name]["error"] = error
    else:
        for name, index in first.items():
            found[name]["agreement"] = layer.agreement(index)
    found[OURS]["repeatable"] = torch.equal(calls[OURS](), first[OURS])
    if rest.wants(found):
        # Weights of experts fill L2 many times, those of a router do not.
        more = num_copies(layer.x.nbytes) - 1 if what == ROUTER else 0
        rest.add_times(found, peers, calls, [layer.with_other_tokens() for _ in range(more)])
    return {"what": what, "model": model, "tokens": len(layer.x), "peers": found}


def case_of(row: Row) -> str:
    return f"{row['what']} of {MODELS[row['model']].title}, {row['tokens']} tokens"


def goal_of(row: Row) -> tuple[str, float] | None:
    return GOALS.get((row["what"], row["model"], row["tokens"]))


def lines_of_row(row: Row) -> Iterator[str]:
    """Each peer's times, and how many times as long as ours they are."""
    yield case_of(row)
    for name, found in row["peers"].items():
        title = PEERS[row["what"]][name].title
        if "refused" in found:
            yield f"  {title} is left out: {found['refused']}"
            continue
        times = ", ".join(
            f"{word} {found[key]:.1f}" for key, word in FIGURES.items() if key in found
        )
        if without_rest := found.get("without_rest"):
            times += f", without rest {without_rest['us']:.1f}"
        line = f"  {title:44} us: {times}"
        if name != OURS and (ratio := told_ratio(row, (name,))):
            line += f"  x{ratio:.2f} {told_mode(row)}"
        for key in ("error", "agreement"):
            if key in found:
                line += f"  {key} {found[key]:.4g}"
        goal = goal_of(row)
        if name == OURS and goal and goal[0] in found:
            key, most = goal
            line += f"  goal {FIGURES[key]} {most:g}: {verdict(found[key] <= most)}"
        yield line


def lines_of_the_rest(results: dict[str, Any]) -> Iterator[str]:
    moved = [case_of(row) for row in results["rows"] if not row["peers"][OURS]["repeatable"]]
    yield "the same bits before and after timing: " + (
        f"NOT at {'; '.join(moved)}" if moved else "yes"
    )
    slow = [case_of(row) for row in results["rows"] if _is_slower(row)]
    yield f"slower than a peer on the device: {'; '.join(slow) or 'nowhere'}"


def _is_slower(row: Row) -> bool:
    ours, best = fastest_us(row, (OURS,)), fastest_us(row, [x for x in row["peers"] if x != OURS])
    return ours is not None and best is not None and ours > best


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, and print each row when it is done. A case in which moefp8 fails has no row."""
    names = available({name: LAYERS[name] for name in LAYERS if name in (OURS, *options.peers)})
    about = about_this_run([DEEP_GEMM] if len(names) > 1 else [], Rest.of(options))
    about["mega_kernel"] = mega_kernel.version() if MEGA in names else "missing"
    results: dict[str, Any] = {**about, "rows": []}
    for model in options.models:
        for row in rows_of(model, options.tokens, names, Rest.of(options)):
            print(*lines_of_row(row), sep="\n", flush=True)
            results["rows"].append(row)
    return results


def rows_of(model: str, tokens: Iterable[int], names: list[str], rest: Rest) -> Iterator[Row]:
    moe_of = cache(random_moe)
    cases = [(what, num_tokens) for num_tokens in tokens for what in PEERS]

    def measure_at(case: tuple[str, int]) -> Row:
        what, num_tokens = case
        layer = Layer.random(MODELS[model], moe_of(model), num_tokens)
        return measure(what, model, layer, names if what == LAYER else list(ROUTERS), rest)

    return measured(cases, measure_at, lambda case: f"{case[0]} of {model}, {case[1]} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=some_of(OPTIONS), default=tuple(OPTIONS), metavar="M,...")
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="such as 1,128")
    parser.add_argument("--peers", type=some_of(LAYERS), default=tuple(LAYERS), metavar="P,...")
    Rest.add_options(parser)
    parser.add_argument("--out", "--json", type=Path, help=f"for the results; if all: {RESULTS}")
    options = parser.parse_args()
    require_gpu("benchmarks.moe_layers")
    torch.manual_seed(0)
    num_cases, started = 2 * len(options.models) * len(options.tokens), time.perf_counter()
    with torch.inference_mode():
        results = run(options)
    chosen = options.models, options.tokens, options.peers, Rest.of(options)
    is_all = chosen == (tuple(OPTIONS), TOKENS, tuple(LAYERS), Rest())
    lines = lines_of_the_rest(results)
    finish(results, num_cases, lines, options.out, RESULTS, is_all=is_all, started=started)


if __name__ == "__main__":
    main()
