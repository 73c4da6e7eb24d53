"""What curves of runs say: smoothed losses, how far FP8 is from BF16, how far seeds are apart."""

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.convergence import (
    BF16,
    BF16_AGAIN,
    EVERY,
    FP8,
    FP8_AGAIN,
    SMOOTH,
    VARIANTS,
)

Run = dict[str, Any]
Results = dict[str, Any]


def smoothed(losses: Sequence[float], window: int = SMOOTH) -> list[float]:
    """The mean of each and those before it, `window` of them once there are so many."""
    found = []
    for end in range(1, len(losses) + 1):
        part = losses[max(0, end - window) : end]
        found.append(sum(part) / len(part))
    return found


def percent(found: float, expected: float) -> float:
    return 100 * (found / expected - 1)


def spread_percent(values: Sequence[float]) -> float:
    """The largest less the smallest, of their mean."""
    return 100 * (max(values) - min(values)) / (sum(values) / len(values))


def runs_of(results: Results, variant: str) -> dict[int, Run]:
    """By seed."""
    found = [run for run in results["runs"] if run["variant"] == variant]
    return {run["seed"]: run for run in sorted(found, key=lambda run: run["seed"])}


def variants_of(results: Results) -> list[str]:
    """All but BF16: those of `VARIANTS` in its order, then others in that in which they came."""
    found = dict.fromkeys(run["variant"] for run in results["runs"])
    known = [name for name in VARIANTS if name in found and name != BF16]
    return [*known, *(name for name in found if name not in VARIANTS)]


def steps_of(run: Run) -> list[int]:
    """The last step of each mean."""
    return [EVERY * (i + 1) for i in range(len(run["loss"]))]


class Curve(NamedTuple):
    """A run beside the BF16 run of its seed; the differences are in percent.

    by_step: of smoothed losses, at every mean. largest: of these, behind the first tenth of the
    run, in which losses fall fast. held_out: at the end.
    """

    by_step: list[float]
    largest: float
    end: float
    held_out: float


def curve(run: Run, beside: Run) -> Curve:
    pairs = zip(smoothed(run["loss"]), smoothed(beside["loss"]), strict=True)
    by_step = [percent(*pair) for pair in pairs]
    settled = by_step[len(by_step) // 10 :]
    held_out = percent(run["held_out"][-1][1], beside["held_out"][-1][1])
    return Curve(by_step, max(settled, key=abs), by_step[-1], held_out)


def curves(results: Results, variant: str) -> dict[int, Curve]:
    """Of its runs whose seed a BF16 run has, too, by seed."""
    of_bf16 = runs_of(results, BF16)
    runs = runs_of(results, variant)
    return {seed: curve(run, of_bf16[seed]) for seed, run in runs.items() if seed in of_bf16}


class Spread(NamedTuple):
    """How far apart BF16 runs of several seeds are, in percent of their mean."""

    by_step: list[float]
    end: float
    held_out: float


def spread(results: Results) -> Spread | None:
    """None with fewer than two seeds."""
    runs = list(runs_of(results, BF16).values())
    if len(runs) < 2:
        return None
    at_steps = zip(*(smoothed(run["loss"]) for run in runs), strict=True)
    by_step = [spread_percent(values) for values in at_steps]
    held_out = spread_percent([run["held_out"][-1][1] for run in runs])
    return Spread(by_step, by_step[-1], held_out)


class Means(NamedTuple):
    """FP8 beside BF16: the means of `num_runs` runs each; differences in percent."""

    num_runs: int
    end: float
    held_out: float


def means(results: Results) -> Means | None:
    """Of the seeds that were run twice in both ways; None: there is none."""
    of_bf16, of_fp8 = (
        [runs_of(results, variant) for variant in pair]
        for pair in ((BF16, BF16_AGAIN), (FP8, FP8_AGAIN))
    )
    seeds = set.intersection(*(set(runs) for runs in (*of_bf16, *of_fp8)))
    if not seeds:
        return None
    (end, held_out), (end_of_bf16, held_out_of_bf16) = (
        (
            fmean(smoothed(runs[seed]["loss"])[-1] for runs in twice for seed in seeds),
            fmean(runs[seed]["held_out"][-1][1] for runs in twice for seed in seeds),
        )
        for twice in (of_fp8, of_bf16)
    )
    return Means(2 * len(seeds), percent(end, end_of_bf16), percent(held_out, held_out_of_bf16))


def trained_in_fp8(results: Results) -> list[str]:
    """The variants with a module in FP8."""
    runs = [run for run in results["runs"] if run["options"] is not None]
    return [name for name in variants_of(results) if any(run["variant"] == name for run in runs)]


def kind_of(name: str) -> str:
    """The name of a parameter without its layer: one row for all layers."""
    return re.sub(r"^layers\.\d+\.", "", name).removesuffix(".weight")


def by_kind(values: dict[str, Any]) -> dict[str, list[Any]]:
    """Those of all layers, by kind, in the order of the model."""
    found: dict[str, list[Any]] = {}
    for name, value in values.items():
        found.setdefault(kind_of(name), []).append(value)
    return found
