"""The launch contract, op by op: what is prepared holds no address, and is its thread's own."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.fakes.emulator import Emulator, emulated
from tests.kernels.common.cases import OPS, Sample


@pytest.fixture(params=OPS)
def sample(request) -> Callable[[int], Sample]:
    """A function of a number of tokens, which is called before there is a GPU."""
    return OPS[request.param]


def test_one_prepared_launch_serves_new_addresses_and_streams(sample):
    """It thus serves all layers of one layout. Nothing is loaded or encoded again."""
    samples, other = [sample(5) for _ in range(3)], sample(150)
    found, num_kernels = set(), other.num_kernels
    with emulated() as gpu:
        for stream, each in enumerate((*samples, *samples), 7):
            gpu.stream = stream
            each.check()
            found.add((len(gpu.prepared()), len(gpu.kernels), len(gpu.maps)))
            assert [x.stream for x in gpu.launched[-num_kernels:]] == [stream] * num_kernels
        assert len(found) == len(gpu.prepared()) == 1
        assert len(gpu.kernels) == num_kernels
        assert len(gpu.launched) == 6 * num_kernels
        other.check()
        assert len(gpu.prepared()) == 2


class Scrambling(Emulator):
    """The first word of a tensor map is not its address: only what wrote it finds that."""

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
        samples[0].check()
        num_maps, first = len(gpu.maps), gpu.library.num_replaced
        assert first >= 2 * num_maps  # each was asked about, and patched; equal ones are one
        for each in (samples[0], samples[1], samples[0]):
            each.check()
        assert len(gpu.maps) == num_maps
        # Maps whose addresses are new are patched, and no others.
        assert first < gpu.library.num_replaced <= first + 3 * (first - num_maps)
        assert len(gpu.prepared()) == 1


def test_threads_prepare_each_their_own(sample):
    samples = [sample(5) for _ in range(2)]
    with emulated() as gpu, ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in samples]
        for _ in range(3):
            for thread, each in zip(threads, samples, strict=True):
                thread.submit(each.check).result()
        ours, theirs = (thread.submit(lambda: gpu.prepared().copy()).result() for thread in threads)
        assert len(ours) == 1
        assert ours.keys() == theirs.keys()
        assert not {*map(id, ours.values())} & {*map(id, theirs.values())}
        assert gpu.prepared() == {}


def test_what_is_prepared_is_forgotten_before_it_grows_for_ever(sample):
    samples = [sample(m) for m in (1, 130, 260, 390, 520)]
    with emulated(max_prepared=3) as gpu:
        for i, each in enumerate((*samples, *samples)):
            each.check()
            assert len(gpu.prepared()) == i % 3 + 1
