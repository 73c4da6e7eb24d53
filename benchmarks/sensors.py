"""The SM clock and the power of the GPU at hand, as NVIDIA's driver tells them (NVML)."""

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

_CLOCK_SM, _INSTANT_POWER = 1, 186  # NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT
EVERY_SECONDS = 0.01


class Reading(NamedTuple):
    mhz: float
    watts: float


Read = Callable[[], Reading]


class Sensors:
    """Reads every `EVERY_SECONDS` while it is entered; without NVML there are no readings.

    read: gives a reading, or raises `OSError`.
    """

    def __init__(self, read: Read | None = None) -> None:
        self._read = read
        self._seen: list[tuple[float, Reading]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Sensors":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            read = self._read or of_current_gpu()
            while not self._is_over.wait(EVERY_SECONDS):
                self._seen.append((time.perf_counter(), read()))
        except (OSError, AttributeError):  # no driver, or one that does not know what is asked
            return

    def between(self, start: float, end: float) -> dict[str, float]:
        """Means of the readings of that time, by `time.perf_counter`: "mhz" and "watts"."""
        found = [reading for at, reading in list(self._seen) if start <= at <= end]
        if not found:
            return {}
        means = (statistics.fmean(values) for values in zip(*found, strict=True))
        return {name: round(mean) for name, mean in zip(Reading._fields, means, strict=True)}


class _FieldValue(ctypes.Structure):
    """`nvmlFieldValue_t`; `value` is a union, whose unsigned int is asked for."""

    _fields_ = [
        ("field_id", ctypes.c_uint),
        ("scope_id", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("result", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


def of_current_gpu() -> Read:
    """Readings of torch's current GPU; raises OSError where NVML does not give them.

    The power is that of the moment: what `nvmlDeviceGetPowerUsage` gives is a mean of a second.
    """
    nvml, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        if result := getattr(nvml, name)(*arguments):
            raise OSError(f"{name} gave {result}")

    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))

    def read() -> Reading:
        mhz, power = ctypes.c_uint(), _FieldValue(field_id=_INSTANT_POWER)
        call("nvmlDeviceGetClockInfo", device, _CLOCK_SM, ctypes.byref(mhz))
        call("nvmlDeviceGetFieldValues", device, 1, ctypes.byref(power))
        if power.result:
            raise OSError(f"the power gave {power.result}")
        return Reading(mhz.value, (power.value & 0xFFFFFFFF) / 1e3)

    return read
