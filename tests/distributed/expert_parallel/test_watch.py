"""A thread says what a kernel has found, and has ended when the interpreter ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time

atexit.register(lambda: print([x.name for x in threading.enumerate()]))  # runs last

from datetime import timedelta
from types import SimpleNamespace

import torch

from moefp8.distributed.expert_parallel.watch import watch


class Memory:
    error = torch.zeros(4, dtype=torch.int32)


memory, kind = Memory(), int(sys.argv[1])
watch(memory, SimpleNamespace(ranks=[4, 5], timeout=timedelta(seconds=3)))
time.sleep(0.3)
memory.error[1], memory.error[0] = 1, kind
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("kind", "says", "seconds"),
    [
        (0, "", 0),
        (0, "", 1),
        (1, "rank 5 did not come within 3 s", 0),
        (1, "rank 5 did not come within 3 s", 1),
        (2, "rank 5 is at another layer", 1),
        (3, "rank 5 runs two exchanges", 0),
    ],
)
def test_it_says_once_what_has_happened(kind, says, seconds):
    """And does not run when the interpreter ends: inside PyTorch it would abort the process."""
    command = [sys.executable, "-c", PROGRAM, str(kind), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["['MainThread']", ""]
    assert done.stderr.count("ExpertParallel") == (kind > 0)
    assert says in done.stderr
