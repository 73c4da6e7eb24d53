"""The price of `batch_invariant=True` in a dense GEMM: `python -m benchmarks.batch_invariance`.

The GEMM of DeepSeek-V3's shapes with and without it, in one process and taking turns, with pauses:
device time, L2 flushed before every call. Above 512 rows it changes nothing. First the rows of each
result are compared with those of the same rows among 512: they must have the same bits.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.circumstances import require_gpu
from benchmarks.figures import Row, geomean
from benchmarks.gemm_cases import SHAPES
from benchmarks.markdown import table
from benchmarks.options import numbers
from benchmarks.peers import Case, Operands
from benchmarks.session import about_this_run, finish, measured
from benchmarks.timing import device_us_many
from moefp8.kernels import fp8_gemm_nt

MS = 1, 8, 16, 32, 64, 128, 256, 512
RESULTS = Path(__file__).parent / "results" / "batch_invariance.json"
NAMES = {False: "default", True: "batch_invariant"}


def product(operands: Operands, m: int, batch_invariant: bool) -> torch.Tensor:
    """The first m rows of x times w: bf16 [m, N]."""
    (data, scale_inv), b = operands.a, operands.b
    d = data.new_empty((m, b.data.shape[0]), dtype=torch.bfloat16)
    fp8_gemm_nt((data[:m], scale_inv[:m]), b, d, batch_invariant=batch_invariant)
    return d


def measure(case: Case) -> Row:
    """Times of both, and how many of the default's rows have other bits than among 512.

    Raises RuntimeError if a row of `batch_invariant` does.
    """
    operands = Operands.random(Case(max(MS), case.n, case.k))
    moved = {}
    for which, name in NAMES.items():
        found, among = (product(operands, m, which) for m in (case.m, max(MS)))
        moved[name] = int((found != among[: case.m]).any(dim=1).sum())
    if moved[NAMES[True]]:
        raise RuntimeError(f"{case}: {moved[NAMES[True]]} rows depend on the batch")
    few = Operands.of(operands.x[: case.m], operands.w)
    calls = {name: _call(few, case, which) for which, name in NAMES.items()}
    us = {name: round(value, 3) for name, value in device_us_many(calls).items()}
    return {**case._asdict(), "us": us, "rows_with_other_bits": moved[NAMES[False]]}


def _call(operands: Operands, case: Case, which: bool) -> Any:
    return lambda: product(operands, case.m, which)


def price(row: Row) -> float:
    """How many times as long it takes."""
    return float(row["us"][NAMES[True]] / row["us"][NAMES[False]])


def price_table(results: dict[str, Any]) -> str:
    rows = results["rows"]
    cells = []
    for m in dict.fromkeys(row["m"] for row in rows):
        of_m = [row for row in rows if row["m"] == m]
        worst = max(of_m, key=price)
        moved = sum(row["rows_with_other_bits"] > 0 for row in of_m)
        cells.append(
            (
                str(m),
                f"{geomean(map(price, of_m)):.3f}",
                f"{price(worst):.3f} ({worst['n']} x {worst['k']})",
                f"{moved} of {len(of_m)}",
            )
        )
    head = (
        f"rows, on one {results['gpu']}",
        "times as long",
        "at most",
        "shapes whose bits it moves",
    )
    return table(head, cells)


def lines(results: dict[str, Any]) -> Iterator[str]:
    yield price_table(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--m", type=numbers, default=MS, help="such as 1,64")
    parser.add_argument("--out", "--json", type=Path, help=f"for the results; if all: {RESULTS}")
    options = parser.parse_args()
    require_gpu("benchmarks.batch_invariance")
    torch.manual_seed(0)
    cases = [Case(m, n, k) for m in options.m for n, k in SHAPES]
    started = time.perf_counter()
    results: dict[str, Any] = about_this_run(())
    with torch.no_grad():
        results["rows"] = list(measured(cases, measure))
    told = lines(results) if results["rows"] else ()
    is_all = options.m == MS
    finish(results, len(cases), told, options.out, RESULTS, is_all=is_all, started=started)


if __name__ == "__main__":
    main()
