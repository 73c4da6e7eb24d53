"""Draw how many times as fast as DeepGEMM each grouped GEMM is, beside its goal."""

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import PAUSES, ratio, told_mode, told_ratio
from benchmarks.grouped import GOALS, by_setting, shape_of
from benchmarks.peers import DEEP_GEMM

# These are colours of Okabe and Ito, as in `roofline`.
_OURS, _DEEP_GEMM, _GREY = "#0072B2", "#D55E00", "#555555"
_GAP = 0.6  # between settings, in bars


class Bar(NamedTuple):
    """y: the place from above; setting: nothing if it is that of the bar before.

    with_pauses: the ratio with pauses, where the other one is that without rest.
    """

    y: float
    setting: str
    shape: str
    ratio: float
    goal: float | None
    with_pauses: float | None = None


def bars(results: dict[str, Any]) -> list[Bar]:
    found, y = [], 0.0
    for setting, rows in by_setting(results["rows"]).items():
        name = setting
        for row in rows:
            told = told_ratio(row, (DEEP_GEMM,))
            if told is None:
                continue
            other = None if told_mode(row) == PAUSES else ratio(row, (DEEP_GEMM,))
            found.append(Bar(y, name, shape_of(row), told, GOALS.get(setting), other))
            name, y = "", y + 1
        if not name:
            y += _GAP
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    found = bars(results)
    figure = Figure(figsize=(8, 1.6 + 0.27 * len(found)), dpi=160, layout="constrained")
    axes = figure.subplots()
    axes.barh([bar.y for bar in found], [bar.ratio for bar in found], 0.8, color=_OURS)
    axes.axvline(1, color=_DEEP_GEMM, linewidth=1.4, label="DeepGEMM")
    style: dict[str, Any] = {"linestyle": "none", "markersize": 11, "markeredgewidth": 2.2}
    goals = [(bar.goal, bar.y) for bar in found if bar.goal]
    axes.plot(*zip(*goals, strict=True), marker="|", color="black", label="goal", **style)
    if others := [(bar.with_pauses, bar.y) for bar in found if bar.with_pauses]:
        style |= {"marker": "|", "color": "#bbbbbb", "label": "with pauses"}
        axes.plot(*zip(*others, strict=True), **style)
    for bar in found:
        label = f"{bar.ratio:.3f}   {bar.shape}"
        axes.text(0.02, bar.y, label, color="white", va="center", fontsize=9)
        axes.text(-0.02, bar.y, bar.setting, ha="right", va="center")
    axes.set(
        ylim=(max((bar.y for bar in found), default=0) + 0.7, -0.7),
        yticks=[],
        xlabel="times as fast as DeepGEMM, without rest where it takes 100 us or more"
        if others
        else "times as fast as DeepGEMM",
        title=f"Grouped FP8 GEMMs on one {results['gpu']}",
    )
    axes.grid(which="major", axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower right", frameon=False, ncols=3, labelcolor=_GREY)
    figure.savefig(path)
