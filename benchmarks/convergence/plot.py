"""Draw the losses of FP8 over those of BF16, and how far from BF16 each run ends."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.convergence import BF16, BF16_AGAIN, EVERY, FP8, FP8_AGAIN, SMOOTH
from benchmarks.convergence.figures import (
    Results,
    Run,
    curves,
    runs_of,
    smoothed,
    spread,
    steps_of,
    variants_of,
)

# These are colours of Okabe and Ito, as in `roofline`.
_FP8, _BF16, _GREY = "#0072B2", "#D55E00", "#555555"
_TITLES = {
    BF16_AGAIN: "BF16, run again",
    FP8: "FP8",
    FP8_AGAIN: "FP8",
    "fp8-128x128": 'FP8, wgrad="128x128"',
    "fp8-experts": "FP8, attention in BF16",
}


def ends(results: Results) -> dict[str, list[float]]:
    """By title: how far its runs end from the BF16 run of their seed, in percent."""
    by_title: dict[str, list[float]] = {}
    for variant in variants_of(results):
        percents = [curve.end for curve in curves(results, variant).values()]
        by_title.setdefault(_TITLES.get(variant, variant), []).extend(percents)
    return {title: percents for title, percents in by_title.items() if percents}


def draw(results: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_losses(left, results)
    _draw_ends(right, results)
    for axes in (left, right):
        axes.grid(which="major", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    run = results["runs"][0]
    figure.suptitle(
        f"{run['parameters'] / 1e6:,.1f} M parameters on one {run.get('gpu', run['cpu'])}", size=10
    )
    figure.savefig(path)


def _draw_losses(axes: Any, results: Results) -> None:
    """Every run in BF16 as a broad line, those in FP8 as thin ones on top."""
    again = (BF16_AGAIN, FP8_AGAIN)
    for variants, title, style in (
        ((BF16, again[0]), "BF16", {"color": _BF16, "linewidth": 4, "alpha": 0.5}),
        ((FP8, again[1]), "FP8", {"color": _FP8, "linewidth": 1}),
    ):
        for number, run in enumerate(_runs_of(results, variants)):
            label = title if number == 0 else None
            axes.plot(steps_of(run), smoothed(run["loss"]), label=label, **style)
    last = [smoothed(run["loss"]) for run in results["runs"]]
    settled = [x for each in last for x in each[len(each) // 20 :]]
    axes.set_ylim(min(settled) * 0.9, max(settled) * 1.05)
    axes.set(xlabel="step", ylabel="training loss, nats a byte")
    axes.set_title(f"Runs in FP8 on top of those in BF16, mean of {EVERY * SMOOTH} steps", size=9)
    if axes.lines:
        axes.legend(frameon=False, loc="upper right")


def _runs_of(results: Results, variants: Iterable[str]) -> list[Run]:
    return [run for variant in variants for run in runs_of(results, variant).values()]


def _draw_ends(axes: Any, results: Results) -> None:
    """A point for each run, on the band within which BF16 runs of other seeds end."""
    if between := spread(results):
        axes.axvspan(-between.end, between.end, color="#e8e8e8", zorder=0)
        legend = f"grey: BF16 runs of other seeds end up to {between.end:.2f} % apart"
        box = {"color": "#e8e8e8", "pad": 1}
        axes.text(0, -0.6, legend, ha="center", va="center", fontsize=9, color=_GREY, bbox=box)
    axes.axvline(0, color=_GREY, linewidth=0.8)
    by_title = ends(results)
    for place, (title, percents) in enumerate(by_title.items()):
        colour = _BF16 if title.startswith("BF16") else _FP8
        axes.plot(percents, [place] * len(percents), "o", color=colour, markersize=7, alpha=0.7)
    axes.set_yticks(range(len(by_title)), by_title)
    axes.set_ylim(max(len(by_title), 1) - 0.5, -0.9)
    axes.set_xlabel("loss at the end: percent above that of BF16")
    axes.set_title("How far each run ends from BF16 of its seed", size=9)
