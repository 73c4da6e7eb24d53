"""The launch contract, op by op: what is prepared holds no address, and is its thread's own."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch

from moefp8 import FP8Linear
from moefp8.functional.linear import fp8_linear
from moefp8.kernels.common import fp8
from moefp8.kernels.gemm.config import GroupLayout
from tests.fakes.emulator import Emulator, emulated
from tests.kernels.gemm import cases, grouped_cases


class Sample(NamedTuple):
    """A call with tensors of its own."""

    call: Callable[[], torch.Tensor]
    expected: torch.Tensor


def dense(m: int) -> Sample:
    operands = cases.operands(m, 48, 256, torch.float32)
    return Sample(lambda: cases.run_gemm(*operands), cases.expected_of(*operands))


def grouped(layout: GroupLayout) -> Callable[[int], Sample]:
    def sample(m: int) -> Sample:
        routing = grouped_cases.routing_of(layout, (m, 0, 9))
        made, bounds = grouped_cases.operands(routing, 48, 256), routing.bounds_on()

        def call() -> torch.Tensor:
            grouped_cases.run_op(routing, made, bounds)
            return made.d

        return Sample(call, grouped_cases.expected_of(routing, made))

    return sample


def linear(m: int) -> Sample:
    x, bias = torch.randn(m, 256).bfloat16(), torch.randn(48)
    weight = fp8.quantize_128x128(torch.randn(48, 256), False)
    expected = fp8_linear.overload(x, *weight, bias)
    return Sample(lambda: fp8_linear(x, *weight, bias), expected)


def layer(m: int) -> Sample:
    x, module = torch.randn(m, 256).bfloat16(), FP8Linear(256, 48).requires_grad_(False)
    weights = module.weight, module.weight_scale_inv, module.bias
    return Sample(lambda: module(x), fp8_linear.overload(x, *weights))


OPS = {
    "dense": dense,
    **{x.name.lower(): grouped(x) for x in GroupLayout},
    "linear": linear,
    "layer": layer,
}


@pytest.fixture(params=OPS)
def sample(request) -> Callable[[int], Sample]:
    """Of a number of tokens: made before there is a GPU."""
    return OPS[request.param]


def check(sample: Sample) -> None:
    assert torch.equal(sample.call(), sample.expected)


def test_one_prepared_launch_serves_new_addresses_and_streams(sample):
    """So it serves all layers of one layout. Nothing is chosen, loaded or encoded again."""
    samples, other = [sample(5) for _ in range(3)], sample(150)
    found = []
    with emulated() as gpu:
        for stream, each in enumerate((*samples, *samples), 7):
            gpu.stream = stream
            check(each)
            found.append((len(gpu.prepared()), len(gpu.kernels), len(gpu.maps), len(gpu.chosen)))
            num_kernels = len(gpu.launched) // len(found)
            assert [x.stream for x in gpu.launched[-num_kernels:]] == [stream] * num_kernels
        assert len(set(found)) == len(gpu.prepared()) == 1
        assert len(gpu.kernels) == num_kernels
        assert len(gpu.launched) == 6 * num_kernels
        check(other)
        assert len(gpu.prepared()) == 2


class Scrambling(Emulator):
    """Of a tensor map, the first word is not its address: that is found by what wrote it alone."""

    key, num_replaced = 0x5A5A_5A5A_5A5A, 0

    def _scramble(self, at: int) -> int:
        ctypes.c_uint64.from_address(at).value ^= self.key
        return 0

    def cuTensorMapEncodeTiled(self, at, *arguments):
        super().cuTensorMapEncodeTiled(at, *arguments)
        return self._scramble(at)

    def cuTensorMapReplaceAddress(self, at, address):
        self.num_replaced += 1
        super().cuTensorMapReplaceAddress(at, address)
        return self._scramble(at)

    def maps_at(self, address, count=1):
        maps = super().maps_at(address, count)
        return [x._replace(address=x.address ^ self.key) for x in maps]


def test_maps_that_do_not_begin_with_their_address_are_patched_by_the_driver(sample):
    samples = [sample(5) for _ in range(2)]
    with emulated() as gpu:
        gpu.library.__class__ = Scrambling
        check(samples[0])
        num_maps = len(gpu.maps)
        assert gpu.library.num_replaced == 2 * num_maps  # each was asked about, and patched
        for each in (samples[0], samples[1], samples[0]):
            check(each)
        assert len(gpu.maps) == num_maps
        # Those whose addresses are new, and no others.
        assert 2 * num_maps < gpu.library.num_replaced <= 5 * num_maps
        assert len(gpu.prepared()) == 1


def test_threads_prepare_each_their_own(sample):
    samples = [sample(5) for _ in range(2)]
    with emulated() as gpu, ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in samples]
        for _ in range(3):
            for thread, each in zip(threads, samples, strict=True):
                thread.submit(check, each).result()
        ours, theirs = (thread.submit(lambda: gpu.prepared().copy()).result() for thread in threads)
        assert len(ours) == 1
        assert ours.keys() == theirs.keys()
        assert not {*map(id, ours.values())} & {*map(id, theirs.values())}
        assert gpu.prepared() == {}


def test_what_is_prepared_is_forgotten_before_it_grows_for_ever(sample):
    samples = [sample(m) for m in (1, 130, 260, 390, 520)]
    with emulated(max_prepared=3) as gpu:
        for i, each in enumerate((*samples, *samples)):
            check(each)
            assert len(gpu.prepared()) == i % 3 + 1
