"""The dense GEMM's configurations and their cubins: compiled and read, but not run."""

import re
import shutil
import subprocess
from collections.abc import Callable

import cuda.pathfinder
import pytest
import sanitizer_cases
from gemm_cases import KINDS, MS, SHAPES
from gpu_cases import NUM_SMS, assert_arguments_fit
from hypothesis import given
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels import gemm_config, jit
from moefp8.kernels import gemm_launch as room
from moefp8.testing import sizes


def configs(num_sms: int = NUM_SMS) -> list[gemm_config.GemmConfig]:
    """All that are chosen over a broad grid of shapes."""
    found = {gemm_config.choose_config(m, n, k, num_sms): None for m in MS for n, k in SHAPES}
    return list(found)


@pytest.fixture(scope="module")
def cubins(tmp_path_factory) -> dict[gemm_config.GemmConfig, jit.Cubin]:
    """Compiled anew, so that their logs are those of today's compiler."""
    chosen = {c: None for num_sms in (132, 78, 8, 1) for c in configs(num_sms)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEFP8_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        compiled = jit.compile_kernels(
            jit.Kernel(room._SOURCE, c.kernel_name("kNone")) for c in chosen
        )
    return dict(zip(chosen, compiled, strict=True))


def test_every_configuration_compiles_and_spills_nothing(cubins):
    problems = {config: cubin.problems() for config, cubin in cubins.items()}
    assert {config: found for config, found in problems.items() if found} == {}


@given(m=sizes(5000, 1), n=sizes(40_000, 1), k=sizes(20_000, 1), num_sms=st.integers(1, 200))
def test_every_configuration_fits_an_sm(m, n, k, num_sms):
    config = gemm_config.choose_config(m, n, k, num_sms)
    assert config.stages >= 2
    assert config.shared_bytes <= 227 * 1024
    assert config.ctas_per_sm * (config.shared_bytes + 1024) <= 228 * 1024
    assert config.cluster <= 8
    assert config.cols % config.store_cols == 0
    assert config.split <= kernels.ceil_div(kernels.num_blocks(k), config.depth)
    assert config.share == 1  # multicast was nowhere faster
    assert config == gemm_config.choose_config(m, n, k, num_sms)


@pytest.mark.usefixtures("own_cache")
def test_a_bias_makes_nothing_spill(cubins):
    """It comes on top when most registers are in use. One kind for each configuration."""
    some = [
        jit.Kernel(room._SOURCE, config.kernel_name(KINDS[1 + i % 3]))
        for i, config in enumerate(cubins)
    ]
    problems = [cubin.problems() for cubin in jit.compile_kernels(some)]
    assert {k.name: found for k, found in zip(some, problems, strict=True) if found} == {}


@pytest.mark.usefixtures("own_cache")
def test_arguments_lie_in_memory_as_the_kernel_reads_them(tmp_path):
    kernel = jit.Kernel(room._SOURCE, configs()[0].kernel_name("kNone"))
    assert_arguments_fit(room._Arguments, kernel, tmp_path)


@pytest.fixture
def disassemble(tmp_path) -> Callable[[jit.Cubin], str]:
    tool = cuda.pathfinder.find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")

    def run(cubin: jit.Cubin) -> str:
        """Each instruction, and below it the half of its code that says what it waits for."""
        path = tmp_path / "kernel.cubin"
        path.write_bytes(cubin.image)
        command = [tool, "-c", "-hex", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return run


@pytest.fixture(scope="module")
def family_cubins(tmp_path_factory) -> dict[gemm_config.GemmConfig, jit.Cubin]:
    """Of every family, and with every bias."""
    families = list(sanitizer_cases.FAMILIES.values())
    names = [config.kernel_name(KINDS[i % 4]) for i, config in enumerate(families)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEFP8_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        compiled = jit.compile_kernels(jit.Kernel(room._SOURCE, name) for name in names)
    return dict(zip(families, compiled, strict=True))


def test_machine_code_is_what_was_meant(family_cubins, disassemble):
    for config, cubin in family_cubins.items():
        code = disassemble(cubin)
        assert re.search(r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3", code), config
        assert ("UTMALDG.2D.MULTICAST" in code) == (config.share > 1), config
        assert "UTMASTG.2D" in code, config
        assert not re.search(r"MEMBAR\S*\.(GPU|SYS)", code), config


def releases_before_reads(code: str, batches: int) -> int:
    """How many arrivals of consumers there are while reads of the same stage are in flight.

    A load names the scoreboard that it sets in bits 110 to 112 of its code (7: that of a later
    load, since they return in order), and every instruction those that it waits for in bits 116
    to 121. Reads follow the wait for their stage, and of two batches the older one is released.
    """
    instruction = re.compile(r"\*/\s+(\S.*?);\s+/\* 0x\w{16} \*/\s+/\* (0x\w{16}) \*/")
    in_flight: dict[int, int] = {}  # scoreboard -> how many waits for stages there were before it
    found, waits, multiplies = 0, 0, False
    for text, upper in instruction.findall(code):
        control = int(upper, 16) >> 46
        for board in range(6):
            if control >> 6 >> board & 1:
                in_flight.pop(board, None)
        multiplies |= "WARPGROUP.ARRIVE" in text
        if "LDS" in text:
            oldest = min(in_flight.pop(7, waits), in_flight.get(control & 7, waits))
            in_flight[control & 7] = oldest
        elif "SYNCS.PHASECHK" in text:
            waits += 1
        elif re.search("MEMBAR|BAR.SYNC|EXIT", text):
            in_flight.clear()
        elif multiplies and "SYNCS.ARRIVE.TRANS64.A1T0" in text:
            found += any(before + batches - 1 <= waits for before in in_flight.values())
    assert multiplies
    return found


def test_no_stage_is_released_while_it_is_read(cubins, family_cubins, disassemble):
    """TMA may fill it again at once, and no hardware holds it back: see `release` in gemm.cu."""
    for config, cubin in (cubins | family_cubins).items():
        assert releases_before_reads(disassemble(cubin), config.batches) == 0, config


@pytest.mark.usefixtures("own_cache")
def test_without_its_fence_a_release_would_come_too_early(tmp_path, disassemble):
    """That is, the test above sees it."""
    for header in room._SOURCE.parent.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    source, fence = tmp_path / "gemm.cu", "if constexpr (C::kWeightsAreRows) fence_cta();"
    code = room._SOURCE.read_text()
    assert fence in code
    source.write_text(code.replace(fence, ""))
    config = sanitizer_cases.FAMILIES["weights are rows"]
    cubin = jit.compile_kernel(jit.Kernel(source, config.kernel_name("kNone")))
    assert releases_before_reads(disassemble(cubin), config.batches) > 0
