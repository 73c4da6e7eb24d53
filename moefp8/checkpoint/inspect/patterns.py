"""Match the module names and `re:...` patterns of a config.json, in bounded time."""

import re
from collections.abc import Iterable
from itertools import combinations

from ...system.patterns import MAX_NAME, Deadline, compile_simple


class Modules:
    """names: whole names, or parts of names between dots; compressed-tensors has `re:...` too."""

    def __init__(self, names: Iterable[str]) -> None:
        self.bad: dict[str, str] = {}  # `re:...` -> why it is not matched
        self._names: set[str] = set()
        self._patterns: list[re.Pattern[str]] = []
        self._deadline = Deadline()
        for name in dict.fromkeys(names):
            if not name.startswith("re:"):
                self._names.add(name)
                continue
            try:
                self._deadline.check("the lists are too long")  # to compile one takes a few ms
                self._patterns.append(compile_simple(name[3:]))
            except (ValueError, TimeoutError) as error:
                self.bad[name] = str(error)

    def __contains__(self, module: str) -> bool:
        """Whether module is listed. Raises TimeoutError after 5 s of CPU time in all."""
        if len(module) > MAX_NAME:
            return False
        self._deadline.check("the lists are too long")
        parts = module.split(".")
        spans = combinations(range(len(parts) + 1), 2)
        if any(".".join(parts[first:end]) in self._names for first, end in spans):
            return True
        for pattern in self._patterns:
            self._deadline.check(f"re:{pattern.pattern} and what came before took too long")
            if pattern.match(module):
                return True
        return False
