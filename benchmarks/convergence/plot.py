"""Draw the curves of all runs, and how far those in FP8 are from those in BF16."""

from pathlib import Path
from typing import Any

from benchmarks.convergence import BF16, EVERY, GOAL_PERCENT, SMOOTH
from benchmarks.convergence.figures import (
    Results,
    curves,
    runs_of,
    smoothed,
    spread,
    steps_of,
    variants_of,
)

_GREY = "#555555"
_COLOURS = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"  # Okabe and Ito's


def draw(results: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_losses(left, results)
    _draw_differences(right, results)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(which="major", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8, loc="upper right")
    right.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    run = results["runs"][0]
    figure.suptitle(
        f"{run['parameters'] / 1e6:,.1f} M parameters on one {run.get('gpu', run['cpu'])}", size=10
    )
    figure.savefig(path)


def _draw_losses(axes: Any, results: Results) -> None:
    """Training losses as lines, held-out ones as points."""
    styles = {BF16: _GREY, **dict(zip(variants_of(results), _COLOURS, strict=False))}
    for variant, colour in styles.items():
        for number, run in enumerate(runs_of(results, variant).values()):
            label = variant if number == 0 else None
            axes.plot(steps_of(run), smoothed(run["loss"]), color=colour, linewidth=1, label=label)
            axes.plot(*zip(*run["held_out"], strict=True), ".", color=colour, markersize=5)
    last = [smoothed(run["loss"]) for run in results["runs"]]
    settled = [x for each in last for x in each[len(each) // 20 :]]
    axes.set_ylim(min(settled) * 0.9, max(settled) * 1.05)
    axes.set_ylabel("loss, nats a byte")
    axes.set_title(f"loss, mean of {EVERY * SMOOTH} steps; points: held out", fontsize=9)


def _draw_differences(axes: Any, results: Results) -> None:
    """In percent, by step, beside the goal and beside how far apart seeds of BF16 are."""
    between = spread(results)
    largest = 2 * GOAL_PERCENT
    for variant, colour in zip(variants_of(results), _COLOURS, strict=False):
        label: str | None = variant
        for seed, found in curves(results, variant).items():
            steps = steps_of(runs_of(results, variant)[seed])
            axes.plot(steps, found.by_step, color=colour, linewidth=1, label=label)
            largest, label = max(largest, 1.1 * abs(found.largest)), None
    if between:
        steps = steps_of(next(iter(runs_of(results, BF16).values())))
        below = [-x for x in between.by_step]
        told = "between seeds of BF16"
        axes.fill_between(steps, below, between.by_step, color="#dddddd", zorder=0, label=told)
    for at in (-GOAL_PERCENT, GOAL_PERCENT):
        label = f"{GOAL_PERCENT} %" if at > 0 else None
        axes.axhline(at, color=_GREY, linewidth=0.8, linestyle="--", label=label)
    axes.set_ylim(-largest, largest)
    axes.set_ylabel("percent")
    axes.set_title("difference of the smoothed loss to BF16 of the same seed", fontsize=9)
