"""The grouped FP8 GEMMs beside DeepGEMM on one Hopper GPU: `python -m benchmarks.grouped`.

Every peer in `benchmarks.grouped_peers` multiplies the same random tokens of many groups, in one
process and taking turns, with pauses and, but for torch's, without rest as in `benchmarks.gemm`.
Each result's worst row is compared with FP64 sums of the very numbers that the peer was given. What
is padding is no work.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.circumstances import require_gpu
from benchmarks.figures import Row, figures, geomean, told_ratio, verdict
from benchmarks.gemm import worst_errors
from benchmarks.grouped_cases import SETTINGS, Case, Setting
from benchmarks.grouped_peers import FORMS, PADDED, PEERS, Operands
from benchmarks.lines import lines_of_shapes
from benchmarks.peers import BF16, DEEP_GEMM, OURS, available
from benchmarks.session import Rest, about_this_run, finish, first_calls, measured, titles_of
from benchmarks.timing import device_us_many
from benchmarks.without_rest import num_copies

RESULTS = Path(__file__).parent / "results" / "grouped.json"
GOALS = {str(setting): setting.goal for setting in SETTINGS}
PADDED_GOAL = 1.00  # by `grouped_layout`, of DeepGEMM, everywhere


def by_setting(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row['form']} {row['loads']}", []).append(row)
    return found


def shape_of(row: Row) -> str:
    return f"{row['n']}x{row['k']}"


def against_deep_gemm(rows: Iterable[Row], name: str = OURS) -> dict[str, float]:
    """How many times as fast as DeepGEMM ours is, at each shape that both ran, as it is told."""
    ratios = {shape_of(row): told_ratio(row, (DEEP_GEMM,), name) for row in rows}
    return {shape: value for shape, value in ratios.items() if value is not None}


def errors_of(rows: Iterable[Row]) -> dict[str, float]:
    """The error of the worst row of each peer, by its title."""
    rows = list(rows)
    return {
        title: max(found["error"] for row in rows if "us" in (found := row["peers"].get(name, {})))
        for name, title in titles_of(PEERS, rows).items()
    }


def worst_row_errors(operands: Operands, tokens: dict[str, torch.Tensor]) -> dict[str, float]:
    """`|row - exact| / |exact|` of the worst row of each; inf where a result is not finite."""
    worst = dict.fromkeys(tokens, 0.0)
    for kind in {PEERS[name].operands for name in tokens}:
        names = [name for name in tokens if PEERS[name].operands == kind]
        for group, (count, end) in enumerate(zip(operands.counts, operands.ends, strict=True)):
            of_group = {name: tokens[name][end - count : end] for name in names}
            if count:
                for name, error in worst_errors(of_group, *operands.exact(kind, group)).items():
                    worst[name] = max(worst[name], error)
    return worst


def measure(case: Case, names: Iterable[str], rest: Rest) -> Row:
    operands, setting = Operands.random(case), case.setting
    jobs, memory, found = first_calls(PEERS, names, case, operands, needed=(OURS, PADDED))
    first = {name: memory[name][job.at] for name, job in jobs.items()}
    errors = worst_row_errors(operands, first)
    for name, us in device_us_many(jobs, repeats=10 if case.is_long else 20).items():
        num_bytes = case.num_bytes(PEERS[name].operands)
        found[name] = figures(us, case.flops, num_bytes, errors[name])
    for name in {OURS, PADDED} & set(jobs):
        found[name]["repeatable"] = torch.equal(jobs[name].tokens(), first[name])
        found[name]["untouched"] = jobs[name].untouched()
    if rest.wants(found):
        more = num_copies(case.num_bytes("block_scaled")) - 1
        fp8 = {name: job for name, job in jobs.items() if name != BF16}
        rest.add_times(found, PEERS, fp8, [Operands.random(case) for _ in range(more)])
    about = {"form": setting.form, "loads": setting.loads, "groups": len(setting.counts)}
    return {**about, "tokens": setting.num_tokens, "n": case.n, "k": case.k, "peers": found}


def lines_of_table(setting: Setting, rows: list[Row]) -> Iterator[str]:
    counts = setting.counts
    yield f"{setting}: {sum(counts)} tokens, {min(counts)} to {max(counts)} of a group"
    yield from lines_of_shapes(rows, titles_of(PEERS, rows))
    for row in rows:
        for name, found in row["peers"].items():
            if "refused" in found:
                yield f"{PEERS[name].title} is left out at {shape_of(row)}: {found['refused']}"


def lines_of_comparisons(rows: Iterable[Row]) -> Iterator[str]:
    for setting, of_setting in by_setting(rows).items():
        goals = {OURS: GOALS.get(setting), PADDED: PADDED_GOAL}
        for name, goal in goals.items():
            if ratios := against_deep_gemm(of_setting, name):
                what = setting if name == OURS else "  by grouped_layout"
                yield _line_of_comparison(what, ratios, goal)


def _line_of_comparison(what: str, ratios: dict[str, float], goal: float | None) -> str:
    shape = min(ratios, key=ratios.__getitem__)
    line = f"{what:24} times as fast as DeepGEMM  worst {ratios[shape]:.3f} at {shape:9}  "
    line += f"geomean {geomean(ratios.values()):.3f}"
    return line + (f"  goal {goal:.2f}: {verdict(ratios[shape] >= goal)}" if goal else "")


def lines_of_the_rest(results: dict[str, Any]) -> Iterator[str]:
    """Errors, repeatability, rows that are of no group."""
    rows = results["rows"]
    errors = ", ".join(f"{title} {error:.2e}" for title, error in errors_of(rows).items())
    yield f"error of the worst row of all: {errors}"
    for what, key in (
        ("the same bits before and after timing", "repeatable"),
        ("rows of no group hold what they held", "untouched"),
    ):
        broken = [
            f"{setting} {shape_of(row)} ({PEERS[name].title})"
            for setting, of_setting in by_setting(rows).items()
            for row in of_setting
            for name, found in row["peers"].items()
            if not found.get(key, True)
        ]
        yield f"{what}: " + (f"NOT at {', '.join(broken)}" if broken else "yes")
    yield f"copies on this GPU: {results['copy_gbps']:.0f} GB/s, read and written"


def run(settings: Iterable[Setting], rest: Rest) -> dict[str, Any]:
    """Measure, and print each setting when it is done. A case in which moefp8 fails has no row."""
    names = available(PEERS)
    results: dict[str, Any] = {**about_this_run(names, rest), "rows": []}
    for setting in settings:
        of_form = [name for name in FORMS[setting.form] if name in names]
        cases = [Case(setting, n, k) for n, k in setting.shapes]
        rows = list(measured(cases, lambda case, names=of_form: measure(case, names, rest)))
        if rows:
            print("", *lines_of_table(setting, rows), sep="\n", flush=True)
            results["rows"] += rows
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    by_name = {setting.name: setting for setting in SETTINGS}
    parser.add_argument("--cases", nargs="+", choices=by_name, default=list(by_name), metavar="C")
    Rest.add_options(parser)
    parser.add_argument("--out", "--json", type=Path, help=f"for the results; if all: {RESULTS}")
    options = parser.parse_args()
    require_gpu("benchmarks.grouped")
    torch.manual_seed(0)
    settings, rest = [by_name[name] for name in options.cases], Rest.of(options)
    num_cases, started = sum(len(setting.shapes) for setting in settings), time.perf_counter()
    with torch.no_grad():
        results = run(settings, rest)
    lines = chain(lines_of_comparisons(results["rows"]), lines_of_the_rest(results))
    is_all = (options.cases, rest) == (list(by_name), Rest())
    finish(results, num_cases, lines, options.out, RESULTS, is_all=is_all, started=started)


if __name__ == "__main__":
    main()
