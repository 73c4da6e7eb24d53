"""Parsers of what is given to a benchmark on its command line."""

import argparse
from collections.abc import Callable, Iterable


def numbers(text: str) -> tuple[int, ...]:
    """Positive ones, such as 1,128."""
    found = tuple(int(number) for number in text.split(","))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be positive numbers")
    return found


def some_of(names: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of some of `names`, with commas between, which gives them in their own order."""
    names = tuple(names)

    def parse(text: str) -> tuple[str, ...]:
        if unknown := set(text.split(",")) - set(names):
            wrong, right = ", ".join(sorted(unknown)), ",".join(names)
            raise argparse.ArgumentTypeError(f"{wrong}: must be of {right}")
        return tuple(name for name in names if name in text.split(","))

    return parse
