"""The tables of gradients: speed beside others, then every part, and the memory that steps take."""

from collections.abc import Iterable

from benchmarks.figures import PAUSES, WITHOUT_REST, Row, geomean
from benchmarks.gradient_parts import OF_EXPERTS, PARTS, UNITS, comparisons, gib_of, speed
from benchmarks.markdown import number, table
from benchmarks.pages import Results, told
from benchmarks.session import titles_of

WHAT = (
    "Weights are frozen: gradients are of hidden states and, for experts, of `top_k_weights`. "
    "`transformers, dequantizing` is the path of transformers 5.24 for FP8 weights: rows sorted by "
    "expert, PyTorch's operations between the GEMMs, and a backward that makes BF16 of at most 1 "
    "GiB of weights at a time; where that is less than all, the host waits. Its forward has "
    "moefp8's FP8 GEMM, in place of the kernels that it downloads. `BF16, grouped_mm` is the same "
    "with BF16 weights and `torch.nn.functional.grouped_mm`. moefp8 keeps transposed weights, and "
    "gate and up of each choice in BF16, unless its name says otherwise. Experts with LoRA have "
    "adapters as `add_lora` makes them, and gradients of these, too; BF16 has the same beside its "
    "weights, by grouped products. Before a case is timed, "
    "errors of gradients are seen to be below 0.1."
)


def gradients_tables(results: Results) -> str:
    rows = results["rows"]
    parts = {name: [row for row in rows if row["part"] == name] for name in PARTS}
    tables = [_table_of(name, of_part) for name, of_part in parts.items() if of_part]
    tables += [_memory(name, parts[name]) for name in OF_EXPERTS if parts[name]]
    return "\n\n".join(
        [
            _speeds(rows),
            f"{WHAT} {_how(results)}",
            f"<details><summary>All {len(rows)} cases</summary>",
            *tables,
            "</details>",
        ]
    )


def _how(results: Results) -> str:
    how = "With pauses, L2 flushed before every call: device time. "
    if turns := results.get("turns"):
        how += (
            f"Without rest, behind a slash: {turns['rounds']} turns of {turns['seconds']:g} s of "
            "each, in random order. Ratios are without rest where moefp8 takes 100 us or more, and "
            "then in brackets with pauses. "
        )
    return (
        f"{how}{results['gpu']}, driver {results['driver']}, torch {results['torch']}; "
        f"{results['date'][:10]}, commit {results['commit']}."
    )


def _speeds(rows: Iterable[Row]) -> str:
    lines = []
    for each in comparisons(rows):
        ratios = each.ratios.values()
        figures = f"{geomean(ratios):.3f}", f"{min(ratios):.3f}", each.worst_case
        lines.append([each.part.title, each.title, *figures])
    return table(["", "times as fast as", "geometric mean", "worst", "at"], lines)


def _table_of(name: str, rows: list[Row]) -> str:
    """Speeds of all, and how many times as fast as those that it is compared with ours is."""
    part = PARTS[name]
    titles = titles_of(part.peers, rows)
    compared = [peer for peer in part.goals if peer in titles]
    digits = 1 if part.unit == "us" else 0

    def cell(row: Row, peer: str) -> str:
        with_pauses, without_rest = (speed(row, peer, mode) for mode in (PAUSES, WITHOUT_REST))
        more = "" if without_rest is None else f" / {number(without_rest, digits)}"
        return number(with_pauses, digits) + more

    lines = [
        [
            row["case"],
            *(cell(row, peer) for peer in titles),
            *(told(row, (peer,), 3) for peer in compared),
        ]
        for row in rows
    ]
    ratios = (f"times as fast as {titles[peer]}" for peer in compared)
    return table([f"{part.title}, {UNITS[part.unit]}", *titles.values(), *ratios], lines)


def _memory(name: str, rows: list[Row]) -> str:
    titles = titles_of(PARTS[name].peers, rows)

    def cell(row: Row, peer: str) -> str:
        found = row["peers"].get(peer, {})
        return gib_of(found) if "step_bytes" in found else "-"

    lines = [[row["case"], *(cell(row, peer) for peer in titles)] for row in rows]
    head = f"{PARTS[name].title}: weights + a step at most, GiB"
    return table([head, *titles.values()], lines)
