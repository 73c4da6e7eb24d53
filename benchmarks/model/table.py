"""The tables of whole models, made of `benchmarks/results/model.json`."""

from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import number, table
from benchmarks.model import HF_BF16, MODES, PREFILL, TITLES
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
        f"Whole models of random weights on one {where}: tokens per second of moefp8, and how many "
        f"times as fast as the others that is, each {' / '.join(MODES.values())}. The prefill is "
        f"of {results['prompt']} tokens. Decoding as it is called is `model.generate`, which "
        "chooses its cache; in graphs it is `DecodingGraphs`, and compiled `DecodingGraphs(..., "
        f"compile=True)`, with a static cache of {results['context']} that is at least half full, "
        "for all of them. BF16 experts run by the faster of transformers' two ways in graphs, and "
        "by the one that `generate` takes as it is called. The last column: how long the MoE "
        f"blocks take in the model over alone, on the same inputs. {_worst(rows)}".rstrip(),
        _compiling(rows),
        _loads(rows),
        *_refusals(rows),
        f"![Where the time goes on one {where}](results/model.png)",
        "<details><summary>All times</summary>",
        f"ms of a prefill or of one token of each sequence, {' / '.join(MODES.values())}. "
        f"{where}, {versions}, "
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
    """How many times as fast as `provider` moefp8 is. mode: one of MODES."""
    theirs, ours = (figures_of(row, x, phase).get(f"{mode}_ms") for x in (provider, OURS))
    return theirs / ours if theirs and ours else None


def fastest_ms(row: Row, provider: str, phase: str) -> float | None:
    """The time of the fastest mode."""
    figures = figures_of(row, provider, phase)
    return min((figures[f"{mode}_ms"] for mode in MODES if f"{mode}_ms" in figures), default=None)


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
                _each([speedup(row, other, phase, mode) for mode in modes_of(phase)], digits=2)
                for other in others
            )
            moe = number(moe_ratio(row, OURS, phase), 3)
            lines.append([row["title"], _told(phase), _rates(row, OURS, phase), *ratios, moe])
    head = "model", "phase", "moefp8, tokens/s"
    return table([*head, *(f"times as fast as {TITLES[x]}" for x in others), "MoE"], lines)


def _told(phase: str) -> str:
    return phase if phase == PREFILL else phase.replace(" ", ", batch ")


def modes_of(phase: str) -> list[str]:
    """A prefill is not compiled."""
    return [mode for mode in MODES if phase != PREFILL or mode != "compiled"]


def _each(values: list[float | None], digits: int) -> str:
    """One number for each mode, or "-" if there is none at all."""
    has_any = any(x is not None for x in values)
    return " / ".join(number(x, digits) for x in values) if has_any else "-"


def _rates(row: Row, provider: str, phase: str) -> str:
    figures = figures_of(row, provider, phase)
    times = (figures.get(f"{mode}_ms") for mode in modes_of(phase))
    return _each([ms and 1e3 * figures["tokens"] / ms for ms in times], digits=0)


def _worst(rows: list[Row]) -> str:
    """The least speed beside each of the others, and the longest that MoE blocks take."""
    sentences = []
    for other in (name for name in ran(rows) if name != OURS):
        speeds = []
        for mode, where in MODES.items():
            cases = _cases(rows, lambda row, phase, x=other, y=mode: speedup(row, x, phase, y))
            if cases:
                value, case = min(cases)
                speeds.append(f"{value:.2f} {where} ({case})")
        if speeds:
            sentences.append(f"{', '.join(speeds)}, beside {TITLES[other]}")
    if cases := _cases(rows, lambda row, phase: moe_ratio(row, OURS, phase)):
        value, case = max(cases)
        sentences.append(f"{value:.3f} for MoE blocks ({case})")
    return f"At worst it is {'; '.join(sentences)}." if sentences else ""


def _compiling(rows: list[Row]) -> str:
    """How long the first compiled call takes."""
    seconds = [
        figures_of(row, OURS, phase).get("compile_s") for row in rows for phase in phases_of(row)
    ]
    known = [x for x in seconds if x is not None]
    if not known:
        return ""
    return (
        f"The first compiled call of a number of sequences takes {min(known):.0f} to "
        f"{max(known):.0f} s."
    )


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
                if why := figures.get("eager_refused"):
                    told[f"{who}, {_told(phase)}, does not run as it is called: {why}"] = None
                if why := figures.get("graph_refused"):
                    told[f"{who}, {_told(phase)}, has no graph: {why}"] = None
                if why := figures.get("compiled_refused"):
                    told[f"{who}, {_told(phase)}, does not compile: {why}"] = None
    if told:
        yield "\n".join(f"- {' '.join(each.split())}" for each in told)


def _times(rows: list[Row]) -> str:
    names = ran(rows)

    def cell(row: Row, name: str, phase: str) -> str:
        figures = figures_of(row, name, phase)
        return _each([figures.get(f"{mode}_ms") for mode in modes_of(phase)], digits=2)

    lines = [
        [row["title"], _told(phase), *(cell(row, name, phase) for name in names)]
        for row in rows
        for phase in phases_of(row)
    ]
    return table(["model", "phase", *(TITLES[name] for name in names)], lines)
