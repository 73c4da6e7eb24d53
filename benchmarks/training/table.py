"""The tables of training steps: speed beside others, then every part, and memory of layers."""

from benchmarks import figures
from benchmarks.figures import PAUSES, WITHOUT_REST, Row, of_peer
from benchmarks.gradient_parts import UNITS
from benchmarks.markdown import number, table
from benchmarks.pages import Results
from benchmarks.session import titles_of
from benchmarks.training.goals import GOALS, values_of
from benchmarks.training.parts import LAYERS, PARTS

WHAT = (
    "A step is forward, dX and dW of one micro-batch, with all quantization in it, from the same "
    "inputs and master weights in BF16; gradients go to `.grad`. 128x1 and 128x128 are the blocks "
    "of a linear's inputs in dW (`wgrad`). Weights are quantized once, before the first step, "
    "unless it says *every step*; TransformerEngine is told so by `is_first_microbatch`. Experts "
    "have 0.7 to 1.3 times the tokens that are told each, in multiples of 128; beyond 64 experts "
    "TransformerEngine multiplies them one by one. Layers choose by the same logits in "
    "BF16, moefp8 with `softmax_topk`, BF16 with PyTorch's operations, and SonicMoE with its own; "
    "`BF16, grouped_mm` sorts rows by expert and adds them up by `index_add`. What has "
    "wrong gradients is not timed; SonicMoE, which reads the same weights otherwise, is not "
    "compared. Bytes that autograd keeps are those of all tensors that a forward saves, hidden "
    "states among them and weights not, as KiB a token. A copy is that of the mode in which it is "
    "faster, since some copies of as many bytes are slower without rest."
)
GRAPHS = (
    "Without rest, steps of moefp8, BF16 and SonicMoE are replayed as CUDA graphs, others are "
    "called one by one; a star marks what was called so."
)


def tables(results: Results) -> str:
    rows = results["rows"]
    parts = {name: [row for row in rows if row["part"] == name] for name in PARTS}
    folded = [_table_of(name, of_part) for name, of_part in parts.items() if of_part]
    if parts[LAYERS]:
        folded.append(_memory(parts[LAYERS]))
    return "\n\n".join(
        [
            _speeds(rows),
            f"{WHAT} {_how(results)}",
            f"<details><summary>All {len(rows)} cases</summary>",
            *folded,
            "</details>",
        ]
    )


def _how(results: Results) -> str:
    how = "With pauses, L2 flushed before every call: device time. "
    if turns := results.get("turns"):
        how += (
            f"Without rest, which is told first: {turns['rounds']} turns of {turns['seconds']:g} s "
            f"of each, in random order. {GRAPHS} "
        )
    if missing := results.get("missing"):
        how += f"Not there: {', '.join(sorted(missing))}. "
    if left_out := results.get("left_out"):
        how += f"There was no time for {'; '.join(left_out)}. "
    versions = [f"{name} {version}" for name, version in results["libraries"].items()]
    if (deep_gemm := results["deep_gemm"]) != "missing":
        versions.append(deep_gemm)
    libraries = "".join(f", {version}" for version in versions)
    return (
        f"{how}{results['gpu']}, driver {results['driver']}, torch {results['torch']}{libraries}; "
        f"{results['date'][:10]}, commit {results['commit']}."
    )


def _speeds(rows: list[Row]) -> str:
    lines = []
    for goal in GOALS:
        for row in rows:
            values = values_of(row, goal) if row["part"] == goal.part else {}
            if values:
                cells = [
                    " / ".join(number(x, goal.digits) for x in values.get(name, {}).values()) or "-"
                    for name in (*goal.ours, "")[:2]
                ]
                lines.append([f"{goal.title}: {row['case']}", goal.what, *cells])
    return table(["", "", "128x1, or all: without rest / with pauses", "128x128"], lines)


def _table_of(name: str, rows: list[Row]) -> str:
    """What all came to without rest and with pauses, how fast beside ours, and the host's time."""
    part = PARTS[name]
    titles = titles_of(part.peers, rows)
    digits = 1 if part.unit == "us" else 0

    def cell(row: Row, peer: str) -> str:
        without_rest, with_pauses = (
            figures.speed(row, peer, part.unit, mode) for mode in (WITHOUT_REST, PAUSES)
        )
        if with_pauses is None:
            return "-"
        told = [number(x, digits) for x in (without_rest, with_pauses) if x is not None]
        star = "*" if of_peer(row, peer, WITHOUT_REST).get("eager") else ""
        host = f", host {found:.0f}" if (found := of_peer(row, peer).get("host_us")) else ""
        return star + " / ".join(told) + host

    lines = [[row["case"], *(cell(row, peer) for peer in titles)] for row in rows]
    return table([f"{part.title}, {UNITS[part.unit]}", *titles.values()], lines)


def _memory(rows: list[Row]) -> str:
    titles = titles_of(PARTS[LAYERS].peers, rows)

    def cell(row: Row, peer: str) -> str:
        found = of_peer(row, peer)
        if "step_bytes" not in found:
            return "-"
        kept = found["saved_bytes_per_token"] / 1024
        return f"{found['step_bytes'] / 2**30:.2f} GiB, {kept:.1f} KiB"

    lines = [[row["case"], *(cell(row, peer) for peer in titles)] for row in rows]
    head = "a step beside its weights at most; what autograd keeps of a token"
    return table([head, *titles.values()], lines)
