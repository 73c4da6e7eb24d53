"""Figures of a row: times, ratios, and which of them is told first.

A row holds a case and "peers": what each came to, {"us", ...} with pauses between its calls, and
under "without_rest" what `benchmarks.without_rest` gives; or {"refused": why}.
"""

import math
from collections.abc import Iterable
from typing import Any

from benchmarks.peers import OURS

Row = dict[str, Any]

HEADLINE_US = 100.0  # what takes so long is told without rest
PAUSES, WITHOUT_REST = "with pauses", "without rest"


def figures(us: float, flops: int, num_bytes: int, error: float) -> dict[str, Any]:
    return {
        "us": round(us, 3),
        "tflops": round(flops / us / 1e6, 1),
        "gbps": round(num_bytes / us / 1e3, 1),
        "error": float(f"{error:.4g}"),
    }


def of_peer(row: Row, name: str, mode: str = PAUSES) -> dict[str, Any]:
    """What a peer came to in this mode; nothing where it did not run."""
    found: dict[str, Any] = row["peers"].get(name, {})
    return found if mode == PAUSES else found.get("without_rest", {})


def fastest_us(row: Row, names: Iterable[str], mode: str = PAUSES) -> float | None:
    times = [found["us"] for name in names if "us" in (found := of_peer(row, name, mode))]
    return min(times, default=None)


def ratio(row: Row, names: Iterable[str], mode: str = PAUSES, of: str = OURS) -> float | None:
    """How many times as fast as the fastest of `names` `of` is; None where one side did not run.

    Without rest it is of the ratios to ours that each had, round by round, the median.
    """
    key = "us" if mode == PAUSES else "ratio"
    ours = {"ratio": 1.0} if (of, mode) == (OURS, WITHOUT_REST) else of_peer(row, of, mode)
    theirs = [found[key] for name in names if key in (found := of_peer(row, name, mode))]
    return min(theirs) / ours[key] if theirs and key in ours else None


def tflops(row: Row, name: str, mode: str = PAUSES) -> float | None:
    """What a peer computes in a second; None where it did not run in this mode."""
    return speed(row, name, "tflops", mode)


def speed(row: Row, name: str, unit: str, mode: str = PAUSES) -> float | None:
    """What a peer came to: "us", or work that its row tells by another unit.

    None where it did not run in this mode.
    """
    found, with_pauses = of_peer(row, name, mode), of_peer(row, name)
    if "us" not in found:
        return None
    us = float(found["us"])
    return us if unit == "us" else float(with_pauses[unit] * with_pauses["us"] / us)


def told_mode(row: Row) -> str:
    """The mode whose figures are told first: without rest where ours takes 100 us or more."""
    ours = of_peer(row, OURS)
    is_long = "us" in of_peer(row, OURS, WITHOUT_REST) and ours.get("us", 0.0) >= HEADLINE_US
    return WITHOUT_REST if is_long else PAUSES


def told_ratio(row: Row, names: Iterable[str], of: str = OURS) -> float | None:
    return ratio(row, names, told_mode(row), of)


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def is_met(value: float, asked: float, at_most: bool = False) -> bool:
    return value <= asked if at_most else value >= asked


def beside_goal(value: float, asked: float, digits: int, at_most: bool = False) -> str:
    """The value with enough digits to be on its side of the goal: 1.3496, which misses 1.35."""
    while is_met(round(value, digits), asked, at_most) != is_met(value, asked, at_most):
        digits += 1
    return f"{value:.{digits}f}"
