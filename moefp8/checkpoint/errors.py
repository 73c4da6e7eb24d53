"""The one exception of this package, and how a list of problems becomes its message."""

from collections.abc import Sequence

_NUM_SHOWN = 10


class CheckpointError(RuntimeError):
    """A checkpoint is broken, does not fit the model, or could not be read or written.

    The message names keys and files, and says whether the model was touched.
    """


def raise_if_any(problems: Sequence[str], headline: str) -> None:
    """problems: one sentence each. Raises CheckpointError with the first ten and a count."""
    if not problems:
        return
    lines = [f"{headline} ({len(problems)} problem{'s' * (len(problems) > 1)}):"]
    lines += [f"  - {problem}" for problem in problems[:_NUM_SHOWN]]
    if len(problems) > _NUM_SHOWN:
        lines.append(f"  ... and {len(problems) - _NUM_SHOWN} more")
    raise CheckpointError("\n".join(lines))
