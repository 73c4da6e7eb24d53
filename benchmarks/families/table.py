"""The table of `docs/families.md`, made of `benchmarks/results/families.json`."""

import re
from typing import Any

from benchmarks import markdown
from benchmarks.families.outcomes import COLUMNS, NOT_THERE, PARTLY, REFUSED, WORKS

TITLES = {
    "convert": "`convert`",
    "FP8Config": "`FP8Config`",
    "quantize, load": "`quantize`, load",
    "save, load": "save, load",
    "transformers' load": "transformers' load",
    "experts_implementation": "`experts_implementation`",
}


def table(results: dict[str, Any]) -> str:
    """One row for each family, then the notes that its cells name."""
    rows: dict[str, dict[str, Any]] = results["families"]
    notes: dict[str, int] = {}
    built = {name: row["cells"] for name, row in rows.items() if "cells" in row}
    cells = [[name, *(_told(x[column], notes) for column in COLUMNS)] for name, x in built.items()]
    lines = [
        f"{len(built)} families of transformers {results['transformers']} with experts, "
        f"{results['date'][:10]}.",
        "",
        markdown.table(["family", *(TITLES[column] for column in COLUMNS)], cells),
    ]
    lines += ["", *(f"{number}. {note}" for note, number in notes.items())]
    left = {name: row["not_built"] for name, row in rows.items() if "cells" not in row}
    lines += [
        "",
        f"Of {len(left)} more no tiny model could be made, or transformers cannot run it in BF16:",
    ]
    lines += [
        f"`{name}` ({_one_line(why)})" + (";" if name != [*left][-1] else ".")
        for name, why in left.items()
    ]
    return "\n".join(lines)


def _told(cell: dict[str, Any], notes: dict[str, int]) -> str:
    outcome = cell["outcome"]
    if outcome == WORKS:
        return WORKS
    number = notes.setdefault(note_of(cell), len(notes) + 1)
    words = {PARTLY: "in part", NOT_THERE: "none"}.get(outcome, outcome)
    if outcome == REFUSED and cell["way_out"]:
        words += ", `skip` works"
    return f"{words} [{number}]"


def note_of(cell: dict[str, Any]) -> str:
    """Why, without what is of one family alone: names, numbers and paths."""
    why = cell["why"]
    if cell["outcome"] == REFUSED and (found := re.search(r"\((\w+)\) (must .*?)(?:;|$)", why)):
        rule = re.sub(r", got \[.*", "", found[2])
        return "Experts " + re.sub(r": on \d+ random.*", "", rule)
    if cell["outcome"] == PARTLY and "experts stay" in why:
        reasons = dict.fromkeys(re.findall(r"\((experts of another make|[^()]*)[^)]*\)", why))
        return f"Experts stay in BF16, with a warning: {'; '.join(reasons)}"
    return re.sub(r"^\d+ more", "Some linears", re.sub(r"/\S+", "", _one_line(why)))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
