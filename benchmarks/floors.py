"""Draw the time of each layer of routed experts over the least that it must take.

What takes 100 us or more is drawn without rest, where it was timed so, and faintly with pauses.
"""

from pathlib import Path
from typing import Any

from benchmarks.figures import PAUSES, Row, fastest_us, told_mode
from benchmarks.moe import goal_of
from benchmarks.moe_cases import FLOOR_TBPS, FLOOR_TFLOPS, MODELS
from benchmarks.moe_peers import HF_BF16, HF_FP8, MEGA, PEERS
from benchmarks.peers import OURS
from benchmarks.session import titles_of

# These are colours of Okabe and Ito, as in `roofline`.
_STYLES: dict[str, dict[str, Any]] = {
    HF_BF16: {"marker": "s", "markersize": 4, "color": "#CC79A7"},
    HF_FP8: {"marker": "x", "markersize": 6, "color": "#009E73"},
    MEGA: {"marker": "D", "markersize": 4, "color": "#D55E00"},
    OURS: {"marker": "o", "markersize": 6, "color": "#0072B2", "linewidth": 2.2},
}
_GREY = "#555555"


def points(rows: list[Row], name: str, mode: str | None = None) -> list[tuple[str, float]]:
    """(tokens, time over the floor) of every row that `name` ran, in the mode that is told."""
    times = [(row, fastest_us(row, (name,), mode or told_mode(row))) for row in rows]
    return [(str(row["tokens"]), us / row["floor_us"]) for row, us in times if us is not None]


def with_pauses(rows: list[Row], name: str) -> list[tuple[str, float]]:
    """The same with pauses, of the rows that are told without rest."""
    return points([row for row in rows if told_mode(row) != PAUSES], name, PAUSES)


def goals(rows: list[Row]) -> list[tuple[str, float]]:
    """(tokens, time over the floor) at which ours would just reach its goal."""
    of_mega = dict(points(rows, MEGA))
    found = [(str(row["tokens"]), goal_of(row)) for row in rows]
    return [(t, of_mega[t] / goal) for t, goal in found if goal and t in of_mega]


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    rows, titles = results["rows"], titles_of(PEERS, results["rows"])
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(1 + 3.4 * len(models), 4.2), dpi=160, layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        of_model = [row for row in rows if row["model"] == model]
        axes.axhline(1, color=_GREY, linewidth=1, label="floor")
        axes.plot([str(row["tokens"]) for row in of_model], [1] * len(of_model), alpha=0)
        for name in (name for name in _STYLES if name in titles):
            style = {"label": titles[name], **_STYLES[name]}
            axes.plot(*_columns(points(of_model, name)), **style)
            style |= {"linestyle": "none", "linewidth": 0, "alpha": 0.35, "label": None}
            axes.plot(*_columns(with_pauses(of_model, name)), **style)
        style = {"marker": "_", "markersize": 15, "markeredgewidth": 2.2, "color": "black"}
        axes.plot(*_columns(goals(of_model)), linestyle="none", label="goal", **style)
        axes.set(yscale="log", xlabel="tokens", title=MODELS[model].title)
        axes.set_yticks([1, 2, 4, 8, 16])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(which="major", axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"time over floor ({FLOOR_TBPS:g} TB/s, {FLOOR_TFLOPS:g} TFLOP/s)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=len(labels))
    faint = "; faint: with pauses" if any(told_mode(row) != PAUSES for row in rows) else ""
    figure.suptitle(f"Layers of routed experts on one {results['gpu']}{faint}")
    figure.savefig(path)


def _columns(points: list[tuple[str, float]]) -> tuple[list[str], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
