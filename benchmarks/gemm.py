"""The dense FP8 GEMM beside its peers on one Hopper GPU: `python -m benchmarks.gemm`.

Every peer in `benchmarks.peers` multiplies random operands of DeepSeek-V3's shapes, in one process
and taking turns; device time counts, and L2 is flushed before every call. First the worst row of
each result is compared with FP64 sums of the very numbers that the peer was given.
"""

import argparse
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.circumstances import require_gpu
from benchmarks.peers import (
    BF16,
    BLOCK_SCALED,
    DEEP_GEMM,
    OURS,
    PEERS,
    PER_TENSOR,
    Case,
    Operands,
    available,
    compile_ahead,
    first_line,
)
from benchmarks.session import Row, about_this_run, finish, first_calls, measured
from benchmarks.timing import device_us_many, host_us
from moefp8.testing import row_errors

MS = 1, 16, 64, 128, 512, 4096
SHAPES = (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)
HOST_CASE = Case(64, 4096, 7168)
RESULTS = Path(__file__).parent / "results" / "gemm.json"

# What ours is compared with: the title, and the peers of which the fastest counts.
AGAINST = {
    "deep_gemm": ("DeepGEMM", (DEEP_GEMM,)),
    "best": ("the faster of DeepGEMM and cuBLASLt block-scaled", (DEEP_GEMM, BLOCK_SCALED)),
    "per_tensor": ("cuBLASLt per-tensor", (PER_TENSOR,)),
    "bf16": ("torch BF16", (BF16,)),
}
GROUPS = (1, 16), (64, 128), (512,), (4096,)  # values of M that share goals
# (M, against) -> (geometric mean, worst): how many times as fast as these ours is to be.
GOALS: dict[tuple[tuple[int, ...], str], tuple[float, float]] = {
    ((1, 16), "best"): (1.20, 1.03),
    ((64, 128), "best"): (1.15, 1.03),
    ((512,), "best"): (1.10, 1.00),
    ((4096,), "deep_gemm"): (1.05, 1.00),
    **{(group, "per_tensor"): (1.00, 0.0) for group in GROUPS},
}
ERROR_GOAL = 2.0  # times DeepGEMM's error


@dataclass(frozen=True)
class Comparison:
    """Ratios of times, theirs to ours, over the `cases` in which both ran."""

    geomean: float
    worst: float
    worst_case: Case
    num_cases: int

    def meets(self, goal: tuple[float, float]) -> bool:
        return self.geomean >= goal[0] and self.worst >= goal[1]


def case_of(row: Row) -> Case:
    return Case(row["m"], row["n"], row["k"])


def fastest_us(row: Row, names: Iterable[str]) -> float | None:
    times = [row["peers"][name]["us"] for name in names if "us" in row["peers"].get(name, {})]
    return min(times, default=None)


def ratio(row: Row, names: Iterable[str]) -> float | None:
    """How many times as fast as the fastest of `names` ours is; None where none of them ran."""
    theirs, ours = fastest_us(row, names), fastest_us(row, (OURS,))
    return None if theirs is None or ours is None else theirs / ours


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def compare(rows: Iterable[Row], ms: Iterable[int], against: str) -> Comparison | None:
    """The comparison of rows whose M is one of `ms`; None where nothing can be compared."""
    names, wanted = AGAINST[against][1], set(ms)
    found = [(ratio(row, names), case_of(row)) for row in rows if row["m"] in wanted]
    ratios = [(value, case) for value, case in found if value is not None]
    if not ratios:
        return None
    return Comparison(geomean(value for value, _ in ratios), *min(ratios), len(ratios))


def groups_of(rows: Iterable[Row]) -> list[tuple[int, ...]]:
    """The groups of M that have goals, and every other M of `rows` by itself."""
    ms = {row["m"] for row in rows}
    known = [group for group in GROUPS if ms & set(group)]
    others = ms - {m for group in known for m in group}
    return sorted(known + [(m,) for m in others])


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


def measure(case: Case, names: Iterable[str]) -> Row:
    operands = Operands.random(case)
    calls, first, found = first_calls(PEERS, names, case, operands)
    errors = worst_row_errors(operands, first)
    for name, us in device_us_many(calls).items():
        found[name] = figures(us, case.flops, case.num_bytes(PEERS[name].operands), errors[name])
    found[OURS]["repeatable"] = torch.equal(calls[OURS](), first[OURS])
    return {**case._asdict(), "peers": found}


def figures(us: float, flops: int, num_bytes: int, error: float) -> dict[str, Any]:
    return {
        "us": round(us, 3),
        "tflops": round(flops / us / 1e6, 1),
        "gbps": round(num_bytes / us / 1e3, 1),
        "error": float(f"{error:.4g}"),
    }


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


def lines_of_shapes(rows: list[Row], titles: dict[str, str]) -> Iterator[str]:
    """Our figures in full; the others' times, and how many times as long as ours they are."""
    peers = [name for name in titles if name != OURS]
    yield f"{'N x K':>13}  {'moefp8, us':>10} {'TFLOP/s':>8} {'GB/s':>6} {'error':>8}" + "".join(
        f"  {titles[name]:>21}" for name in peers
    )
    for row in rows:
        ours = row["peers"][OURS]
        line = f"{row['n']:>5} x {row['k']:<5}  {ours['us']:10.1f} {ours['tflops']:8.0f} "
        line += f"{ours['gbps']:6.0f} {ours['error']:8.1e}"
        for name in peers:
            times = ratio(row, (name,))
            us = fastest_us(row, (name,))
            line += f"  {f'{us:.1f} x{times:.2f}' if us else '-':>21}"
        yield line


def lines_of_comparisons(rows: list[Row]) -> Iterator[str]:
    for group in groups_of(rows):
        for against, (title, _) in AGAINST.items():
            found, goal = compare(rows, group, against), GOALS.get((group, against))
            if found is None:
                continue
            line = f"M = {' and '.join(map(str, group)):10} times as fast as {title:50} "
            line += f"geomean {found.geomean:.3f}  worst {found.worst:.3f} at {found.worst_case}"
            if goal:
                least = f"{goal[0]:.2f}" + (f", worst {goal[1]:.2f}" if goal[1] else "")
                line += f"  goal {least}: {verdict(found.meets(goal))}"
            yield line


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
    met = verdict(host.get(OURS, math.inf) <= host[BF16])
    yield f"host time of one call, {HOST_CASE}, us: {times}  goal torch BF16's: {met}"
    yield f"copies on this GPU: {results['copy_gbps']:.0f} GB/s, read and written"


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def run(cases: list[Case], num_processes: int) -> dict[str, Any]:
    """Measure, and print each M when it is done. A case in which moefp8 fails has no row."""
    names = available(PEERS)
    about = about_this_run(names)
    if num_processes > 1:
        started = time.perf_counter()
        compile_ahead([*cases, HOST_CASE], num_processes)
        print(f"compiled ahead in {time.perf_counter() - started:.0f} s")
    results: dict[str, Any] = {**about, "host_us": host_times(names), "rows": []}
    for m in sorted({case.m for case in cases}):
        of_m = [case for case in cases if case.m == m]
        rows = list(measured(of_m, lambda case: measure(case, names)))
        if rows:
            print("", *lines_of_table(rows), sep="\n", flush=True)
            results["rows"] += rows
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--m", type=_ms, default=MS, help="such as 64,128")
    parser.add_argument(
        "--shapes", type=_shapes, default=SHAPES, help="such as 4096x7168,7168x2048"
    )
    parser.add_argument("--out", "--json", type=Path, help=f"for the results; if all: {RESULTS}")
    parser.add_argument(
        "--compile-with",
        type=int,
        metavar="N",
        default=min(6, (os.cpu_count() or 1) // 2),
        help="processes that compile kernels before any is timed (default %(default)s; 0: none)",
    )
    options = parser.parse_args()
    require_gpu("benchmarks.gemm")
    torch.manual_seed(0)
    cases = [Case(m, n, k) for m in options.m for n, k in options.shapes]
    started = time.perf_counter()
    with torch.no_grad():
        results = run(cases, options.compile_with)
    lines = chain(lines_of_comparisons(results["rows"]), lines_of_the_rest(results))
    is_all = (options.m, options.shapes) == (MS, SHAPES)
    finish(results, len(cases), lines, options.out, RESULTS, is_all=is_all, started=started)


def _ms(text: str) -> tuple[int, ...]:
    return tuple(int(m) for m in text.split(","))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(n), int(k)) for n, k in (shape.split("x") for shape in text.split(",")))


if __name__ == "__main__":
    main()
