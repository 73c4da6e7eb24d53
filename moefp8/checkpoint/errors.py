"""The exception of this package, and functions that quote untrusted text in its messages."""

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from safetensors import SafetensorError

_NUM_SHOWN = 10
_MAX_LINE = 800
_MAX_QUOTE = 200

_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 10
_REPR.maxstring = _REPR.maxother = _MAX_QUOTE


class CheckpointError(RuntimeError):
    """A checkpoint is broken, does not fit the model, or could not be read or written.

    The message names keys and files, and says whether the model was touched.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*map(printable, lines))

    def __str__(self) -> str:
        return "\n".join(self.args)


@contextmanager
def failing_as(what: object, failed: str, outcome: str = "") -> Iterator[None]:
    """Turn errors of files and memory into a CheckpointError, `what: failed (reason); outcome`."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, EOFError, RuntimeError, MemoryError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        end = f"; {outcome}" if outcome else ""
        raise CheckpointError(f"{what}: {failed} ({reason}){end}") from error


def printable(text: str, limit: int = _MAX_LINE) -> str:
    """Cut the middle out of a long text; escape control characters and lone surrogates."""
    text = _cut(text, limit)
    if text.isprintable():
        return text
    return _cut("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text), limit)


def quoted(value: object) -> str:
    """Return the repr of a value of JSON, short and printable."""
    return printable(_REPR.repr(value), _MAX_QUOTE)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def raise_if_any(problems: Sequence[str], headline: str) -> None:
    """Raise CheckpointError with a count of problems and the first ten, one sentence each."""
    if not problems:
        return
    lines = [f"{headline} ({len(problems)} problem{'s' * (len(problems) > 1)}):"]
    lines += [f"  - {problem}" for problem in problems[:_NUM_SHOWN]]
    if len(problems) > _NUM_SHOWN:
        lines.append(f"  ... and {len(problems) - _NUM_SHOWN} more")
    raise CheckpointError(*lines)
