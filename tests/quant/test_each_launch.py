"""The launcher of `each.cu` and the kernel's own text, without a GPU."""

import re

import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.common.blocks import E4M3
from moefp8.kernels.jit import compile_kernels
from moefp8.kernels.program import Codes, Place, Record, Tensor
from moefp8.quant import each as room
from moefp8.quant.each import quantize_128x128_each_into
from tests import records
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.gpu import ARCH
from tests.quant.both_cases import DTYPES, weights
from tests.quant.each_cases import SHAPES, assert_right, untouched


def kernels_of(dtype: torch.dtype, k: int, *, transposed: bool = True) -> list[jit.Kernel]:
    return list(dict.fromkeys(room.each_kernels(records.TARGET, dtype, k, transposed=transposed)))


KERNELS = [x for dtype in DTYPES for x in kernels_of(dtype, 16)]


@pytest.mark.usefixtures("own_cache")
def test_every_variant_compiles_and_spills_nothing():
    assert len(KERNELS) == 12
    assert kernels_of(torch.float32, 12) == KERNELS[-2:]
    assert kernels_of(torch.float32, 12, transposed=False) == KERNELS[-2:-1]
    for kernel, cubin in zip(KERNELS, compile_kernels(KERNELS, ARCH), strict=True):
        assert cubin.problems() == []
        registers = int(re.findall(r"Used (\d+) registers", cubin.log)[-1])
        if ", true, " in kernel.name:  # five CTAs of an SM, or three of FP32, as in both.cu
            assert registers <= (80 if "kFloat" in kernel.name else 48), kernel.name


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    return cuda_on_cpu.build(KERNELS, tmp_path_factory.mktemp("each"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_text_writes_its_places_and_nothing_else(functions, dtype):
    driver = FakeDriver(library=cuda_on_cpu.OnCpu(functions))

    def check(*shape: int, **options) -> None:
        assert_right(*shape, dtype=dtype, launching=jit.using(driver), **options)

    for shape in SHAPES:
        for with_transposed in (False, True):
            check(*shape, places=[4, 1, 5], with_transposed=with_transposed)
    check(16, 48, places=[0, 2], parts=3)
    check(16, 48, places=[0], shift=3)
    check(16, 48, places=[5, 1, 2, 0], stacked=[3, 1])
    names = {launch.kernel.name for launch in driver.launched}
    assert names == {x.name for x in kernels_of(dtype, 16)}


def test_launches_of_one_layout_are_prepared_once():
    driver = FakeDriver()
    assert_right(16, 48, places=[4, 1], repeats=2, launching=jit.using(driver))
    assert_right(16, 48, places=[0, 5], launching=jit.using(driver))
    assert len(driver.prepared()) == 1
    assert len(driver.launched) == 3
    launch = driver.launched[0]
    assert launch.kernel.name == "each_kernel<Input::kBFloat16, true, true>"
    assert (launch.grid, launch.block, launch.programmatic) == (2, 256, False)


def test_many_matrices_are_few_launches():
    places = torch.randperm(600)[:514].tolist()
    driver = FakeDriver()
    assert_right(2, 8, places=places, stack=600, launching=jit.using(driver))
    assert [launch.grid for launch in driver.launched] == [172, 172, 170]


def test_nothing_is_launched_for_nothing():
    made = untouched(2, 2, 4, 8)
    with jit.using(FakeDriver()) as driver:
        quantize_128x128_each_into(*made, 2, [], [])
    assert driver.launched == []


def test_more_tiles_than_a_kernel_counts_are_refused():
    w = Place("w")
    data = Tensor((1, 1, 2**31), (2**31, 2**31, 1), E4M3, w)
    with pytest.raises(ValueError, match=r"got 16777216 tiles of \[1, 2147483648\]"):
        room.describe_each(
            Record(records.TARGET, ("w",)),
            [w],
            torch.bfloat16,
            [],
            Codes(data, data),
            None,
            1,
            vectorized=False,
        )


def test_places_reach_the_kernel_four_to_a_word():
    assert room.words_of([1, 2, 3, 65535, 5]) == (0xFFFF_0003_0002_0001, 5)
    assert room.words_of([]) == ()
    made = untouched(300, 1, 1, 8)
    with jit.using(FakeDriver()) as driver:
        quantize_128x128_each_into(*made, 1, [weights(1, 8), weights(1, 8)], [299, 256])
    assert driver.launched[0].arguments.places[0] == 256 << 16 | 299
