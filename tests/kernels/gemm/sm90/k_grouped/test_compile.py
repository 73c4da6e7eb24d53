"""The cubins of `k_grouped.cu`: compiled and read, but not run; and which of them there are."""

import itertools
import re
from collections.abc import Hashable

import pytest

from moefp8.kernels import jit
from moefp8.kernels.gemm.sm90.config import MAX_SHARED_BYTES
from moefp8.kernels.gemm.sm90.k_grouped.config import KGroupedConfig, Output, choose_config
from moefp8.kernels.gemm.sm90.k_grouped.launch import kernel_of
from tests.gpu import ARCH
from tests.kernels import nvdisasm
from tests.kernels.gemm.sm90.test_compile import releases_before_reads
from tests.sampling import sample


def all_configs() -> list[KGroupedConfig]:
    """Whatever `choose_config` can give."""
    flags = (False, True), (False, True)
    options = itertools.product((1, 200), (1, 128, 129, 5000), Output, *flags)
    found = (choose_config(m, n, x, blocks_b=b, d_fits=fits) for m, n, x, b, fits in options)
    return list(dict.fromkeys(found))


def sampled() -> list[KGroupedConfig]:
    """Every output on either way, and every kind of b once; they take 2 s each to compile."""

    def axes(x: KGroupedConfig) -> tuple[Hashable, ...]:
        return (x.output, x.stages_output), (x.blocks_b, x.multicast)

    return sample(all_configs(), axes, 1)


@pytest.fixture(scope="module")
def cubins(tmp_path_factory) -> dict[KGroupedConfig, jit.Cubin]:
    """Compiled anew, so that the logs are those of today's compiler."""
    configs = sampled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEFP8_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        found = jit.compile_kernels(map(kernel_of, configs), ARCH)
    return dict(zip(configs, found, strict=True))


@pytest.fixture(scope="module")
def codes(cubins, tmp_path_factory) -> dict[KGroupedConfig, str]:
    if not nvdisasm.is_installed():
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    images = [cubin.image for cubin in cubins.values()]
    texts = nvdisasm.texts_of(images, tmp_path_factory.mktemp("cubins"))
    return dict(zip(cubins, texts, strict=True))


def test_every_configuration_compiles_and_spills_nothing(cubins):
    problems = {config: cubin.problems() for config, cubin in cubins.items()}
    assert {config: found for config, found in problems.items() if found} == {}


def test_machine_code_is_what_was_meant(codes):
    for config, code in codes.items():
        assert re.search(rf"QGMMA\.64x{config.tile_n}x32\.F32\.E4M3\.E4M3", code), config
        assert set(re.findall(r"UTMALDG\.(\dD)", code)) == {"2D", "3D"}, config
        assert ("UTMALDG.3D.MULTICAST" in code) == (config.multicast > 1), config
        adds = config.output == Output.ACCUMULATE
        leaves = {"UTMAREDG.3D" if adds else "UTMASTG.3D"} if config.stages_output else set()
        assert set(re.findall(r"UTMA(?:STG|REDG)\.\dD", code)) == leaves, config
        assert bool(re.search(r"\bRED\S*\.ADD", code)) == (adds and not config.stages_output), (
            config
        )
        assert not re.search(r"MEMBAR\S*\.(GPU|SYS)", code), config
        before, _ = code.split("ACQBULK")
        # Nothing is read before the previous kernel ends, which may write all of it.
        assert not re.search(r"UTMALDG|\bLDG", before), config


def test_no_stage_is_released_while_it_is_read(codes):
    """See `release`: TMA may fill it again at once, and no hardware holds it back."""
    for config, code in codes.items():
        assert releases_before_reads(code) == 0, config


@pytest.mark.parametrize("output", Output)
@pytest.mark.parametrize("blocks_b", [False, True])
def test_a_configuration_holds_what_the_kernel_asks(output, blocks_b):
    for n, fits in itertools.product((1, 128, 129, 4096), (False, True)):
        config = choose_config(300, n, output, blocks_b=blocks_b, d_fits=fits)
        assert config.shared_bytes <= MAX_SHARED_BYTES
        assert config.stages >= 3
        assert config.stages_output == fits
        assert config.multicast == (2 if blocks_b and n > 128 else 1)
        assert config.threads == 384
        if blocks_b:  # a tile of columns has one scale
            assert 128 % config.tile_n == 0
