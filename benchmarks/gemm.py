"""The dense FP8 GEMM beside its peers on one Hopper GPU: `python -m benchmarks.gemm`.

Every peer in `benchmarks.peers` multiplies random operands of DeepSeek-V3's shapes, in one process
and taking turns. Each case is timed with pauses: device time, L2 flushed before every call; and if
it takes 50 us or more, without rest, too (`benchmarks.without_rest`). First the worst row of each
result is compared with FP64 sums of the very numbers that the peer was given.
"""

import argparse
import math
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.circumstances import require_gpu
from benchmarks.figures import Row, figures, verdict
from benchmarks.gemm_cases import MS, cases_of
from benchmarks.gemm_goals import case_of, lines_of_comparisons
from benchmarks.lines import lines_of_shapes
from benchmarks.options import some_of
from benchmarks.peers import (
    BF16,
    DEEP_GEMM,
    OURS,
    PEERS,
    Case,
    Operands,
    add_compile_option,
    available,
    compile_ahead,
    first_line,
)
from benchmarks.session import Rest, about_this_run, finish, first_calls, measured
from benchmarks.timing import device_us_many, host_us
from benchmarks.without_rest import num_copies
from moefp8.testing import row_errors

HOST_CASE = Case(64, 4096, 7168)
RESULTS = Path(__file__).parent / "results" / "gemm.json"
MOST_M_OF_BF16 = 4096  # for larger M it is timed with pauses alone, since it takes twice as long
ERROR_GOAL = 2.0  # times DeepGEMM's error


def error_ratio(row: Row) -> float | None:
    """Our worst row's error over DeepGEMM's."""
    errors = [row["peers"].get(name, {}).get("error") for name in (OURS, DEEP_GEMM)]
    return None if None in errors else errors[0] / errors[1]


def worst_row_errors(
    operands: Operands, results: dict[str, torch.Tensor], rows_at_once: int = 1024
) -> dict[str, float]:
    """`|row - exact| / |exact|` of the worst row of each; inf where a result is not finite."""
    worst = {}
    for kind in {PEERS[name].operands for name in results}:
        of_kind = {name: d for name, d in results.items() if PEERS[name].operands == kind}
        worst |= worst_errors(of_kind, *operands.exact(kind), rows_at_once)
    return worst


def worst_errors(
    results: dict[str, torch.Tensor], x: torch.Tensor, w: torch.Tensor, rows_at_once: int = 1024
) -> dict[str, float]:
    """Errors of results that should all be `x @ w.T`, which is computed in FP64."""
    worst = dict.fromkeys(results, 0.0)
    for start in range(0, len(x), rows_at_once):
        rows = slice(start, start + rows_at_once)
        exact = x[rows] @ w.T
        for name, d in results.items():
            worst[name] = max(worst[name], float(row_errors(d[rows], exact).max()))
    return worst


def measure(case: Case, names: Iterable[str], rest: Rest) -> Row:
    operands = Operands.random(case)
    calls, first, found = first_calls(PEERS, names, case, operands)
    errors = worst_row_errors(operands, first)
    for name, us in device_us_many(calls).items():
        found[name] = figures(us, case.flops, case.num_bytes(PEERS[name].operands), errors[name])
    found[OURS]["repeatable"] = torch.equal(calls[OURS](), first[OURS])
    if rest.wants(found):
        more = num_copies(case.num_bytes("block_scaled")) - 1
        if case.m > MOST_M_OF_BF16:
            calls.pop(BF16, None)
        rest.add_times(found, PEERS, calls, [Operands.random(case) for _ in range(more)])
    return {**case._asdict(), "peers": found}


def host_times(names: Iterable[str]) -> dict[str, float]:
    operands, times = Operands.random(HOST_CASE), {}
    for name in names:
        try:
            times[name] = round(host_us(PEERS[name].prepare(operands)), 2)
        except Exception as error:
            print(f"{PEERS[name].title} has no host time: {first_line(error)}")
    return times


def lines_of_table(rows: list[Row]) -> Iterator[str]:
    """The lines for one M."""
    yield f"M = {rows[0]['m']}"
    yield from lines_of_shapes(rows, {name: PEERS[name].title for name in rows[0]["peers"]})


def lines_of_the_rest(results: dict[str, Any]) -> Iterator[str]:
    """Errors, repeatability, host times."""
    rows, host = results["rows"], results["host_us"]
    ratios = [(value, row) for row in rows if (value := error_ratio(row)) is not None]
    largest_k = max(row["k"] for row in rows)
    for what, some in (
        ("", ratios),
        (f" at K = {largest_k}", [each for each in ratios if each[1]["k"] == largest_k]),
    ):
        if some:
            value, row = max(some, key=lambda each: each[0])
            ours, theirs = (row["peers"][name]["error"] for name in (OURS, DEEP_GEMM))
            line = f"error of the worst row{what}, moefp8 over DeepGEMM: at most {ours:.2e} / "
            line += f"{theirs:.2e} = {value:.2f}  goal {ERROR_GOAL:.2f}: "
            yield line + verdict(value <= ERROR_GOAL)
    worst = max(row["peers"][OURS]["error"] for row in rows)
    moved = [str(case_of(row)) for row in rows if not row["peers"][OURS]["repeatable"]]
    yield f"error of moefp8's worst row of all: {worst:.2e}"
    yield "the same bits before and after timing: " + (
        f"NOT at {', '.join(moved)}" if moved else "yes"
    )
    times = ", ".join(f"{PEERS[name].title} {us:.1f}" for name, us in host.items())
    line = f"host time of one call, {HOST_CASE}, us: {times}"
    if BF16 in host:
        line += f"  goal torch BF16's: {verdict(host.get(OURS, math.inf) <= host[BF16])}"
    yield line
    yield f"copies on this GPU: {results['copy_gbps']:.0f} GB/s, read and written"


def run(cases: list[Case], peers: Iterable[str], num_processes: int, rest: Rest) -> dict[str, Any]:
    """Measure, and print each M when it is done. A case in which moefp8 fails has no row."""
    names = available({name: PEERS[name] for name in peers})
    about = about_this_run(names, rest)
    compile_ahead([*cases, HOST_CASE], num_processes)
    results: dict[str, Any] = {**about, "host_us": host_times(names), "rows": []}
    for m in sorted({case.m for case in cases}):
        of_m = [case for case in cases if case.m == m]
        rows = list(measured(of_m, lambda case: measure(case, names, rest)))
        if rows:
            print("", *lines_of_table(rows), sep="\n", flush=True)
            results["rows"] += rows
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--m", type=_ms, default=MS, help="such as 64,128")
    parser.add_argument("--shapes", type=_shapes, help="such as 4096x7168,7168x2048")
    parser.add_argument("--peers", type=some_of(PEERS), default=tuple(PEERS), metavar="P,...")
    Rest.add_options(parser)
    add_compile_option(parser)
    parser.add_argument("--out", "--json", type=Path, help=f"for the results; if all: {RESULTS}")
    options = parser.parse_args()
    require_gpu("benchmarks.gemm")
    torch.manual_seed(0)
    cases, rest = cases_of(options.m, options.shapes), Rest.of(options)
    started = time.perf_counter()
    with torch.no_grad():
        results = run(cases, options.peers, options.compile_with, rest)
    lines = chain(lines_of_comparisons(results["rows"]), lines_of_the_rest(results))
    chosen = options.m, options.shapes, options.peers, rest
    is_all = chosen == (MS, None, tuple(PEERS), Rest())
    finish(results, len(cases), lines, options.out, RESULTS, is_all=is_all, started=started)


def _ms(text: str) -> tuple[int, ...]:
    return tuple(int(m) for m in text.split(","))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(n), int(k)) for n, k in (shape.split("x") for shape in text.split(",")))


if __name__ == "__main__":
    main()
