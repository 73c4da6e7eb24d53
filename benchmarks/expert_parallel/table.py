"""The tables of experts that GPUs share: speed beside others, times, and the moves alone."""

from typing import Any, NamedTuple

from benchmarks.expert_parallel.peers import HF_BF16, PAIRS, SGLANG
from benchmarks.expert_parallel.providers import EAGER, NCCL_ROWS, ONE, OURS, PROVIDERS
from benchmarks.expert_parallel.worker import COMBINE, DISPATCH
from benchmarks.markdown import number, table
from benchmarks.pages import Results

Row = dict[str, Any]
LEAST_SHARE, TOKENS_OF_MOVES = 0.80, 4096  # of a copy's speed, from so many tokens on


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
        "sizes on the host, or agree there, and are launched by Python. Graphs are compared with "
        f"graphs of `{OURS}`, and what Python launches with `{EAGER}`."
    )
    return "\n\n".join([_speedups(rows), how, _times(rows), MOVES, _moves(rows)])


MOVES = (
    "The moves alone, each beside a copy of as many bytes into the other GPU's memory. A dispatch "
    "quantizes; a combine also sums over ranks, and here does not follow experts' last kernel, "
    "which gives results back itself in a layer."
)


def speedup(row: Row, name: str) -> float | None:
    """Times as fast as a provider; beside one GPU, the throughput of all, times that of one.

    A provider that Python launches is compared with ours without a graph.
    """
    peers = row["peers"]
    theirs = peers.get(name, {}).get("ratio")
    ours = 1.0 if PROVIDERS[name].captures else peers.get(EAGER, {}).get("ratio")
    if theirs is None or ours is None:
        return None
    return float(theirs / ours * (row["ranks"] if name == ONE else 1))


def title_of(name: str) -> str:
    if name == ONE:
        return "throughput, times that of one GPU with all experts"
    how = "both in graphs" if PROVIDERS[name].captures else "both without graphs"
    return f"times as fast as {name} ({how})"


def _speedups(rows: list[Row]) -> str:
    names = NCCL_ROWS, PAIRS, HF_BF16, SGLANG, ONE
    lines = [
        [row["layer"], str(row["tokens"]), *(number(speedup(row, name), 2) for name in names)]
        for row in rows
    ]
    return table(["layer", "tokens", *map(title_of, names)], lines)


def _times(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        times = (number(row["peers"].get(name, {}).get("us"), 1) for name in PROVIDERS)
        lines.append([row["layer"], str(row["tokens"]), *times])
    return table(["layer, us", "tokens", *PROVIDERS], lines)


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
