"""Draw where the time of whole models goes: the parts of each phase, and layer by layer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.model import TITLES
from benchmarks.model.table import figures_of, phases_of, ran
from benchmarks.peers import OURS
from benchmarks.session import Row

# These are colours of Okabe and Ito, as in `roofline`; the keys are those of `timeline.PARTS`.
_COLOURS = {
    "experts": "#0072B2",
    "shared experts": "#56B4E9",
    "router": "#009E73",
    "attention": "#E69F00",
    "dense MLP": "#D55E00",
    "norms": "#CC79A7",
    "head": "#F0E442",
    "rest": "#999999",
}


def bars(row: Row, phase: str, names: list[str]) -> Iterator[tuple[str, list[float]]]:
    """(part, its ms for each of `names`), of the parts that there are."""
    parts = [figures_of(row, name, phase).get("parts", {}) for name in names]
    for part in _COLOURS:
        if any(part in each for each in parts):
            yield part, [sum(each.get(part, ())) / 1e3 for each in parts]


def layers_phase(row: Row) -> str | None:
    """The phase that is shown layer by layer: decoding of the middle batch."""
    phases = [phase for phase in phases_of(row) if "parts" in figures_of(row, OURS, phase)]
    return phases[len(phases) // 2] if phases else None


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    rows = results["rows"]
    num_phases = max(len(phases_of(row)) for row in rows)
    figure = Figure(
        figsize=(2.6 * num_phases + 4.5, 3.2 * len(rows) + 0.8), dpi=120, layout="constrained"
    )
    widths = [1.0] * num_phases + [2.0]
    panels = figure.subplots(
        len(rows), num_phases + 1, squeeze=False, gridspec_kw={"width_ratios": widths}
    )
    for row, axes in zip(rows, panels, strict=True):
        names = ran([row])
        for phase, each in zip(phases_of(row), axes, strict=False):
            _draw_phase(each, row, phase, names)
        for unused in axes[len(phases_of(row)) : num_phases]:
            unused.axis("off")
        axes[0].set_ylabel(f"{row['title']}\nms of one call")
        _draw_layers(axes[-1], row)
    labels = dict(
        item
        for axes in panels.flat
        for item in zip(*reversed(axes.get_legend_handles_labels()), strict=True)
    )
    figure.legend(
        labels.values(), labels, loc="outside lower center", frameon=False, ncols=len(labels)
    )
    where = results.get("gpu", results["cpu"])
    figure.suptitle(f"Where the time goes on one {where}: lower is better")
    figure.savefig(path)


def _draw_phase(axes: Any, row: Row, phase: str, names: list[str]) -> None:
    below = [0.0] * len(names)
    places = range(len(names))
    for part, ms in bars(row, phase, names):
        axes.bar(places, ms, bottom=below, color=_COLOURS[part], label=part, width=0.7)
        below = [x + y for x, y in zip(below, ms, strict=True)]
    for place, name in enumerate(names):
        if figures_of(row, name, phase).get("parts_of") == "eager":
            at = place, below[place]
            axes.annotate("eager", at, ha="center", va="bottom", fontsize=7)
    short = [TITLES[name].replace("transformers ", "").replace(", ", "\n") for name in names]
    axes.set_xticks(places, short, fontsize=7)
    axes.set_title(phase.replace("decode ", "decode, batch "), fontsize=9)
    _plain(axes)


def _draw_layers(axes: Any, row: Row) -> None:
    phase = layers_phase(row)
    if phase is None:
        axes.axis("off")
        return
    parts = figures_of(row, OURS, phase)["parts"]
    below = [0.0] * row["layers"]
    for part in (x for x in _COLOURS if x in parts):
        us = parts[part][: row["layers"]]
        axes.bar(
            range(row["layers"]), us, bottom=below, color=_COLOURS[part], width=0.9, label=part
        )
        below = [x + y for x, y in zip(below, us, strict=True)]
    axes.set(xlabel="layer", ylabel="us")
    axes.xaxis.get_major_locator().set_params(integer=True)
    told = phase.replace("decode ", "decode, batch ")
    axes.set_title(f"{TITLES[OURS]}, layer by layer: {told}", fontsize=9)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.margins(y=0.08)
    axes.grid(which="major", axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
