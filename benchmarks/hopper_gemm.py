"""The table and the plot of `examples/hopper_gemm/run.py --json`, which times a GEMM's levels."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.figures import Row
from benchmarks.markdown import number, table
from benchmarks.pages import Results
from benchmarks.peers import DEEP_GEMM, OURS, PEERS

LEVEL, VARIANT, PEER = "level", "variant", "peer"
_COLOURS = {LEVEL: "#0072B2", VARIANT: "#56B4E9", PEER: "#999999"}


def rows_with_kind(results: Results, kind: str) -> list[Row]:
    return [row for row in results["rows"] if row["kind"] == kind]


def share(results: Results, row: Row, peer: str) -> float | None:
    """How many times as fast as a peer it is, in the same run; None where that did not run."""
    us = {each["name"]: each["us"] for each in results["rows"]}
    return us[peer] / row["us"] if peer in us else None


def timed(results: Results) -> str:
    """All that was timed: levels, what they are compared with, and variants."""
    levels = rows_with_kind(results, LEVEL)
    before: dict[str, Row] = {row["name"]: previous for previous, row in pairwise(levels)}
    lines = []
    for row in (x for kind in (LEVEL, PEER, VARIANT) for x in rows_with_kind(results, kind)):
        gain = before[row["name"]]["us"] / row["us"] if row["name"] in before else None
        shares = (number(share(results, row, peer), 2) for peer in (OURS, DEEP_GEMM))
        sensed = f"{row['mhz']} MHz, {row['watts']} W" if "mhz" in row else "-"
        cells = row["title"], f"{row['us']:.1f}", f"{row['tflops']:.0f}", number(gain, 2)
        lines.append([*cells, *shares, sensed, f"{row['error']:.1e}"])
    head = f"{results['m']} x {results['n']} x {results['k']}, {results['gpu']}"
    gains = "times the level before", *(f"of {PEERS[name].title}" for name in (OURS, DEEP_GEMM))
    return table([head, "us", "TFLOP/s", *gains, "clock, power", "worst row's error"], lines)


def page(results: Results) -> str:
    """The table, how it was made, and the plot, for docs/hopper-fp8-gemm.md."""
    turns = results["turns"]
    how = (
        f"Calls back to back on operands that no cache holds, all in turns: {turns['rounds']} "
        f"rounds of {turns['seconds']:g} s each, medians. {results['gpu']}, driver "
        f"{results['driver']}, torch {results['torch']}, {results['compiler']}, "
        f"{results['deep_gemm']}; {results['date'][:10]}, commit {results['commit']}."
    )
    plot = "![TFLOP/s of each level](../benchmarks/results/hopper_gemm.png)"
    return "\n\n".join((timed(results), how, plot))


def draw(results: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    rows: list[Row] = [x for kind in (LEVEL, VARIANT, PEER) for x in rows_with_kind(results, kind)]
    figure = Figure(figsize=(8, 0.36 * len(rows) + 1.2), dpi=160, layout="constrained")
    axes: Any = figure.subplots()
    bars = axes.barh(
        [row["title"] for row in rows],
        [row["tflops"] for row in rows],
        color=[_COLOURS[row["kind"]] for row in rows],
    )
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("TFLOP/s")
    axes.set_title(f"{results['m']} x {results['n']} x {results['k']} on one {results['gpu']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
