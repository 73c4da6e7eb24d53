"""Where and when a benchmark runs: what every JSON in `benchmarks/results` begins with."""

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch


def circumstances() -> dict[str, str]:
    """date, commit, cpu and torch; where there is a GPU also gpu, driver and cuda.

    The environment variable MOEFP8_COMMIT names the commit where the sources have no git history.
    """
    commit = os.environ.get("MOEFP8_COMMIT") or _output_of("git", "rev-parse", "--short", "HEAD")
    found = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or "unknown",
        "cpu": f"{_cpu_name()}, {os.cpu_count()} CPUs",
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        drivers = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = drivers.partition("\n")[0] or "unknown"
        found["cuda"] = torch.version.cuda or "unknown"
    return found


def require_gpu(benchmark: str) -> None:
    """Exit with one sentence where there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit(
            f"{benchmark} times GPU kernels, and torch finds no CUDA GPU: run it where there is a "
            "Hopper GPU (H100, H200) and a torch built for CUDA"
        )


def _output_of(*command: str) -> str:
    """What a command prints, or nothing where there is no such program."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
