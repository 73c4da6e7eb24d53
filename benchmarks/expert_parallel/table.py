"""The tables of experts that GPUs share: goals, times, and the moves alone."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.expert_parallel.peers import PAIRS, SGLANG
from benchmarks.expert_parallel.providers import NCCL_ROWS, ONE, OURS, PROVIDERS
from benchmarks.expert_parallel.worker import COMBINE, DISPATCH
from benchmarks.markdown import number, table
from benchmarks.pages import Results

Row = dict[str, Any]
LEAST_SHARE = 0.80  # of a copy's speed


class Goal(NamedTuple):
    """Times as fast as a provider; throughput of two GPUs, of one with all experts."""

    tokens: int
    against: str
    least: float


GOALS = (
    Goal(16, NCCL_ROWS, 1.5),
    Goal(16, PAIRS, 1.5),
    Goal(128, NCCL_ROWS, 1.5),
    Goal(128, PAIRS, 1.5),
    Goal(4096, NCCL_ROWS, 1.25),
    Goal(4096, PAIRS, 1.25),
    Goal(4096, ONE, 1.85),
)


def tables(results: Results) -> str:
    rows, (ranks,) = results["rows"], {row["ranks"] for row in results["rows"]}
    turns = results["turns"]
    providers = "; ".join(f"`{name}`: {x.about}" for name, x in PROVIDERS.items())
    how = (
        f"{ranks} x {results['gpu']}, driver {results['driver']}, torch {results['torch']}; each "
        f"rank has the tokens named, and gets its own outputs. {turns['rounds']} turns of "
        f"{turns['seconds']:g} s of each, in random order, back to back; the slowest rank counts. "
        f"{providers}. Graphs are replayed of `{ONE}`, `{OURS}` and `{SGLANG}`; the others read "
        "sizes on the host, or agree there, and are launched by Python."
    )
    return "\n\n".join([_goals(rows), how, _times(rows), MOVES, _moves(rows)])


MOVES = (
    "The moves alone, each beside a copy of as many bytes into the other GPU's memory. A dispatch "
    "quantizes; a combine also sums over ranks, and here does not follow experts' last kernel, "
    "which gives results back itself in a layer."
)


def throughput(row: Row, name: str) -> float | None:
    """Times as fast as a provider; beside one GPU, the throughput of all."""
    ratio = row["peers"].get(name, {}).get("ratio")
    return ratio if ratio is None or name != ONE else row["ranks"] * ratio


def verdicts(rows: list[Row]) -> Iterator[tuple[str, str, float, float | None]]:
    """What, which case, what is asked, and what came."""
    for row in rows:
        case = f"{row['layer']}, {row['tokens']} tokens"
        for tokens, against, least in GOALS:
            if tokens == row["tokens"]:
                what = f"throughput of {row['ranks']} GPUs" if against == ONE else f"over {against}"
                yield what, case, least, throughput(row, against)
        for move in (DISPATCH, COMBINE):
            if row["tokens"] >= 4096:
                share = row["moves"][move]["share"]
                yield f"{move}, share of a copy's speed", case, LEAST_SHARE, share


def _goals(rows: list[Row]) -> str:
    lines = [
        [what, case, f"{least:.2f}", f"{came:.2f}", "met" if came >= least else "**missed**"]
        for what, case, least, came in verdicts(rows)
        if came is not None
    ]
    return table(["goal", "case", "asked", "came", ""], lines)


def _times(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        cells = [row["layer"], str(row["tokens"])]
        for name in PROVIDERS:
            found = row["peers"].get(name, {})
            us, ratio = number(found.get("us"), 1), found.get("ratio")
            cells.append(us if name == OURS or ratio is None else f"{us} ({ratio:.2f})")
        lines.append(cells)
    return table(["layer, us (times as long)", "tokens", *PROVIDERS], lines)


def _moves(rows: list[Row]) -> str:
    head = ["layer", "tokens"]
    for move in (DISPATCH, COMBINE):
        head += [f"{move}, MB", "us", "copy, us", "share"]
    lines = []
    for row in rows:
        cells = [row["layer"], str(row["tokens"])]
        for move in (DISPATCH, COMBINE):
            x = row["moves"][move]
            cells += [f"{x['bytes'] / 1e6:.2f}", f"{x['us']:.1f}", f"{x['copy_us']:.1f}"]
            cells.append(f"{x['share']:.2f}")
        lines.append(cells)
    return table(head, lines)
