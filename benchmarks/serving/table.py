"""The tables of engines, made of `benchmarks/results/serving.json`."""

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.markdown import number, table
from benchmarks.serving import ENGINES, OURS, PACKAGES, SGLANG, VLLM
from benchmarks.session import Row


def ms_of(row: Row, engine: str, phase: str, key: str = "ms") -> float | None:
    """The median of all runs. key: "ms", or "first_ms" of the first request after a start."""
    runs = (run for run in _runs(row, engine) if phase in run["phases"])
    return _median(run["phases"][phase][key] for run in runs)


def speedup(row: Row, engine: str, phase: str, key: str = "ms") -> float | None:
    """How many times as fast as `engine` the same package is with moefp8."""
    ours, theirs = (ms_of(row, x, phase, key) for x in (OURS[ENGINES[engine].package], engine))
    return theirs / ours if theirs and ours else None


def start_of(row: Row, engine: str, is_cold: bool) -> float | None:
    """Seconds to the first token, where nothing was compiled before or all was."""
    return _median(run["first_token_s"] for run in _runs(row, engine) if run["cold"] is is_cold)


def gib_of(row: Row, engine: str) -> float | None:
    """Memory of the GPU that is in use at the end."""
    return _median(run["gpu_gib"] for run in _runs(row, engine) if "gpu_gib" in run)


def versions_of(rows: list[Row], package: str = VLLM) -> list[str]:
    """The versions of a package that ran."""
    runs = (run for row in rows for name in ENGINES for run in _runs(row, name))
    return sorted({run[package] for run in runs if package in run})


def phases_of(row: Row) -> list[str]:
    runs = (run for name in ENGINES for run in _runs(row, name))
    return list(dict.fromkeys(phase for run in runs for phase in run["phases"]))


def tables(results: dict[str, Any]) -> str:
    """Speed beside engines' own layers, starts and memory, and what did not run."""
    rows = results["rows"]
    names = [x for x in ENGINES if any(x in row["engines"] for row in rows)]
    packages = [x for x in PACKAGES if any(ENGINES[name].package == x for name in names)]
    refused = (
        f"- {ENGINES[name].title} with {row['title']}: {engine['refused']}"
        for row in rows
        for name, engine in row["engines"].items()
        if "refused" in engine
    )
    parts = [
        _speeds(rows, names, packages),
        _about(results, packages),
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


def _about(results: dict[str, Any], packages: list[str]) -> str:
    """What the table of speeds shows."""
    rows, gpu = results["rows"], results.get("gpu", results["cpu"])
    graphs = {VLLM: "`torch.compile` and CUDA graphs", SGLANG: "CUDA graphs"}
    versions = {x: ", ".join(versions_of(rows, x)) for x in packages}
    ran = " and ".join(f"{PACKAGES[x]} {versions[x]} with {graphs[x]}" for x in packages)
    owners = " or ".join(f"{PACKAGES[x]}'s" for x in packages)
    text = (
        f"{ran} on one {gpu}, no prefix cached: tokens per second with moefp8, and "
        f"how many times as fast as {owners} own layers that is; in brackets for the first request "
        "of a kind after a start. "
    )
    if VLLM in packages:
        text += "The last column: which part of the GPU's time experts take with moefp8"
        text += f"{' in vLLM' * (len(packages) > 1)}. "
    return text + _medians(rows)


def _medians(rows: list[Row]) -> str:
    """How many runs of an engine there are; of each model, where these differ."""
    titles: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        counts = [count for name in ENGINES if (count := len(_runs(row, name)))]
        titles.setdefault((min(counts, default=0), max(counts, default=0)), []).append(row["title"])
    if titles.keys() == {(1, 1)}:
        return "One run of each engine, a process of its own."
    runs = {
        (fewest, most): "one run" if most == 1 else f"{_up_to(fewest, most)} runs"
        for fewest, most in titles
    }
    if len(titles) > 1:
        runs = {counts: f"{runs[counts]} ({', '.join(titles[counts])})" for counts in titles}
    each = " and ".join(runs.values())
    return f"Medians of {each}, engines in turns, each run in a process of its own."


def _up_to(fewest: int, most: int) -> str:
    return f"{most}" if fewest == most else f"{fewest} to {most}"


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _runs(row: Row, engine: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = row["engines"].get(engine, {}).get("runs", [])
    return runs


def _speeds(rows: list[Row], names: list[str], packages: list[str]) -> str:
    """Of each package tokens per second with moefp8, and how much faster that is than others."""
    ours = [OURS[package] for package in packages]
    columns = {
        x: f"{ENGINES[x].title}, tokens/s" if x in ours else f"times as fast as {ENGINES[x].title}"
        for x in ENGINES
        if x in ours or x in names
    }
    has_share = VLLM in packages
    lines = []
    for row in rows:
        for phase in phases_of(row):
            cells = [_speed(row, phase, x) for x in columns]
            lines.append([row["title"], phase, *cells, *[_share(row, phase)] * has_share])
    return table(["model", "phase", *columns.values(), *["experts"] * has_share], lines)


def _speed(row: Row, phase: str, engine: str) -> str:
    """Tokens per second with moefp8; for another engine, how many times as fast that is."""
    if engine in OURS.values():
        ms = ms_of(row, engine, phase)
        tokens = (x["phases"][phase]["tokens"] for x in _runs(row, engine) if phase in x["phases"])
        return number(ms and 1e3 * next(tokens) / ms, 0)
    if (ratio := speedup(row, engine, phase)) is None:
        return "-"
    first = number(speedup(row, engine, phase, "first_ms"), 2)
    return f"{ratio:.2f} ({first})" if phase.startswith("prefill") else f"{ratio:.2f}"


def _share(row: Row, phase: str) -> str:
    """The part of the GPU's time that experts take with moefp8 in vLLM."""
    measured = (run["phases"].get(phase, {}) for run in _runs(row, OURS[VLLM]))
    share = _median(x["experts_share"] for x in measured if x.get("experts_share") is not None)
    return "-" if share is None else f"{100 * share:.0f} %"


def _start(row: Row, engine: str) -> list[str]:
    """A line of the table of starts."""
    seconds = (start_of(row, engine, is_cold) for is_cold in (True, False))
    cells = (number(x, 1) for x in (*seconds, gib_of(row, engine)))
    return [row["title"], ENGINES[engine].title, *cells]
