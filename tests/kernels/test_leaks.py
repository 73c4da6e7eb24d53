"""Nothing leaks, however many calls there are: of launchers, without a GPU."""

import sys
from collections import deque

import pytest

from moefp8.kernels.gemm import heuristic
from moefp8.kernels.jit import tma
from moefp8.routing import plan_launch as routing_plan_launch
from tests.fakes.emulator import Emulator
from tests.kernels.leaks import LAUNCHERS, Mix, resident_bytes, watch

MIB = 1 << 20
CHOICES = "choose_config", "choose_grouped_config", "choose_experts_configs"
CHOOSE = {name: getattr(heuristic, name) for name in CHOICES}  # before any emulator wraps them


@pytest.fixture
def idle_gpu(gpu, monkeypatch) -> Emulator:
    """It takes all that it is told, and neither does nor remembers anything."""
    gpu.cuLaunchKernelEx = gpu.cuTensorMapEncodeTiled = lambda *arguments: 0
    gpu.kernels = deque(maxlen=0)
    for name, choose in CHOOSE.items():
        monkeypatch.setattr(heuristic, name, choose)
    monkeypatch.setattr(routing_plan_launch, "load", gpu.load)
    monkeypatch.setattr(routing_plan_launch, "current_stream", lambda device_index: 7)
    return gpu


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_is_prepared_does_not_pile_up(idle_gpu, monkeypatch):
    most = 100
    kept, mix = watch(monkeypatch, most), Mix(LAUNCHERS, "cpu", fresh=0.1)
    mix.fill(kept, most)
    before = resident_bytes()
    for _ in range(20_000):
        mix.call()
    grown = resident_bytes() - before
    assert grown < 8 * MIB
    assert all(len(x) <= most and x.num_forgotten > 1 for x in kept)
    assert tma._encode.cache_info().currsize <= 4096
