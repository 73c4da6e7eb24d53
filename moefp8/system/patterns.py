"""Regular expressions that a stranger wrote, matched with names of modules in short time.

An expression such as `(a+)+$` can take `re` for ever. An expression is compiled here if it repeats
no group and has few ways through a name: then a name takes it less than a second. A deadline bounds
a file's expressions together; it counts the thread's CPU time, so that a busy machine changes no
result.
"""

import re
import time
from collections.abc import Sequence
from math import comb, prod

MAX_NAME = 128  # characters of a name that is matched
_MAX_LENGTH = 200
_MAX_REPEATS = 3  # .* at the end, which changes nothing, is not counted
_MAX_WAYS = 1 << 24  # through a name: where each repeat ends, which choices are taken
_DEADLINE_S = 5.0
_LAST = re.compile(r"(?<!\\)\.\*\$?$")
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:=!]|\(\?|\)[*+?{]|.", re.DOTALL)
_NESTED = re.compile(r"\[\^?\[|\[.*(?:--|&&|~~|\|\|)", re.DOTALL)  # Python warns of these


class Deadline:
    """What all expressions of a file may take together."""

    def __init__(self) -> None:
        self._end = time.thread_time() + _DEADLINE_S

    def check(self, problem: str) -> None:
        """Raise TimeoutError, saying problem, once the time is over."""
        if time.thread_time() > self._end:
            raise TimeoutError(problem)


def compile_simple(text: str) -> re.Pattern[str]:
    """The compiled expression. Raises ValueError, which says why, if it could take long."""
    if problem := _problem(text):
        raise ValueError(problem)
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no regular expression ({error})") from None


def _problem(text: str) -> str | None:
    """Say why the expression could take long, or return None."""
    if len(text) > _MAX_LENGTH:
        return f"it must have at most {_MAX_LENGTH} characters"
    tokens = _TOKENS.findall(_LAST.sub("", text))
    if any(token[0] == ")" and token[1:] in ("*", "+", "{") for token in tokens):
        return "it repeats a group"
    if "(?" in tokens or any(token[0] == "\\" and token[1:].isdigit() for token in tokens):
        return "it has a group of a kind that is not supported, or refers to one"
    repeats = sum(token in ("*", "+", "{") for token in tokens)
    if repeats > _MAX_REPEATS:
        return f"it must have at most {_MAX_REPEATS} repeats"
    if comb(MAX_NAME, repeats) * _num_choices(tokens) > _MAX_WAYS:
        return "it has too many choices and question marks"
    if any(token in ("[", "[]", "[^]") or _NESTED.match(token) for token in tokens):
        return "it has a set without an end, or one in another"
    return None


def _num_choices(tokens: Sequence[str]) -> int:
    """In how many ways its choices can be taken, at most: those of groups are independent."""
    closed, opened = [1], [1]
    for token in tokens:
        if token[0] == "(":
            opened.append(1)
        elif token == "|":
            opened[-1] += 1
        elif token[0] == ")" and len(opened) > 1:
            closed.append(opened.pop())
        if token in ("?", ")?"):
            closed.append(2)
    return prod(closed) * prod(opened)
