"""The tables of engines, made of `benchmarks/results/serving.json`."""

import statistics
from typing import Any

from benchmarks.markdown import number, table
from benchmarks.serving import OURS, TITLES
from benchmarks.session import Row


def ms_of(row: Row, engine: str, phase: str, key: str = "ms") -> float | None:
    """The median of all runs. key: "ms", or "first_ms" of the first request after a start."""
    values = [run["phases"][phase][key] for run in _runs(row, engine) if phase in run["phases"]]
    return statistics.median(values) if values else None


def speedup(row: Row, engine: str, phase: str, key: str = "ms") -> float | None:
    """How many times as fast as `engine` moefp8 is."""
    theirs, ours = (ms_of(row, x, phase, key) for x in (engine, OURS))
    return theirs / ours if theirs and ours else None


def phases_of(row: Row) -> list[str]:
    runs = (run for name in TITLES for run in _runs(row, name))
    return list(dict.fromkeys(phase for run in runs for phase in run["phases"]))


def tables(results: dict[str, Any]) -> str:
    """Speed beside vLLM's own layers, starts and memory, and what did not run."""
    rows = results["rows"]
    names = [x for x in TITLES if any(x in row["engines"] for row in rows)]
    others = [x for x in names if x != OURS]
    beside = (f"times as fast as {TITLES[x]}" for x in others)
    refused = (
        f"- {TITLES[name]} with {row['title']}: {engine['refused']}"
        for row in rows
        for name, engine in row["engines"].items()
        if "refused" in engine
    )
    versions = {run["vllm"] for row in rows for name in names for run in _runs(row, name)}
    parts = [
        table(
            ["model", "phase", "moefp8, tokens/s", *beside, "experts"],
            [_speeds(row, phase, others) for row in rows for phase in phases_of(row)],
        ),
        f"vLLM {', '.join(sorted(versions))} on one {results.get('gpu', results['cpu'])}, with "
        "`torch.compile` and CUDA graphs, no prefix cached: tokens per second with moefp8, and how "
        "many times as fast as vLLM's own layers that is; in brackets for the first request of a "
        "kind after a start. The last column: which part of the GPU's time experts take with "
        f"moefp8. Medians of {results['runs']} runs, engines in turns.",
        table(
            [
                "model",
                "layers by",
                "s to the first token, nothing compiled",
                "compiled",
                "GiB in use",
            ],
            [_start(row, name) for row in rows for name in names if _runs(row, name)],
        ),
        "\n".join(refused),
        f"torch {results['torch']}; {results['date'][:10]}, commit {results['commit']}.",
    ]
    return "\n\n".join(part for part in parts if part)


def _runs(row: Row, engine: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = row["engines"].get(engine, {}).get("runs", [])
    return runs


def _speeds(row: Row, phase: str, others: list[str]) -> list[str]:
    """A line of the table of speeds."""
    ours = ms_of(row, OURS, phase)
    measured = [run["phases"][phase] for run in _runs(row, OURS) if phase in run["phases"]]
    rate = number(ours and 1e3 * measured[0]["tokens"] / ours, 0)
    shares = [x["experts_share"] for x in measured if x.get("experts_share") is not None]
    share = f"{100 * statistics.median(shares):.0f} %" if shares else "-"
    cells = []
    for other in others:
        ratio = number(speedup(row, other, phase), 2)
        first = number(speedup(row, other, phase, "first_ms"), 2)
        cells.append(f"{ratio} ({first})" if phase.startswith("prefill") else ratio)
    return [row["title"], phase, rate, *cells, share]


def _start(row: Row, engine: str) -> list[str]:
    """A line of the table of starts."""
    runs = _runs(row, engine)
    starts = (
        [run["first_token_s"] for run in runs if run["cold"] is cold] for cold in (True, False)
    )
    used = [run["gpu_gib"] for run in runs if "gpu_gib" in run]
    cells = (number(statistics.median(x) if x else None, 1) for x in (*starts, used))
    return [row["title"], TITLES[engine], *cells]
