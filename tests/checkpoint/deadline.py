"""What hangs would hang the whole suite."""

import signal
from contextlib import contextmanager


@contextmanager
def within(seconds: float):
    """TimeoutError after that."""

    def late(*_):
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
