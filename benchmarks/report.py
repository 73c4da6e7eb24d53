"""Write the README's tables from `benchmarks/results`: `python -m benchmarks.report`."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def accuracy_table(results: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {error['worst']:.1e} | {error['median']:.1e} |"
        for name, error in results["relative_error_of_rows"].items()
    ]
    return "\n".join(["| relative error of a row | worst | median |", "|---|---|---|", *rows])


def load_table(results: dict[str, Any]) -> str:
    head = (
        f"| {results['gib']:.1f} GiB of experts, warm page cache, {results['cpu']} "
        "| GiB/s | extra peak memory |"
    )
    names = {"moefp8": "`load_checkpoint`", "safetensors": "safetensors' `load_file`, then stack"}
    rows = [
        f"| {title} | {results[name]['gib_per_s']:.1f} | {results[name]['extra_percent']:.1f} % |"
        for name, title in names.items()
    ]
    return "\n".join([head, "|---|---|---|", *rows])


def cpu_table(results: dict[str, Any]) -> str:
    head = f"| `FP8Linear` 7168 -> 4096, {results['cpu']} | FP8, ms | BF16, ms |"
    rows = [f"| {r['tokens']} tokens | {r['fp8']:.0f} | {r['bf16']:.1f} |" for r in results["ms"]]
    return "\n".join([head, "|---|---|---|", *rows])


TABLES = {"accuracy": accuracy_table, "load": load_table, "cpu": cpu_table}


def with_tables(text: str) -> str:
    """`text` with what stands between `<!-- NAME -->` and `<!-- /NAME -->` made anew."""
    for name, table in TABLES.items():
        marks = f"<!-- {name} -->", f"<!-- /{name} -->"
        results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        block = "\n".join((marks[0], table(results), marks[1]))
        before, rest = text.split(marks[0])
        text = before + block + rest.split(marks[1])[1]
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))
