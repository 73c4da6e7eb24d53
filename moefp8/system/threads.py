"""Threads and forks: values that are built once, and work that must not be forked."""

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Once(Generic[K, V]):
    """key -> value. Threads that want one key wait for its builder; others are built meanwhile.

    If a builder raises, the key stays unbuilt, and the next thread tries.
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
        """The values that were built so far."""
        return list(self._values.values())

    def clear(self) -> None:
        self._values.clear()


def lock_of_threads_and_forks() -> threading.Lock:
    """A lock that every fork takes too, so that a child never finds it locked.

    Who holds it must not fork.
    """
    lock = threading.Lock()
    if hasattr(os, "register_at_fork"):
        release = lock.release
        os.register_at_fork(before=lock.acquire, after_in_parent=release, after_in_child=release)
    return lock


class ForksWait:
    """A context within which any number of threads can be: forks wait until nobody is.

    Who is within must neither fork nor enter again.
    """

    def __init__(self) -> None:
        self._door = threading.Lock()  # held by a fork, so that nobody enters meanwhile
        self._left = threading.Condition()
        self._num_within = 0
        if hasattr(os, "register_at_fork"):
            release = self._door.release
            os.register_at_fork(before=self._empty, after_in_parent=release, after_in_child=release)

    def __enter__(self) -> None:
        with self._door, self._left:
            self._num_within += 1

    def __exit__(self, *error: object) -> None:
        with self._left:
            self._num_within -= 1
            self._left.notify_all()

    def _empty(self) -> None:
        self._door.acquire()
        with self._left:
            self._left.wait_for(lambda: self._num_within == 0)
