"""On a GPU calls leak nothing, and one that finds no memory leaves nothing behind."""

import gc
import os
import time
from typing import NamedTuple

import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.common.activation import SWIGLU
from moefp8.kernels.gemm.sizes import Sizes
from tests.functional.cases import inputs, run, weights_of
from tests.functional.experts.records import forward_bytes
from tests.gpu import NEEDS_GPU, bytes_of_processes
from tests.kernels.leaks import Mix, resident_bytes
from tests.kernels.ruin import full_memory

pytestmark = [*NEEDS_GPU, pytest.mark.filterwarnings("error:.*portable PyTorch body")]
MIB = 1 << 20


class Usage(NamedTuple):
    """Bytes: resident on the host; on the GPU of tensors, of the allocator, of all else."""

    host: int
    tensors: int
    allocator: int
    driver: int


def usage() -> Usage:
    torch.cuda.synchronize()
    host, allocator = resident_bytes(), torch.cuda.memory_reserved()
    return Usage(host, torch.cuda.memory_allocated(), allocator, bytes_of_process() - allocator)


def bytes_of_process() -> int:
    used = bytes_of_processes()
    if os.getpid() not in used:
        pytest.skip(f"nvidia-smi does not tell what this process uses: {used}")
    return used[os.getpid()]


@pytest.mark.parametrize("num_calls", [20_000, pytest.param(1_000_000, marks=pytest.mark.fuzz)])
def test_calls_leak_nothing(num_calls):
    """They call all ops in turn, on two streams, with ever-new shapes, strides and addresses."""
    most, mix = max(64, num_calls // 400), Mix("cuda", fresh=0.01)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    sample = *inputs(40, 264, 2, 4, "out of range", "cuda"), weights_of(4, 264, 512, "cuda")
    expected = run(*sample)
    with jit.using(jit.Driver(max_prepared=most)):
        mix.fill()
        before, begin = usage(), time.perf_counter()
        for i in range(num_calls):
            if i % 1000 == 0:  # what waits to run is bounded
                torch.cuda.synchronize()
                torch.cuda.set_stream(streams[i // 1000 % 2])
            if i == num_calls // 5:
                before, begin = usage(), time.perf_counter()
            mix.call()
            assert mix.num_kept <= most
        torch.cuda.set_stream(torch.cuda.default_stream())
        after = usage()
        microseconds = (time.perf_counter() - begin) / (0.8 * num_calls) * 1e6
        print(f"{microseconds:.0f} us a call; {before} -> {after}; {mix.num_forgotten} forgotten")
        assert mix.num_forgotten > 1
        assert after.host - before.host < 32 * MIB
        assert after.tensors == before.tensors
        assert after.allocator - before.allocator < 64 * MIB  # two streams, any order of sizes
        assert after.driver - before.driver < 8 * MIB
        assert torch.equal(run(*sample), expected)


# ---- No memory ----


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1024, 1000])  # the latter's weights are copied in each call
def test_without_memory_an_expert_layer_says_so_and_runs_later(size, masked):
    weights = weights_of(8, 2048, size, "cuda")
    arguments = *inputs(12000, 2048, 2, 8, "repeated", "cuda"), weights, SWIGLU, masked
    expected = run(*arguments)
    workspace = forward_bytes(Sizes(12000, 2, 8, 2048, size, masked))
    assert workspace > 64 * MIB
    prepared = [*jit.current_driver().prepared()]
    gc.collect()
    before = torch.cuda.memory_allocated()
    with full_memory(expected.nbytes + 2 * MIB, of_process=True):  # the result alone finds a place
        for _ in range(3):
            with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
                run(*arguments)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert [*jit.current_driver().prepared()] == prepared
    assert torch.equal(run(*arguments), expected)
