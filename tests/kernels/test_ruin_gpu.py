"""What ruins a process that uses a GPU, run in one of its own: it gets an error, and no crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import NEEDS_GPU
from tests.kernels import ruin as ruin_cases

pytestmark = [*NEEDS_GPU, pytest.mark.slow]


FULL = ruin_cases.kernels_find_no_memory  # which takes all memory of the GPU from other processes
CASES = [
    pytest.param(case.__name__, marks=[pytest.mark.fuzz] if case == FULL else [])
    for case in ruin_cases.CASES
]


@pytest.mark.parametrize("case", CASES)
def test_it_is_told(case):
    caching = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if "reset" in case else {}
    command = [sys.executable, str(Path(ruin_cases.__file__)), case]
    done = subprocess.run(
        command, env={**os.environ, **caching}, capture_output=True, text=True, timeout=300
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.endswith("done\n")
