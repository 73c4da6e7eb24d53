"""Rows that were measured at several times, or on several GPUs of one kind, are one result."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Row

Results = dict[str, Any]
ALIKE = "gpu", "driver", "torch", "commit"  # what all rows of a result have in common


def with_row(rows: Iterable[Row], row: Row) -> list[Row]:
    """The rows, and one in place of that of its part and case."""
    others = [x for x in rows if (x["part"], x["case"]) != (row["part"], row["case"])]
    return [*others, row]


def rows_of(others: Results, results: Results, what: str) -> list[Row]:
    """The rows of `others`.

    Raises ValueError if they are of another place than `results`; `what` tells whose they are.
    """
    for key in ALIKE:
        if others.get(key) != results.get(key):
            raise ValueError(
                f"{what} must have this run's {key}, {results.get(key)}, got {others.get(key)}"
            )
    rows: list[Row] = others["rows"]
    return rows


def put_together(files: Sequence[Path]) -> Results:
    """What all files tell, later ones in place of earlier ones; the rest is told by the first.

    Which DeepGEMM it is, is told by one that had it.

    Raises ValueError if they are of several places.
    """
    results, *others = (json.loads(file.read_text()) for file in files)
    for file, other in zip(files[1:], others, strict=True):
        for row in rows_of(other, results, f"--report: rows of {file}"):
            results["rows"] = with_row(results["rows"], row)
        if results["deep_gemm"] == "missing":
            results["deep_gemm"] = other["deep_gemm"]
        results["missing"] |= other["missing"]
        results["libraries"] |= other["libraries"]
        results["left_out"] += other["left_out"]
    found = {f"{row['part']}: {row['case']}" for row in results["rows"]}
    results["left_out"] = sorted({*results["left_out"]} - found)
    return results
