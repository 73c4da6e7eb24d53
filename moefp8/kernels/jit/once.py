"""Build every value once, whichever threads ask for it."""

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Once(Generic[K, V]):
    """key -> value. Threads that want one key wait for its builder; other keys build meanwhile.

    A builder that raises leaves the key unbuilt, and the next thread tries.
    """

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._new_locks()
        if hasattr(os, "register_at_fork"):
            # A child must not inherit a lock that another thread of its parent held.
            os.register_at_fork(after_in_child=self._new_locks)

    def _new_locks(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[K, threading.Lock] = {}

    def get(self, key: K, build: Callable[[], V]) -> V:
        try:
            return self._values[key]
        except KeyError:
            pass
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._values:
                self._values[key] = build()
            return self._values[key]

    def values(self) -> list[V]:
        """Those built so far."""
        return list(self._values.values())

    def clear(self) -> None:
        self._values.clear()
