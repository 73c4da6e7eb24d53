"""A test fails with words where the code under test takes far too long or waits forever."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

MINUTES_OF_WAITING = 5  # a machine may be busy with other work: this only ends a test that hangs


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after `seconds` of this process's CPU time, or minutes of waiting."""
    waiting = f"waited for {MINUTES_OF_WAITING} minutes"
    with (
        _timer(signal.ITIMER_PROF, signal.SIGPROF, seconds, f"took {seconds} s of CPU time"),
        _timer(signal.ITIMER_REAL, signal.SIGALRM, 60 * MINUTES_OF_WAITING, waiting),
    ):
        yield


@contextmanager
def _timer(which: int, number: int, seconds: float, message: str) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(message)

    before = signal.signal(number, late)
    signal.setitimer(which, seconds)
    try:
        yield
    finally:
        signal.setitimer(which, 0)
        signal.signal(number, before)
