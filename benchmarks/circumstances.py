"""Where and when a benchmark ran: what every JSON in `benchmarks/results` begins with."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch


def circumstances() -> dict[str, str]:
    """date, commit, cpu and torch."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or "unknown",
        "cpu": f"{_cpu_name()}, {os.cpu_count()} CPUs",
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
