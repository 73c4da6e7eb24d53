"""One line on a terminal for a long job: amount, percent, rate, time left."""

import sys
import threading
import time
from types import TracebackType

_SECONDS_BETWEEN = 0.1


class Progress:
    """Context manager; `advance` may be called from any thread.

    total: in raw units (bytes, kernels); unit and unit_size: how they are shown (GiB, 2**30).
    shown: None means only where stderr is a terminal. Of a daemon, which has no stderr, nothing is.
    """

    def __init__(
        self, label: str, total: int, unit: str = "", unit_size: int = 1, shown: bool | None = None
    ) -> None:
        self.label, self.total, self.unit, self.unit_size = label, total, unit, unit_size
        if sys.stderr is None:
            shown = False
        self.shown = sys.stderr.isatty() if shown is None else shown
        self.done = 0
        self._lock = threading.Lock()
        self._started = self._next = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.shown:
            sys.stderr.write(f"\r\x1b[K{self._line()}\n")
            sys.stderr.flush()

    def advance(self, amount: int = 1) -> None:
        with self._lock:
            self.done += amount
            now = time.monotonic()
            if self.shown and now >= self._next:
                self._next = now + _SECONDS_BETWEEN
                sys.stderr.write(f"\r\x1b[K{self._line()}")
                sys.stderr.flush()

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        left = round(seconds * (self.total - self.done) / self.done) if self.done else 0
        done, total, rate = (
            n / self.unit_size for n in (self.done, self.total, self.done / seconds)
        )
        digits = 0 if self.unit_size == 1 else 1
        return (
            f"{self.label} {100 * self.done / max(self.total, 1):3.0f} %  "
            f"{done:.{digits}f}/{total:.{digits}f} {self.unit}  {rate:.1f} {self.unit}/s  "
            f"{left // 60}:{left % 60:02d} left"
        )
