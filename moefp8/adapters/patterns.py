r"""Regular expressions that a stranger wrote, matched in a bounded number of steps.

`re` tries one way through an expression after the other, and `(a+)+x` has more ways than anyone can
wait for. Here all ways are followed at once: a part of an expression takes the set of places where
it may begin to the set of places where it may end. Each part at each place is a step, and steps are
counted.
"""

import math
import re
from collections import deque
from collections.abc import Set
from typing import NamedTuple, TypeAlias

_MAX_DEPTH = 40  # of groups
_STEPS_PER_CHARACTER = 50  # to compile one takes as long
_ATOM = r"""(?:
    \\[^a-zA-Z0-9] | \\[AbBdDsSwWZ] | [^\\^$.|?*+()\[{] | [.^$]
    | \[\^?(?:\\[^a-zA-Z0-9]|\\[dDsSwW]|[^\\\[\]&|~-]|-(?!-))+\]
)"""
_TOKEN = re.compile(
    rf"""
    (?P<literal>{_ATOM}+(?![*+?{{]) | {_ATOM})
    | (?P<repeat>(?:[*+?] | \{{(?P<low>\d{{1,4}})(?P<comma>,)?(?P<high>\d{{1,4}})?\}})\??)
    | (?P<other>\((?!\?) | \(\?[:=!] | \) | \|)
    """,
    re.VERBOSE | re.DOTALL,
)


class Steps:
    """How many steps are left for all expressions of one origin."""

    def __init__(self, limit: int) -> None:
        self.limit = self.left = limit

    def take(self, number: int) -> None:
        """Raises TimeoutError if fewer are left."""
        if number > self.left:
            raise TimeoutError(f"to match them takes more than {self.limit:,} steps")
        self.left -= number


class Pattern:
    r"""A regular expression, with the meaning that it has for `re`.

    It may have literals, `.`, `\d` and its like, sets, `^`, `$`, `\b`, choices, groups, lookaheads
    and repeats. Raises ValueError for any other, such as one that refers to a group, TimeoutError
    if no steps are left.
    """

    def __init__(self, text: str, steps: Steps) -> None:
        steps.take(_STEPS_PER_CHARACTER * len(text))
        self._steps = steps
        tokens = deque(_tokens(text))
        self._part = _choice(tokens, 0)
        if tokens:
            raise ValueError("a ) has no (")

    def ends(self, text: str, starts: Set[int] = frozenset((0,))) -> Set[int]:
        """Where in text a match can end that begins at one of starts. Raises TimeoutError."""
        return _ends(self._part, text, starts, self._steps)


class _Sequence(NamedTuple):
    parts: "list[_Part]"


class _Choice(NamedTuple):
    parts: "list[_Part]"


class _Ahead(NamedTuple):
    part: "_Part"
    is_wanted: bool


class _Repeat(NamedTuple):
    part: "_Part"
    low: int
    high: float


_Part: TypeAlias = re.Pattern[str] | _Sequence | _Choice | _Ahead | _Repeat  # the first has one way


def _ends(part: _Part, text: str, starts: Set[int], steps: Steps) -> Set[int]:
    steps.take(1 + len(starts))
    if isinstance(part, re.Pattern):
        return {match.end() for start in starts if (match := part.match(text, start))}
    if isinstance(part, _Sequence):
        for inner in part.parts:
            if not starts:
                break
            starts = _ends(inner, text, starts, steps)
        return starts
    if isinstance(part, _Choice):
        return frozenset().union(*(_ends(inner, text, starts, steps) for inner in part.parts))
    if isinstance(part, _Ahead):
        return {x for x in starts if bool(_ends(part.part, text, {x}, steps)) == part.is_wanted}
    # A way goes on at most len(text) times, and stays where it is the other times.
    for _ in range(min(part.low, len(text) + 1)):
        starts = _ends(part.part, text, starts, steps)
    ends = new = starts
    for _ in range(int(min(part.high - part.low, len(text)))):
        new = _ends(part.part, text, new, steps) - ends
        if not new:
            break
        ends = ends | new
    return ends


def _tokens(text: str) -> "list[re.Match[str]]":
    tokens, start = [], 0
    while start < len(text):
        match = _TOKEN.match(text, start)
        if match is None:
            raise ValueError(f"{text[start : start + 9]!r} is not supported")
        tokens.append(match)
        start = match.end()
    return tokens


def _choice(tokens: "deque[re.Match[str]]", depth: int) -> _Part:
    if depth > _MAX_DEPTH:
        raise ValueError(f"it has more than {_MAX_DEPTH} groups in one another")
    parts = [_sequence(tokens, depth)]
    while tokens and tokens[0][0] == "|":
        tokens.popleft()
        parts.append(_sequence(tokens, depth))
    return parts[0] if len(parts) == 1 else _Choice(parts)


def _sequence(tokens: "deque[re.Match[str]]", depth: int) -> _Part:
    parts = []
    while tokens and tokens[0][0] not in ("|", ")"):
        parts.append(_with_repeat(_single(tokens, depth), tokens))
    return parts[0] if len(parts) == 1 else _Sequence(parts)


def _single(tokens: "deque[re.Match[str]]", depth: int) -> _Part:
    token = tokens.popleft()
    if token["repeat"]:
        raise ValueError(f"{token[0]} has nothing to repeat")
    if token["literal"]:
        try:
            return re.compile(token[0])
        except re.error as error:  # a range such as [z-a]
            raise ValueError(str(error)) from None
    inner = _choice(tokens, depth + 1)
    if not tokens:
        raise ValueError("a ( has no )")
    tokens.popleft()
    return _Ahead(inner, token[0] == "(?=") if token[0] in ("(?=", "(?!") else inner


def _with_repeat(part: _Part, tokens: "deque[re.Match[str]]") -> _Part:
    if not tokens or not tokens[0]["repeat"]:
        return part
    token = tokens.popleft()
    if token["low"] is None:
        return _Repeat(part, int(token[0][0] == "+"), 1 if token[0][0] == "?" else math.inf)
    low = int(token["low"])
    high = int(token["high"] or low) if token["high"] or not token["comma"] else math.inf
    if high < low:
        raise ValueError(f"{token[0]} has its bounds the wrong way round")
    return _Repeat(part, low, high)
