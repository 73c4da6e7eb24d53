"""One line on a terminal for a long job: amount, percent, rate, time left."""

import sys
import threading
import time

_SECONDS_BETWEEN = 0.1


class Progress:
    """A context manager, whose `advance` may be called from any thread.

    total: in raw units (bytes, kernels); unit and unit_size: how they are shown (GiB, 2**30).
    shown: None means only where stderr is a terminal. A daemon, which has no stderr, shows nothing.
    """

    def __init__(
        self, label: str, total: int, unit: str = "", unit_size: int = 1, shown: bool | None = None
    ) -> None:
        self.label, self.total, self.unit, self.unit_size = label, total, unit, unit_size
        has_stderr = sys.stderr is not None
        self.shown = has_stderr and (sys.stderr.isatty() if shown is None else shown)
        self.done = 0
        self._lock = threading.Lock()
        self._started = self._next = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self.shown:
            self._write("\n")

    def advance(self, amount: int = 1) -> None:
        with self._lock:
            self.done += amount
            now = time.monotonic()
            if self.shown and now >= self._next:
                self._next = now + _SECONDS_BETWEEN
                self._write()

    def _write(self, end: str = "") -> None:
        seconds = max(time.monotonic() - self._started, 1e-9)
        left = round(seconds * (self.total - self.done) / self.done) if self.done else 0
        done, total, rate = (
            n / self.unit_size for n in (self.done, self.total, self.done / seconds)
        )
        digits = 0 if self.unit_size == 1 else 1
        sys.stderr.write(
            f"\r\x1b[K{self.label} {100 * self.done / max(self.total, 1):3.0f} %  "
            f"{done:.{digits}f}/{total:.{digits}f} {self.unit}  {rate:.1f} {self.unit}/s  "
            f"{left // 60}:{left % 60:02d} left{end}"
        )
        sys.stderr.flush()
