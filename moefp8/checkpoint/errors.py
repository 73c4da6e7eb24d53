"""The one exception of this package, and how its message quotes what others wrote."""

import reprlib
from collections.abc import Sequence

_NUM_SHOWN = 10
_MAX_LINE = 800
_MAX_QUOTE = 200

_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 10
_REPR.maxstring = _REPR.maxother = _MAX_QUOTE


class CheckpointError(RuntimeError):
    """A checkpoint is broken, does not fit the model, or could not be read or written.

    The message names keys and files, and says whether the model was touched. It is made of lines,
    each cut in its middle if it is long, and without what a terminal would obey.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*map(printable, lines))

    def __str__(self) -> str:
        return "\n".join(self.args)


def printable(text: str, limit: int = _MAX_LINE) -> str:
    """At most limit characters of text, from its two ends; control characters, line ends, lone
    surrogates and such are escaped."""
    text = _cut(text, limit)
    if text.isprintable():
        return text
    return _cut("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text), limit)


def quoted(value: object) -> str:
    """The repr of what JSON gave, as a message can hold it."""
    return printable(_REPR.repr(value), _MAX_QUOTE)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def raise_if_any(problems: Sequence[str], headline: str) -> None:
    """problems: one sentence each. Raises CheckpointError with the first ten and a count."""
    if not problems:
        return
    lines = [f"{headline} ({len(problems)} problem{'s' * (len(problems) > 1)}):"]
    lines += [f"  - {problem}" for problem in problems[:_NUM_SHOWN]]
    if len(problems) > _NUM_SHOWN:
        lines.append(f"  ... and {len(problems) - _NUM_SHOWN} more")
    raise CheckpointError(*lines)
