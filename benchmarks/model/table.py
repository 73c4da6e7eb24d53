"""The tables of whole models, made of `benchmarks/results/model.json`."""

from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import number, table
from benchmarks.model import GOALS, HF_BF16, HF_FP8, PREFILL, TITLES
from benchmarks.peers import OURS
from benchmarks.session import Row

Figures = dict[str, Any]


def tables(results: dict[str, Any]) -> str:
    """Speed beside the others, what was loaded, the plot, and all times folded away."""
    rows = results["rows"]
    where = results.get("gpu", results["cpu"])
    versions = f"torch {results['torch']}, transformers {results['transformers']}"
    parts = [
        _speed(rows),
        f"Whole models of random weights on one {where}: tokens per second of moefp8 as it is "
        "called / in a CUDA graph, and how many times as fast as the others that is. The prefill "
        f"is of {results['prompt']} tokens; a decoding step is one token of each sequence, with a "
        f"static cache of {results['context']}. The last column: how long the MoE blocks take in "
        f"the model over alone, on the same inputs. {_worst(rows)}".rstrip(),
        _loads(rows),
        *_refusals(rows),
        f"![Where the time goes on one {where}](results/model.png)",
        "<details><summary>All times</summary>",
        f"ms of one call as it is called / in a CUDA graph. {where}, {versions}, "
        f"{results['deep_gemm']}; {results['date'][:10]}, commit {results['commit']}.",
        _times(rows),
        "</details>",
    ]
    return "\n\n".join(part for part in parts if part)


def figures_of(row: Row, provider: str, phase: str) -> Figures:
    found: Figures = row["peers"].get(provider, {}).get("phases", {}).get(phase, {})
    return found


def phases_of(row: Row) -> list[str]:
    """Those that any provider ran, in their order."""
    phases = (phase for found in row["peers"].values() for phase in found.get("phases", ()))
    return list(dict.fromkeys(phases))


def ran(rows: list[Row]) -> list[str]:
    """The providers that ran any phase of any model."""
    return [x for x in TITLES if any(row["peers"].get(x, {}).get("phases") for row in rows)]


def speedup(row: Row, provider: str, phase: str, mode: str) -> float | None:
    """How many times as fast as `provider` moefp8 is. mode: one of GOALS."""
    theirs, ours = (figures_of(row, x, phase).get(f"{mode}_ms") for x in (provider, OURS))
    return theirs / ours if theirs and ours else None


def moe_ratio(row: Row, provider: str, phase: str) -> float | None:
    """The time of the MoE blocks in the model over their time alone."""
    figures = figures_of(row, provider, phase)
    return figures["moe_ms"] / figures["moe_alone_ms"] if "moe_ms" in figures else None


def _speed(rows: list[Row]) -> str:
    others = [name for name in ran(rows) if name != OURS]
    lines = []
    for row in rows:
        for phase in phases_of(row):
            ratios = (
                _both(*(speedup(row, other, phase, mode) for mode in GOALS), digits=2)
                for other in others
            )
            moe = number(moe_ratio(row, OURS, phase), 3)
            lines.append([row["title"], _told(phase), _rates(row, OURS, phase), *ratios, moe])
    head = "model", "phase", "moefp8, tokens/s"
    return table([*head, *(f"times as fast as {TITLES[x]}" for x in others), "MoE"], lines)


def _told(phase: str) -> str:
    return phase if phase == PREFILL else phase.replace(" ", ", batch ")


def _both(eager: float | None, graph: float | None, digits: int) -> str:
    return (
        "-"
        if eager is None and graph is None
        else " / ".join(number(x, digits) for x in (eager, graph))
    )


def _rates(row: Row, provider: str, phase: str) -> str:
    figures = figures_of(row, provider, phase)
    times = (figures.get(f"{mode}_ms") for mode in GOALS)
    return _both(*(ms and 1e3 * figures["tokens"] / ms for ms in times), digits=0)


def _worst(rows: list[Row]) -> str:
    """The least speed beside transformers' FP8 path, and the longest that MoE blocks take."""
    speeds = []
    for mode, where in (("eager", "as it is called"), ("graph", "in graphs")):
        cases = _cases(rows, lambda row, phase, mode=mode: speedup(row, HF_FP8, phase, mode))
        if cases:
            value, case = min(cases)
            speeds.append(f"{value:.2f} {where} ({case})")
    told = [f"{', '.join(speeds)}, beside transformers' FP8 path"] if speeds else []
    if cases := _cases(rows, lambda row, phase: moe_ratio(row, OURS, phase)):
        value, case = max(cases)
        told.append(f"{value:.3f} for MoE blocks ({case})")
    return f"At worst it is {'; '.join(told)}." if told else ""


def _cases(rows: list[Row], measure: Any) -> list[tuple[float, str]]:
    found = [
        (measure(row, x), f"{row['title']}, {_told(x)}") for row in rows for x in phases_of(row)
    ]
    return [(value, case) for value, case in found if value is not None]


def _loads(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        for name in (x for x in TITLES if "load_s" in row["peers"].get(x, {})):
            found = row["peers"][name]
            peaks = [figures.get("peak_gib") for figures in found["phases"].values()]
            weights, peak = found.get("weights_gib"), max(filter(None, peaks), default=None)
            load = f"{found['load_s']:.1f}" + (" and dequantized" if name == HF_BF16 else "")
            error = found.get("logits_error")
            cells = number(weights, 1), number(peak, 1), "-" if error is None else f"{error:.1e}"
            lines.append([row["title"], TITLES[name], load, *cells])
    head = "checkpoint", "loaded by", "s", "GiB on the GPU", "at most", "logits off BF16, median"
    return table(head, lines)


def _refusals(rows: list[Row]) -> Iterator[str]:
    """What did not run, and why: a provider, the rest of its phases, or a graph."""
    told: dict[str, None] = {}
    for row in rows:
        for name, found in row["peers"].items():
            who = f"{TITLES[name]} with {row['title']}"
            if "refused" in found:
                told[f"{who} was refused: {found['refused']}"] = None
            if "ended" in found:
                told[f"{who} ended before all was done: {found['ended']}"] = None
            for phase, figures in found.get("phases", {}).items():
                if why := figures.get("graph_refused"):
                    told[f"{who}, {_told(phase)}, has no graph: {why}"] = None
    if told:
        yield "\n".join(f"- {' '.join(each.split())}" for each in told)


def _times(rows: list[Row]) -> str:
    names = ran(rows)

    def cell(row: Row, name: str, phase: str) -> str:
        figures = figures_of(row, name, phase)
        return _both(*(figures.get(f"{mode}_ms") for mode in GOALS), digits=2)

    lines = [
        [row["title"], _told(phase), *(cell(row, name, phase) for name in names)]
        for row in rows
        for phase in phases_of(row)
    ]
    return table(["model", "phase", *(TITLES[name] for name in names)], lines)
