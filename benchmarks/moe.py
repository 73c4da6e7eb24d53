"""Whole layers of routed experts beside their peers on one Hopper GPU: `python -m benchmarks.moe`.

Tokens in BF16 and the router's choice are given, BF16 comes back. Every peer in
`benchmarks.moe_peers` gets the same random ones, in one process and taking turns, with pauses and
without rest as in `benchmarks.gemm`. Results are compared with an FP32 layer of the same FP8
weights.
"""

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import mega_kernel
from benchmarks.circumstances import require_gpu
from benchmarks.figures import (
    WITHOUT_REST,
    Row,
    fastest_us,
    figures,
    geomean,
    ratio,
    told_ratio,
    verdict,
)
from benchmarks.lines import sensed, without_rest
from benchmarks.moe_accuracy import accuracy
from benchmarks.moe_cases import MODELS, Case, random_experts
from benchmarks.moe_peers import HF_BF16, HF_FP8, MEGA, PEERS
from benchmarks.options import numbers, some_of
from benchmarks.peers import DEEP_GEMM, OURS, Call, available, first_line
from benchmarks.session import (
    Rest,
    about_this_run,
    finish,
    first_calls,
    measured,
    titles_of,
    write,
)
from benchmarks.timing import captured, eager_us_many, graph_us_many, layer_us_many

TOKENS = 1, 16, 128, 1024, 4096, 16384
RESULTS = Path(__file__).parent / "results" / "moe.json"
# How many times as fast as the mega-kernel ours is to be; without rest where it takes long.
LEAST_GOAL, GEOMEAN_GOAL = 1.08, 1.40  # at each number of tokens, over all of both models
GOALS = {
    "qwen3_30b_a3b": dict.fromkeys(TOKENS, LEAST_GOAL) | {4096: 1.50},
    "deepseek_v3": dict.fromkeys(TOKENS, LEAST_GOAL) | {4096: 1.25},
}
ERROR_GOAL = 1.0  # times the error of each FP8 peer


def measure(name_of_model: str, case: Case, names: Iterable[str], rest: Rest) -> Row:
    torch.cuda.empty_cache()
    calls, first, found = first_calls(PEERS, names, case, case)
    times = times_of(calls, 5 if case.floor_us > 1000 else 15)
    for name, errors in accuracy(case, first).items():
        num_bytes, us = case.num_bytes(PEERS[name].operands), times[name]["us"]
        found[name] = figures(us, case.flops, num_bytes, errors["error"]) | errors | times[name]
    found[OURS]["repeatable"] = torch.equal(calls[OURS](), first[OURS])
    if rest.wants(found):
        rest.add_times(found, PEERS, calls)  # weights of experts fill L2 many times
    about = {"model": name_of_model, "tokens": len(case.x), "active": case.num_active}
    return {**about, "floor_us": round(case.floor_us, 3), "peers": found}


def times_of(calls: Mapping[str, Call], repeats: int) -> dict[str, dict[str, Any]]:
    """Of each: "us" on the device, "eager_us", and "graph_us" or "graph_refused"."""
    found = {name: {"us": round(us, 3)} for name, us in layer_us_many(calls, repeats).items()}
    for name, us in eager_us_many(calls, repeats).items():
        found[name]["eager_us"] = round(us, 3)
    for name, figure in graph_times(calls, repeats).items():  # last: captures may leave traces
        found[name] |= figure
    return found


def graph_times(calls: Mapping[str, Call], repeats: int) -> dict[str, dict[str, Any]]:
    replays: dict[str, Call] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        try:
            replays[name] = captured(call)
        except Exception as error:
            found[name] = {"graph_refused": first_line(error)}
    times = graph_us_many(replays, repeats)
    return found | {name: {"graph_us": round(us, 3)} for name, us in times.items()}


def goal_of(row: Row) -> float | None:
    return GOALS.get(row["model"], {}).get(row["tokens"])


def worst_of(rows: Iterable[Row], key: str) -> dict[str, float]:
    """The largest `key` of each peer that has one, by its title."""
    rows = list(rows)
    found = {
        title: [row["peers"].get(name, {}).get(key, 0.0) for row in rows]
        for name, title in titles_of(PEERS, rows).items()
    }
    return {title: max(values) for title, values in found.items() if any(values)}


def case_of(row: Row) -> str:
    return f"{MODELS[row['model']].title}, {row['tokens']} tokens"


def head_of_table(names: Iterable[str]) -> str:
    """The line above those of `lines_of_row`."""
    head = f"{'tokens':>6} {'active':>6} {'floor':>8}  {'moefp8, us':>10} {'eager':>8} {'graph':>8}"
    peers = "".join(f"  {PEERS[name].title:>22}" for name in names if name != OURS)
    return f"{head} {'error':>8}{peers}"


def lines_of_row(row: Row) -> Iterator[str]:
    """Our figures in full; the others' times, and how many times as long as ours they are."""
    ours, goal = row["peers"][OURS], goal_of(row)
    graph = ours.get("graph_us")
    line = f"{row['tokens']:>6} {row['active']:>6} {row['floor_us']:8.1f}  {ours['us']:10.1f} "
    line += f"{ours['eager_us']:8.1f} "
    line += f"{f'{graph:.1f}' if graph else '-':>8} {ours['error']:8.1e}"
    for name in row["peers"]:
        if name != OURS:
            us, times = fastest_us(row, (name,)), ratio(row, (name,))
            line += f"  {f'{us:.1f} x{times:.2f}' if us else '-':>22}"
    to_mega = told_ratio(row, (MEGA,))
    if goal and to_mega:
        line += f"  goal {goal:.2f}: {verdict(to_mega >= goal)}"
    yield line
    if us := fastest_us(row, (OURS,), WITHOUT_REST):
        line = f"{'without rest':>23}  {us:10.1f} {sensed(row, OURS):>26}"
        yield line + "".join(
            f"  {without_rest(row, name)}" for name in row["peers"] if name != OURS
        )
    for name, found in row["peers"].items():
        for key, what in (("refused", "is left out"), ("graph_refused", "is no CUDA graph")):
            if key in found:
                yield f"{PEERS[name].title} {what} at {row['tokens']} tokens: {found[key]}"


def against_mega_kernel(rows: Iterable[Row]) -> float | None:
    """The geometric mean of the ratios, as they are told, that have a goal."""
    ratios = [told_ratio(row, (MEGA,)) for row in rows if goal_of(row)]
    found = [ratio for ratio in ratios if ratio is not None]
    return geomean(found) if found else None


def lines_of_the_rest(results: dict[str, Any]) -> Iterator[str]:
    """The mean over the mega-kernel, eager calls with one token, errors, repeatability."""
    rows = results["rows"]
    if (mean := against_mega_kernel(rows)) is not None:
        line = f"times as fast as {PEERS[MEGA].title}, geometric mean: {mean:.3f}"
        yield f"{line}  goal {GEOMEAN_GOAL:.2f}: {verdict(mean >= GEOMEAN_GOAL)}"
    for row in rows:
        ours, mega = (row["peers"].get(name, {}).get("eager_us") for name in (OURS, MEGA))
        if row["tokens"] == 1 and ours and mega:
            line = f"eager call, {case_of(row)}, us: moefp8 {ours:.1f}, {PEERS[MEGA].title} "
            yield f"{line}{mega:.1f}  goal at most that: {verdict(ours <= mega)}"
    for key, what in (
        ("error", "against a layer in FP32 with the same FP8 weights, worst case"),
        ("worst_row", "against it, worst row of all"),
        ("fp8_error", "against FP8 activations with FP32 sums, worst case"),
    ):
        errors = ", ".join(f"{title} {error:.2e}" for title, error in worst_of(rows, key).items())
        yield f"error {what}: {errors}"
    for name in (MEGA, HF_FP8):
        ran = [row for row in rows if "error" in row["peers"].get(name, {})]
        if ran:
            worst, row = max(((error_ratio(row, name), row) for row in ran), key=lambda e: e[0])
            line = f"error, moefp8 over {PEERS[name].title}: at most {worst:.2f} at {case_of(row)}"
            met = verdict(round(worst, 2) <= ERROR_GOAL)  # errors are of 64 random tokens
            yield f"{line}  goal {ERROR_GOAL:.2f}: {met}"
    moved = [case_of(row) for row in rows if not row["peers"][OURS]["repeatable"]]
    yield "the same bits before and after timing: " + (
        f"NOT at {'; '.join(moved)}" if moved else "yes"
    )
    yield f"copies on this GPU: {results['copy_gbps']:.0f} GB/s, read and written"


def error_ratio(row: Row, name: str) -> float:
    """Our error over that of `name`."""
    return row["peers"][OURS]["error"] / row["peers"][name]["error"]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print each row when it is done, and write it to `options.out` if that is given.

    A case in which moefp8 fails has no row.
    """
    names = available({name: PEERS[name] for name in PEERS if name in (OURS, *options.peers)})
    about = about_this_run([DEEP_GEMM] if {MEGA, HF_FP8} & {*names} else [], Rest.of(options))
    about["mega_kernel"] = mega_kernel.version() if MEGA in names else "missing"
    about["transformers"] = version("transformers") if {HF_FP8, HF_BF16} & {*names} else "missing"
    results: dict[str, Any] = {**about, "rows": []}
    for model in options.models:
        print(f"\n{MODELS[model].title}", head_of_table(names), sep="\n")
        for row in rows_of(model, options.tokens, names, Rest.of(options)):
            print(*lines_of_row(row), sep="\n", flush=True)
            results["rows"].append(row)
            if options.out:
                write(results, options.out)
    return results


def rows_of(
    name_of_model: str, tokens: Iterable[int], names: list[str], rest: Rest
) -> Iterator[Row]:
    model, experts_of = MODELS[name_of_model], cache(random_experts)

    def measure_at(num_tokens: int) -> Row:
        case = Case.random(model, experts_of(model), num_tokens)
        return measure(name_of_model, case, names, rest)

    return measured(tokens, measure_at, lambda num_tokens: f"{model.title}, {num_tokens} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    some_models, some_peers = (some_of(table) for table in (MODELS, PEERS))
    parser.add_argument("--models", type=some_models, default=tuple(MODELS), metavar="M,...")
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="such as 1,128")
    parser.add_argument("--peers", type=some_peers, default=tuple(PEERS), metavar="P,...")
    Rest.add_options(parser)
    parser.add_argument("--out", "--json", type=Path, help=f"for the results; if all: {RESULTS}")
    options = parser.parse_args()
    require_gpu("benchmarks.moe")
    torch.manual_seed(0)
    num_cases, started = len(options.models) * len(options.tokens), time.perf_counter()
    with torch.inference_mode():
        results = run(options)
    chosen = options.models, options.tokens, options.peers, Rest.of(options)
    is_all = chosen == (tuple(MODELS), TOKENS, tuple(PEERS), Rest())
    lines = lines_of_the_rest(results)
    finish(results, num_cases, lines, options.out, RESULTS, is_all=is_all, started=started)


if __name__ == "__main__":
    main()
