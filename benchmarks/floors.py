"""Draw the time of each layer of routed experts over the least that it must take.

What takes 100 us or more is drawn without rest, where it was timed so, and faintly with pauses.
"""

from pathlib import Path
from typing import Any

from benchmarks.figures import PAUSES, WITHOUT_REST, Row, fastest_us, told_mode
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


def below_the_floor(rows: list[Row]) -> str:
    """Why points of ours are below the floor: how fast they read. Nothing if none is."""
    fastest = 0.0  # in TB/s
    for row in rows:
        num_bytes = row["active"] * MODELS[row["model"]].weights_of_expert
        times = (fastest_us(row, (OURS,), mode) for mode in (PAUSES, WITHOUT_REST))
        fastest = max(fastest, *(num_bytes / us / 1e6 for us in times if us is not None))
    if fastest <= FLOOR_TBPS:
        return ""
    return (
        f"A copy also writes: reading alone is faster, up to {fastest:.2f} TB/s here, so a layer "
        "that hardly does anything else may be below the floor. "
    )


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    rows, titles = results["rows"], titles_of(PEERS, results["rows"])
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(1 + 3.4 * len(models), 4.5), dpi=160, layout="constrained")
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
        axes.set(yscale="log", xlabel="tokens", title=MODELS[model].title)
        axes.set_yticks([1, 2, 4, 8, 16])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(which="major", axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("times as long as the floor")
    handles, labels = panels[0].get_legend_handles_labels()
    title = f"Layers of routed experts on one {results['gpu']}: lower is better"
    legend: dict[str, Any] = {"title": title, "title_fontsize": 12, "ncols": len(labels)}
    figure.legend(handles, labels, loc="outside upper center", frameon=False, **legend)
    faint = "Faint: with pauses. " if any(told_mode(row) != PAUSES for row in rows) else ""
    figure.supxlabel(
        f"{faint}Floor: weights of chosen experts read once at {FLOOR_TBPS:g} TB/s, the speed of "
        f"copies, or products at {FLOOR_TFLOPS:g} TFLOP/s.\n{below_the_floor(rows)}",
        size=9,
        color=_GREY,
    )
    figure.savefig(path)


def _columns(points: list[tuple[str, float]]) -> tuple[list[str], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
