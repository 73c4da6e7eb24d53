"""What the pages of benchmarks beside peers share: their form, and figures of both modes."""

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.figures import PAUSES, WITHOUT_REST, Row, of_peer, ratio, told_mode
from benchmarks.markdown import number, table
from benchmarks.peers import OURS
from benchmarks.without_rest import ROUNDS, SECONDS

Results = dict[str, Any]  # a file in `benchmarks/results`


def how_without_rest(results: Results) -> str:
    turns = results.get("turns", {"rounds": ROUNDS, "seconds": SECONDS, "settling_seconds": 0})
    behind = f", behind {turns['settling_seconds']:g} s of them" * (turns["settling_seconds"] > 0)
    return (
        f"Without rest: calls back to back on operands that no cache holds, {turns['rounds']} "
        f"turns of {turns['seconds']:g} s for each peer in random order{behind}. Time of a call in "
        "us, how many times as long as ours that is (median over rounds, least to most), SM clock "
        "and power of the GPU."
    )


def where(results: Results) -> str:
    return (
        f"{results['gpu']}, driver {results['driver']}, torch {results['torch']}, "
        f"{results['deep_gemm']}; {results['date'][:10]}, commit {results['commit']}."
    )


def page(
    results: Results,
    name: str,
    *,
    speedups: str,
    told: str,
    plot: str,
    cases: str,
    how: str,
    times: str,
    without_rest: str,
) -> str:
    """Speedups and what they are, the plot, and all times folded away: those with pauses first."""
    parts = [
        speedups,
        told,
        f"![{plot} on one {results['gpu']}](results/{name}.png)",
        f"<details><summary>All {len(results['rows'])} {cases}</summary>",
        f"{how} {where(results)}",
        times,
        *((how_without_rest(results), without_rest) if without_rest else ()),
        "</details>",
    ]
    return "\n\n".join(parts)


def times_without_rest(
    rows: list[Row],
    head: Iterable[str],
    cells_of: Callable[[Row], list[str]],
    titles: dict[str, str],
) -> str:
    """A table of the rows that were timed without rest, or nothing."""

    def cell(row: Row, name: str) -> str:
        found = of_peer(row, name, WITHOUT_REST)
        if "us" not in found:
            return "-"
        parts = [f"{found['us']:.1f}"]
        if "ratio" in found:
            spread = f"({found['least']:.3f} to {found['most']:.3f})"
            parts.append(f"{found['ratio']:.3f} {spread}")
        if "mhz" in found:
            parts.append(f"{found['mhz']} MHz, {found['watts']} W")
        return ", ".join(parts)

    rows = [row for row in rows if of_peer(row, OURS, WITHOUT_REST)]
    titles = {
        name: title
        for name, title in titles.items()
        if any(of_peer(row, name, WITHOUT_REST) for row in rows)
    }
    lines = [[*cells_of(row), *(cell(row, name) for name in titles)] for row in rows]
    return table([*head, *titles.values()], lines) if lines else ""


def told(row: Row, names: Iterable[str], digits: int, of: str = OURS) -> str:
    """The ratio that is told first, and in brackets that with pauses if it is another."""
    names, mode = list(names), told_mode(row)
    with_pauses = number(ratio(row, names, PAUSES, of), digits)
    if mode == PAUSES or with_pauses == "-":
        return with_pauses
    return f"{number(ratio(row, names, mode, of), digits)} ({with_pauses})"


def told_by(rows: Iterable[Row]) -> str:
    """What the brackets of `told` mean, if there are any."""
    if all(told_mode(row) == PAUSES for row in rows):
        return ""
    return "What takes 100 us or more is told without rest, and in brackets with pauses. "


def listed(values: dict[str, float], form: str) -> str:
    return ", ".join(f"{title} {value:{form}}" for title, value in values.items())
