"""The tables of engines, made of `benchmarks/results/serving.json`."""

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.markdown import number, table
from benchmarks.serving import OURS, TITLES
from benchmarks.session import Row


def ms_of(row: Row, engine: str, phase: str, key: str = "ms") -> float | None:
    """The median of all runs. key: "ms", or "first_ms" of the first request after a start."""
    runs = (run for run in _runs(row, engine) if phase in run["phases"])
    return _median(run["phases"][phase][key] for run in runs)


def speedup(row: Row, engine: str, phase: str, key: str = "ms") -> float | None:
    """How many times as fast as `engine` moefp8 is."""
    theirs, ours = (ms_of(row, x, phase, key) for x in (engine, OURS))
    return theirs / ours if theirs and ours else None


def start_of(row: Row, engine: str, is_cold: bool) -> float | None:
    """Seconds to the first token, where nothing was compiled before or all was."""
    return _median(run["first_token_s"] for run in _runs(row, engine) if run["cold"] is is_cold)


def gib_of(row: Row, engine: str) -> float | None:
    """Memory of the GPU that is in use at the end."""
    return _median(run["gpu_gib"] for run in _runs(row, engine) if "gpu_gib" in run)


def versions_of(rows: list[Row]) -> list[str]:
    """The versions of vLLM that ran."""
    return sorted({x["vllm"] for row in rows for name in TITLES for x in _runs(row, name)})


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
    parts = [
        table(
            ["model", "phase", "moefp8, tokens/s", *beside, "experts"],
            [_speeds(row, phase, others) for row in rows for phase in phases_of(row)],
        ),
        f"vLLM {', '.join(versions_of(rows))} on one {results.get('gpu', results['cpu'])}, with "
        "`torch.compile` and CUDA graphs, no prefix cached: tokens per second with moefp8, and how "
        "many times as fast as vLLM's own layers that is; in brackets for the first request of a "
        "kind after a start. The last column: which part of the GPU's time experts take with "
        f"moefp8. {_medians(rows)}",
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


def _medians(rows: list[Row]) -> str:
    """How many runs of an engine there are; of each model, where these differ."""
    titles: dict[int, list[str]] = {}
    for row in rows:
        titles.setdefault(max(len(_runs(row, name)) for name in TITLES), []).append(row["title"])
    if titles.keys() == {1}:
        return "One run of each engine, a process of its own."
    runs = {count: "one run" if count == 1 else f"{count} runs" for count in titles}
    if len(titles) > 1:
        runs = {count: f"{runs[count]} ({', '.join(titles[count])})" for count in titles}
    counts = " and ".join(runs.values())
    return f"Medians of {counts}, engines in turns, each run in a process of its own."


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


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
    seconds = (start_of(row, engine, is_cold) for is_cold in (True, False))
    cells = (number(x, 1) for x in (*seconds, gib_of(row, engine)))
    return [row["title"], TITLES[engine], *cells]
