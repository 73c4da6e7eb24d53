"""What the tests of kernels share: what needs a GPU, and how arguments reach a kernel."""

import gc
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

NUM_SMS = 132  # of an H200
ARCH = "sm_90a"  # of a Hopper GPU
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


on_cpu_and_gpu = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])


def slow(*cases: object) -> list:
    """Cases of a parameter that `make test-gpu-quick` leaves out."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def on_gpu(test):
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


def allocated() -> int:
    """Bytes of all tensors on the GPU; their blocks may be larger, by up to a MiB."""
    gc.collect()
    # Autograd's thread drops what its last backward used when it takes the next one: an empty one.
    empty = torch.empty(0, device="cuda", requires_grad=True)
    (empty * 1).backward(torch.empty_like(empty))
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)


def bytes_of_processes() -> Counter[int]:
    """What each process has of all GPUs, by its id; empty where the driver does not tell.

    What is free of a GPU changes with all that run beside a test.
    """
    ask = "nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"
    lines = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines()
    used: Counter[int] = Counter()
    for pid, mib in (line.split(", ") for line in lines):
        if mib.isdigit():
            used[int(pid)] += int(mib) << 20
    return used


def places_of(device: str) -> list[str]:
    """Where an op runs: what the CPU says is judged beside what a GPU says."""
    return list(dict.fromkeys((device, "cpu")))


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """The devices may differ; any NaN is the same as any other."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    ours, theirs = (x.cpu().contiguous() for x in (ours, theirs))
    if ours.is_floating_point() and ours.itemsize > 1:
        if not torch.equal(ours.isnan(), theirs.isnan()):
            return False
        ours, theirs = (x.masked_fill(x.isnan(), 0.0) for x in (ours, theirs))
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def poison(device: str, *num_bytes: int) -> None:
    """NaN in the memory that the GPU's allocator will hand out in pieces of these sizes."""
    if device != "cpu":
        held = [torch.full((n,), 0xFF, dtype=torch.uint8, device=device) for n in num_bytes]
        del held


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Any wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
