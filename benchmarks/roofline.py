"""Draw where each GEMM stands under the roofs of its GPU: FLOPs over bytes, and TFLOP/s.

What takes 100 us or more is drawn without rest, where it was timed so, and faintly with pauses.
"""

from math import atan2, degrees
from pathlib import Path
from typing import Any

from benchmarks.figures import PAUSES, tflops, told_mode
from benchmarks.gemm_goals import case_of
from benchmarks.peers import BLOCK_SCALED, DEEP_GEMM, OURS, PEERS, PER_TENSOR

DATASHEET_TFLOPS = 1979.0  # FP8 without sparsity: NVIDIA's datasheets of the H100 and H200 SXM

# Colours of Okabe and Ito, told apart by all eyes; marks that can be read on top of each other.
_STYLES: dict[str, dict[str, Any]] = {
    BLOCK_SCALED: {"marker": "x", "markersize": 6, "markeredgewidth": 1.4, "color": "#009E73"},
    DEEP_GEMM: {"marker": "_", "markersize": 15, "markeredgewidth": 2.0, "color": "#D55E00"},
    OURS: {"marker": "o", "markersize": 6, "markeredgewidth": 0, "color": "#0072B2"},
}
_GREY = "#555555"


def points(
    results: dict[str, Any], name: str, mode: str | None = None
) -> list[tuple[float, float]]:
    """(FLOPs per byte, TFLOP/s) of every case that `name` ran, in the mode that is told."""
    found = []
    for row in results["rows"]:
        case, speed = case_of(row), tflops(row, name, mode or told_mode(row))
        if speed is not None:
            found.append((case.flops / case.num_bytes(PEERS[name].operands), speed))
    return found


def with_pauses(results: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """The same with pauses, of the cases that are told without rest."""
    long = [row for row in results["rows"] if told_mode(row) != PAUSES]
    return points({**results, "rows": long}, name, PAUSES)


def roofs(results: dict[str, Any]) -> dict[str, float]:
    """Memory in TB/s, and arithmetic in TFLOP/s by datasheet and as cuBLASLt per-tensor got it."""
    return {
        "copy": results["copy_gbps"] / 1e3,
        "datasheet": DATASHEET_TFLOPS,
        "measured": max((y for _, y in points(results, PER_TENSOR, PAUSES)), default=0.0),
    }


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), dpi=160, layout="constrained")
    axes = figure.subplots()
    mode = "faint: with pauses" if with_pauses(results, OURS) else "with pauses"
    shown = {name: found for name in _STYLES if (found := points(results, name))}
    every = [point for found in shown.values() for point in found]
    left, right = min(x for x, _ in every) / 1.5, max(x for x, _ in every) * 1.5
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        ylim=(min(y for _, y in every) / 3, 1.6 * DATASHEET_TFLOPS),
        xlabel="FLOPs per byte (each operand read once, the result written once)",
        ylabel="TFLOP/s: higher is better",
        title=f"FP8 GEMM with 1x128 and 128x128 scales on one {results['gpu']}; {mode}",
    )
    axes.grid(which="major", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    _draw_roofs(axes, roofs(results), left, right)
    for name, found in shown.items():
        style = {"linestyle": "none", "label": PEERS[name].title, **_STYLES[name]}
        axes.plot(*zip(*found, strict=True), **style)
        if others := with_pauses(results, name):
            axes.plot(*zip(*others, strict=True), **{**style, "label": None, "alpha": 0.35})
    _label_each_m(axes, results)
    axes.legend(loc="upper left", frameon=False, reverse=True)
    figure.savefig(path)


def _draw_roofs(axes: Any, roof: dict[str, float], left: float, right: float) -> None:
    ridge = roof["datasheet"] / roof["copy"]
    axes.plot([left, ridge, right], [left * roof["copy"], *[roof["datasheet"]] * 2], color=_GREY)
    x, y = 1.4 * left, 1.4 * left * roof["copy"] * 1.15
    axes.text(
        x,
        y,
        f"copies on this GPU: {roof['copy']:.1f} TB/s",
        color=_GREY,
        rotation=degrees(atan2(y, x)),  # it is in data; the axes turn it to the roof's slope
        rotation_mode="anchor",
        transform_rotates_text=True,
    )
    label = f"datasheet: {roof['datasheet']:.0f} TFLOP/s"
    axes.text(right, 1.06 * roof["datasheet"], label, color=_GREY, ha="right")
    if measured := roof["measured"]:
        start = measured / roof["copy"]
        axes.plot([start, right], [measured] * 2, color=_GREY, linestyle="--", linewidth=1)
        label = f"cuBLASLt per-tensor, at most: {measured:.0f} TFLOP/s "
        axes.text(0.95 * start, measured, label, color=_GREY, ha="right", va="center")


def _label_each_m(axes: Any, results: dict[str, Any]) -> None:
    """A bar below the points of each M, and lower where it would cross the bar before."""
    bars: list[tuple[float, float]] = []  # right end, height
    for m in sorted({row["m"] for row in results["rows"]}):
        rows = {**results, "rows": [row for row in results["rows"] if row["m"] == m]}
        of_m = [point for name in _STYLES for point in points(rows, name)]
        first, last = min(x for x, _ in of_m), max(x for x, _ in of_m)
        height = min(y for _, y in of_m) / 1.35
        if bars and bars[-1][0] > first:
            height = min(height, bars[-1][1] / 1.6)
        bars.append((last, height))
        axes.plot([first / 1.05, last * 1.05], [height] * 2, color=_GREY, linewidth=0.8)
        label = f"M = {m}"
        axes.text((first * last) ** 0.5, height / 1.06, label, color=_GREY, ha="center", va="top")
