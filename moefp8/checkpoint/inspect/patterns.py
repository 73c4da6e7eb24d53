"""Match lists of module names that a config.json brings, `re:...` among them, in short time.

A regular expression such as `(a+)+$` can take for ever. An expression is used here if it has few
repeats and none of a group, and so takes less than a second; endless lists meet a deadline, of the
thread's CPU time, so that what else the machine does changes no result.
"""

import re
import time
from collections.abc import Iterable
from itertools import combinations

_MAX_LENGTH = 200
_MAX_REPEATS = 3  # .* at the end, which changes nothing, is not counted
_MAX_BRANCHES = 3  # groups and `?`
_MAX_ALTERNATIVES = 16
_MAX_MODULE = 128
_DEADLINE_S = 5.0
_LAST = re.compile(r"(?<!\\)\.\*\$?$")
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:=!]|\(\?|\)[*+?{]|.", re.DOTALL)
_NESTED = re.compile(r"\[\^?\[|\[.*(?:--|&&|~~|\|\|)", re.DOTALL)  # Python warns of these


class Modules:
    """names: whole names, or parts of names between dots; compressed-tensors has `re:...` too."""

    def __init__(self, names: Iterable[str]) -> None:
        self.bad: dict[str, str] = {}  # `re:...` -> why it is not looked for
        self._names: set[str] = set()
        self._patterns: list[re.Pattern[str]] = []
        self._end = time.thread_time() + _DEADLINE_S
        for name in dict.fromkeys(names):
            if not name.startswith("re:"):
                self._names.add(name)
            elif time.thread_time() > self._end:  # to compile a pattern takes a few ms
                self.bad[name] = "the lists are too long"
            elif problem := _problem(name[3:]):
                self.bad[name] = problem
            else:
                self._patterns.append(re.compile(name[3:]))

    def __contains__(self, module: str) -> bool:
        """Whether module is listed. Raises TimeoutError after 5 s of CPU time in all."""
        if len(module) > _MAX_MODULE:
            return False
        self._check_time("the lists are too long")
        parts = module.split(".")
        spans = combinations(range(len(parts) + 1), 2)
        if any(".".join(parts[first:end]) in self._names for first, end in spans):
            return True
        for pattern in self._patterns:
            self._check_time(f"re:{pattern.pattern} and what came before took too long")
            if pattern.match(module):
                return True
        return False

    def _check_time(self, problem: str) -> None:
        if time.thread_time() > self._end:
            raise TimeoutError(problem)


def _problem(pattern: str) -> str | None:
    """Say why pattern is not tried, or return None."""
    if len(pattern) > _MAX_LENGTH:
        return f"it must have at most {_MAX_LENGTH} characters"
    tokens = _TOKENS.findall(_LAST.sub("", pattern))
    if any(token[0] == ")" and token[1:] in ("*", "+", "{") for token in tokens):
        return "it repeats a group"
    if "(?" in tokens or any(token[0] == "\\" and token[1:].isdigit() for token in tokens):
        return "it has a group of a kind that is not supported, or refers to one"
    if sum(token in ("*", "+", "{") for token in tokens) > _MAX_REPEATS:
        return f"it must have at most {_MAX_REPEATS} repeats"
    if sum(token[0] == "(" or token in ("?", ")?") for token in tokens) > _MAX_BRANCHES:
        return f"it must have at most {_MAX_BRANCHES} groups and question marks"
    if tokens.count("|") > _MAX_ALTERNATIVES:
        return f"it must have at most {_MAX_ALTERNATIVES} choices"
    if any(token in ("[", "[]", "[^]") or _NESTED.match(token) for token in tokens):
        return "it has a set without an end, or one in another"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"it is no regular expression ({error})"
    return None
