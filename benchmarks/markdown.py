"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [_line(head), "|---" * len(head) + "|", *map(_line, rows)]
    return "\n".join(lines)


def number(value: float | None, digits: int) -> str:
    """The value as text, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
