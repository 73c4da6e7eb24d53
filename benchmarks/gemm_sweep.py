"""The dense GEMM at random shapes of public models: `python -m benchmarks.gemm_sweep`.

The cases are of shapes that no heuristic was fitted to (`benchmarks.gemm_cases`), with M of any
magnitude; each is timed beside its peers as `benchmarks.gemm` does with pauses.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.circumstances import require_gpu
from benchmarks.figures import Row, fastest_us, ratio
from benchmarks.gemm import measure
from benchmarks.gemm_cases import FITTED, HELD_OUT, MOST_M, NUM_RANDOM, random_cases
from benchmarks.gemm_goals import AGAINST, case_of, compare, goal_and_verdict
from benchmarks.peers import (
    BLOCK_SCALED,
    DEEP_GEMM,
    OURS,
    PEERS,
    PER_TENSOR,
    Case,
    add_compile_option,
    available,
    compile_ahead,
)
from benchmarks.session import Rest, about_this_run, finish, measured

RESULTS = Path(__file__).parent / "results" / "gemm_sweep.json"
NAMES = OURS, DEEP_GEMM, BLOCK_SCALED, PER_TENSOR
COMPARED = "deep_gemm", "best", "per_tensor"
ALL = "all"
RANGES = {
    "M = 1 to 16": range(1, 17),
    "M = 17 to 128": range(17, 129),
    "M = 129 to 1024": range(129, 1025),
    "M = 1025 to 16384": range(1025, MOST_M + 1),
    ALL: range(1, MOST_M + 1),
}
# (geometric mean, worst) over all cases: how many times as fast as these ours is to be.
GOALS = {"best": (1.15, 1.00), "per_tensor": (1.00, 0.0)}


def num_slower(rows: Iterable[Row], ms: range, against: str) -> int:
    """In how many cases ours takes longer."""
    ratios = [ratio(row, AGAINST[against][1]) for row in rows if row["m"] in ms]
    return sum(value is not None and value < 1 for value in ratios)


def line_of(row: Row) -> str:
    line = f"{case_of(row)!s:>18} {fastest_us(row, (OURS,)):8.1f}"
    for against in COMPARED:
        times = ratio(row, AGAINST[against][1])
        line += f" {f'x{times:.3f}' if times else '-':>8}"
    return line


def lines_of_comparisons(rows: list[Row]) -> Iterator[str]:
    for title, ms in RANGES.items():
        for against in COMPARED:
            found = compare(rows, ms, against)
            if found is None:
                continue
            line = f"{title:17} times as fast as {AGAINST[against][0]:50} geomean "
            line += f"{found.geomean:.3f}  worst {found.worst:.3f} at {found.worst_case}, slower "
            line += f"in {num_slower(rows, ms, against)} of {found.num_cases}"
            yield line + goal_and_verdict(found, GOALS.get(against) if title == ALL else None)


def run(cases: list[Case], num_processes: int) -> dict[str, Any]:
    names = available({name: PEERS[name] for name in NAMES})
    results: dict[str, Any] = {**about_this_run(names), "rows": []}
    compile_ahead(cases, num_processes)
    for row in measured(cases, lambda case: measure(case, names, Rest(rounds=0))):
        print(line_of(row), flush=True)
        results["rows"].append(row)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=NUM_RANDOM, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (%(default)s)")
    parser.add_argument(
        "--fitted", action="store_true", help="take the shapes that a heuristic may be fitted to"
    )
    add_compile_option(parser)
    parser.add_argument("--out", "--json", type=Path, help=f"for the results; if usual: {RESULTS}")
    options = parser.parse_args()
    require_gpu("benchmarks.gemm_sweep")
    torch.manual_seed(0)
    models = FITTED if options.fitted else HELD_OUT
    cases, started = random_cases(models, options.cases, options.seed), time.perf_counter()
    with torch.no_grad():
        results = run(cases, options.compile_with)
    lines = lines_of_comparisons(results["rows"])
    is_all = (options.cases, options.seed, options.fitted) == (NUM_RANDOM, 0, False)
    finish(results, len(cases), lines, options.out, RESULTS, is_all=is_all, started=started)


if __name__ == "__main__":
    main()
