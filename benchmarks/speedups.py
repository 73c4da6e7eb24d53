"""Draw how many times as fast as DeepGEMM each grouped GEMM is, beside its goal."""

from pathlib import Path
from typing import Any

from benchmarks.grouped import GOALS, against_deep_gemm, by_setting

# These are colours of Okabe and Ito, as in `roofline`.
_OURS, _DEEP_GEMM, _GREY = "#0072B2", "#D55E00", "#555555"
_GAP = 0.6  # between settings, in bars


def bars(results: dict[str, Any]) -> list[tuple[float, str, str, float, float | None]]:
    """(place from above, setting or nothing if as before, shape, ratio, goal) of every case."""
    found, y = [], 0.0
    for setting, rows in by_setting(results["rows"]).items():
        name = setting
        for shape, ratio in against_deep_gemm(rows).items():
            found.append((y, name, shape, ratio, GOALS.get(setting)))
            name, y = "", y + 1
        if not name:
            y += _GAP
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    found = bars(results)
    figure = Figure(figsize=(8, 1.6 + 0.27 * len(found)), dpi=160, layout="constrained")
    axes = figure.subplots()
    axes.barh([y for y, *_ in found], [ratio for *_, ratio, _ in found], 0.8, color=_OURS)
    axes.axvline(1, color=_DEEP_GEMM, linewidth=1.4, label="DeepGEMM")
    goals = [(goal, y) for y, *_, goal in found if goal]
    style: dict[str, Any] = {"marker": "|", "markersize": 11, "markeredgewidth": 2.2}
    ticks = zip(*goals, strict=True)
    axes.plot(*ticks, linestyle="none", color="black", label="goal", **style)
    for y, setting, shape, ratio, _ in found:
        axes.text(0.02, y, f"{ratio:.3f}   {shape}", color="white", va="center", fontsize=9)
        axes.text(-0.02, y, setting, ha="right", va="center")
    axes.set(
        ylim=(max((y for y, *_ in found), default=0) + 0.7, -0.7),
        yticks=[],
        xlabel="times as fast as DeepGEMM",
        title=f"Grouped FP8 GEMMs on one {results['gpu']}",
    )
    axes.grid(which="major", axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower right", frameon=False, ncols=2, labelcolor=_GREY)
    figure.savefig(path)
