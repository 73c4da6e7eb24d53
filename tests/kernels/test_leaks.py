"""Nothing leaks, however many calls there are: of launchers, without a GPU."""

import ctypes
import sys

import pytest

from moefp8.kernels import jit
from tests.fakes.emulator import FakeDriver
from tests.kernels.leaks import Mix, resident_bytes

MIB = 1 << 20


class IdleLibcuda:
    """It takes all that it is told, and neither does nor remembers anything."""

    def cuLaunchKernelEx(self, *arguments):
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0

    def cuStreamCreate(self, *arguments):
        return 1  # so that no graph is made

    def cuTensorMapEncodeTiled(self, at, dtype, rank, address, *layout):
        return self.cuTensorMapReplaceAddress(at, address)

    def cuTensorMapReplaceAddress(self, at, address):
        ctypes.c_uint64.from_address(at).value = address
        return 0


class IdleDriver(FakeDriver):
    def __init__(self, max_prepared: int) -> None:
        super().__init__(max_prepared=max_prepared)
        self.library = IdleLibcuda()

    def load(self, kernel: jit.Kernel, device_index: int) -> jit.Function:
        return jit.Function(kernel, device_index, ctypes.c_void_p(1), 232448)

    def allocate(self, num_bytes: int, stream: int) -> int:
        return 1 << 20

    def free(self, address: int) -> None:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_is_prepared_does_not_pile_up():
    with jit.using(IdleDriver(max_prepared=100)) as driver:
        mix = Mix("cpu", fresh=0.1)
        mix.fill()
        before = resident_bytes()
        for _ in range(20_000):
            mix.call()
            assert mix.num_kept <= 100
        assert resident_bytes() - before < 8 * MIB
        assert mix.num_forgotten > 10
        assert driver.launched == []
