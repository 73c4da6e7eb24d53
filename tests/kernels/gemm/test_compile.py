"""The GEMMs' configurations and their cubins: compiled and read, but not run."""

import itertools
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import cuda.pathfinder
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels import jit
from moefp8.kernels.gemm import config as gemm_config
from moefp8.kernels.gemm import heuristic
from moefp8.kernels.gemm import launch as gemm_plan
from moefp8.kernels.gemm.config import GroupLayout
from moefp8.testing import sizes
from tests.functional.cases import DOWN_FAMILIES, GATE_UP_FAMILIES
from tests.gpu import NUM_SMS, assert_arguments_fit
from tests.kernels import sanitizer as sanitizer_cases
from tests.kernels.gemm.cases import BIAS_NAMES, MS, SHAPES


def configs() -> list[gemm_config.GemmConfig]:
    """All that may be chosen for some of these M, and any N and K."""
    some = (*MS, 9, 17, 25, 32, 40, 72, 80, 88, 104, 112, 120)
    all_of_them = (config for m in some for config in heuristic.candidates(m))
    filled = dict.fromkeys(map(gemm_config.with_most_stages, all_of_them))
    return [config for config in filled if gemm_config.is_possible(config, 1 << 20)]


def grouped_configs() -> list[gemm_config.GemmConfig]:
    """Some of those that are chosen, and every family."""
    some = (*MS, 9, 17, 25, 32, 40, 72, 80, 88, 104, 112, 120)
    asked = itertools.product(some, (1, 8, 32, 256), SHAPES)
    choose = heuristic.choose_grouped_config
    chosen = (choose(m, max(128, m), g, *n_k, NUM_SMS) for m, g, n_k in asked)
    return list(dict.fromkeys((*chosen, *sanitizer_cases.GROUPED_FAMILIES.values())))


EXPERTS = {  # E, k, H, I
    "DeepSeek-V3": (256, 8, 7168, 2048),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Mixtral-8x7B": (8, 2, 4096, 14336),
}


def experts_configs() -> list[gemm_config.GemmConfig]:
    """All that are chosen for gate and up, and for down."""
    pairs = (
        heuristic.choose_experts_configs(load, groups, h, i, num_sms)
        for e, k, h, i in EXPERTS.values()
        for load, groups, num_sms in itertools.product(range(1, 4097), (1, k, e), (1, NUM_SMS))
    )
    return list(dict.fromkeys(itertools.chain.from_iterable(dict.fromkeys(pairs))))


class Variant(NamedTuple):
    config: gemm_config.GemmConfig
    bias: str = "kNone"
    layout: GroupLayout | None = None

    def kernel(self, source: Path = gemm_plan.SOURCE) -> jit.Kernel:
        name = self.config.kernel_name(self.bias, self.layout)
        return jit.Kernel(source, name, self.config.interleaving)


Cubins = dict[Variant, jit.Cubin]


def compiled(folder: Path, variants: list[Variant]) -> Cubins:
    """Anew, so that the logs are those of today's compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEFP8_CACHE_DIR", str(folder))
        cubins = jit.compile_kernels(variant.kernel() for variant in variants)
    return dict(zip(variants, cubins, strict=True))


@pytest.fixture(scope="module")
def cubins(tmp_path_factory) -> Cubins:
    return compiled(tmp_path_factory.mktemp("cache"), [Variant(config) for config in configs()])


@pytest.fixture(scope="module")
def cubins_with_bias(tmp_path_factory) -> Cubins:
    """It comes on top when most registers are in use. One of them for each configuration."""
    pairs = zip(configs(), itertools.cycle(BIAS_NAMES[1:]), strict=False)
    return compiled(tmp_path_factory.mktemp("cache"), list(itertools.starmap(Variant, pairs)))


@pytest.fixture(scope="module")
def grouped_cubins(tmp_path_factory) -> Cubins:
    """All kinds of every family, and one of each other configuration."""
    families = sanitizer_cases.GROUPED_FAMILIES.values()
    pairs = [*zip(grouped_configs(), itertools.cycle(GroupLayout), strict=False)]
    pairs += itertools.product(families, GroupLayout)
    variants = [Variant(config, layout=layout) for config, layout in dict.fromkeys(pairs)]
    return compiled(tmp_path_factory.mktemp("cache"), variants)


@pytest.fixture(scope="module")
def experts_cubins(tmp_path_factory) -> Cubins:
    """As the routed experts launch them: gate and up of both kinds, all else of one."""
    kinds, chosen = (GroupLayout.OFFSETS, GroupLayout.MASKED), experts_configs()
    others = dict.fromkeys((*chosen, *GATE_UP_FAMILIES.values()))
    pairs = [*itertools.product((x for x in chosen if x.gate_up), kinds)]
    pairs += zip(others, itertools.cycle(kinds), strict=False)
    variants = [Variant(config, layout=layout) for config, layout in dict.fromkeys(pairs)]
    return compiled(tmp_path_factory.mktemp("cache"), variants)


@pytest.mark.parametrize("which", ["cubins", "grouped_cubins"])
def test_every_configuration_compiles_and_spills_nothing(which, request):
    problems = {x: cubin.problems() for x, cubin in request.getfixturevalue(which).items()}
    assert {variant: found for variant, found in problems.items() if found} == {}


def test_experts_compile_for_every_load_and_spill_nothing(experts_cubins):
    problems = {x: cubin.problems() for x, cubin in experts_cubins.items()}
    assert {variant: found for variant, found in problems.items() if found} == {}


@given(
    tokens=sizes(100_000, 1),
    num_groups=st.integers(1, 300),
    h=sizes(20_000, 1),
    i=sizes(20_000, 1),
    num_sms=st.integers(1, 200),
)
def test_every_configuration_of_experts_fits_an_sm(tokens, num_groups, h, i, num_sms):
    both = heuristic.choose_experts_configs(tokens, num_groups, h, i, num_sms)
    assert [config.gate_up for config in both] == [True, False]
    for config in both:
        assert config.grouped
        assert config.split_k == 1
        assert config.stages >= 2
        assert config.ctas_per_sm * (config.shared_bytes + 1024) <= 228 * 1024
        assert config.wgmma_n % config.store_n == 0
        assert config.cluster <= min(2, num_sms)
        assert config in ALL_OF_EXPERTS
    gate_up, _ = both
    assert gate_up.cluster * gate_up.outputs == 128  # of each token, what has one scale


ALL_OF_EXPERTS = frozenset(experts_configs())


def test_families_hold_every_configuration_of_experts():
    families = {*GATE_UP_FAMILIES.values(), *DOWN_FAMILIES.values()}
    assert families >= ALL_OF_EXPERTS
    assert set(DOWN_FAMILIES.values()) <= ALL_OF_EXPERTS


@given(m=sizes(5000, 1), n=sizes(40_000, 1), k=sizes(20_000, 1), num_sms=st.integers(1, 200))
def test_every_configuration_fits_an_sm(m, n, k, num_sms):
    config = heuristic.choose_config(m, n, k, num_sms)
    assert config.stages >= 2
    assert config.shared_bytes <= 227 * 1024
    assert config.ctas_per_sm * (config.shared_bytes + 1024) <= 228 * 1024
    assert config.cluster <= 8
    assert config.wgmma_n % config.store_n == 0
    assert config.split_k <= kernels.ceil_div(kernels.num_blocks(k), config.k_blocks_per_stage)
    assert config.multicast == 1  # multicast was nowhere faster
    assert config == heuristic.choose_config(m, n, k, num_sms)


@given(
    tokens=sizes(5000, 1),
    limit=sizes(5000, 1),
    num_groups=st.integers(1, 300),
    n=sizes(40_000, 1),
    k=sizes(20_000, 1),
    num_sms=st.integers(1, 200),
)
def test_every_grouped_configuration_fits_an_sm(tokens, limit, num_groups, n, k, num_sms):
    shape = tokens, max(tokens, limit), num_groups, n, k, num_sms
    config = heuristic.choose_grouped_config(*shape)
    assert config.grouped
    assert config.split_k == 1
    assert config.stages >= 2
    assert config.shared_bytes <= 227 * 1024
    assert config.ctas_per_sm * (config.shared_bytes + 1024) <= 228 * 1024
    assert config.wgmma_n % config.store_n == 0
    assert config.cluster <= num_sms
    assert config == heuristic.choose_grouped_config(*shape)


@given(weights=st.integers(1, 32).map(lambda i: 8 * i), num_tiles=st.integers(1, 20))
def test_the_pieces_of_tiles_cover_all_weights_and_have_one_scale(weights, num_tiles):
    pieces = gemm_config.GemmConfig(128, weights, 2).weight_pieces
    assert pieces == sorted(set(pieces), reverse=True)
    assert all(size.bit_count() == 1 for size in pieces if size < 128)
    covered, first = [], 0
    for size in pieces:
        for tile in range(num_tiles):  # as `TileCoord` in schedule.cuh
            begin = first * num_tiles + tile * size
            covered += range(begin, begin + size)
            assert begin // 128 + kernels.ceil_div(size, 128) == kernels.ceil_div(begin + size, 128)
        first += size
    assert covered == list(range(weights * num_tiles))


def test_what_there_is_no_kernel_for_is_not_possible():
    dense = gemm_config.GemmConfig(128, 64, 4)
    assert gemm_config.is_possible(dense, 4096)
    for options in (
        {"multicast": 2},
        {"split_k": 2, "parts": 2},
        {"num_product_buffers": 2, "swap_ab": True},
        {"wgmma_m": 256},
    ):
        assert not gemm_config.is_possible(replace(dense, **options), 4096), options


def test_a_bias_makes_nothing_spill(cubins_with_bias):
    problems = {variant: cubin.problems() for variant, cubin in cubins_with_bias.items()}
    assert {variant: found for variant, found in problems.items() if found} == {}


@pytest.mark.usefixtures("own_cache")
def test_arguments_lie_in_memory_as_the_kernel_reads_them(tmp_path):
    kernel = gemm_plan.kernel_of(configs()[0], None)
    assert_arguments_fit(gemm_plan.Arguments, kernel, tmp_path)


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
def family_cubins(tmp_path_factory) -> Cubins:
    """Of every family, and with every bias."""
    pairs = zip(sanitizer_cases.FAMILIES.values(), itertools.cycle(BIAS_NAMES), strict=False)
    return compiled(tmp_path_factory.mktemp("cache"), list(itertools.starmap(Variant, pairs)))


@pytest.mark.parametrize("which", ["family_cubins", "grouped_cubins", "experts_cubins"])
def test_machine_code_is_what_was_meant(which, request, disassemble):
    for (config, _, layout), cubin in request.getfixturevalue(which).items():
        code, dimensions = disassemble(cubin), "3D" if config.grouped else "2D"
        assert re.search(r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3", code), config
        assert set(re.findall(r"UTMA(?:LDG|STG)\.(\dD)", code)) == {dimensions}, config
        assert (f"UTMALDG.{dimensions}.MULTICAST" in code) == (config.multicast > 1), config
        assert (f"UTMASTG.{dimensions}" in code) != config.stacked, config
        assert not re.search(r"MEMBAR\S*\.(GPU|SYS)", code), config
        before, *after = code.split("ACQBULK")
        if config.grouped:  # what the previous kernel may write tells which weights are needed
            assert not re.search(r"UTMALDG|\bLDG", before), config
            assert after, config
            # The first stage is prefetched, before warps meet.
            loads = len(config.weight_pieces) + (layout == GroupLayout.MASKED)  # weights, tokens
            of_a_stage = config.k_blocks_per_stage * loads * (layout != GroupLayout.ROWS)
            prefetches = [part.count("UTMAPF") for part in code.split("BAR.SYNC", 1)]
            assert prefetches == [of_a_stage, 0], (config, layout)
            drops = layout != GroupLayout.ROWS  # nobody knows which blocks of rows share weights
            found = re.search(r"UMOV \w+, 0x12[0f]", code)  # evict_first begins so
            assert bool(found) == drops, (config, layout)
        else:  # before the wait for the previous kernel: the weights of one stage, and no tokens
            of_a_stage = config.k_blocks_per_stage * len(config.weight_pieces)
            (after,) = after
            assert (before.count("UTMALDG"), "UTMALDG" in after) == (of_a_stage, True), config


CELLS = """
#include "schedule.cuh"

// Each tile once, and of two that follow each other in a pair the same weights.
__device__ constexpr bool is_walked(int height, int width) {
  bool met[64] = {};
  for (int i = 0; i < height * width; ++i) {
    const Cell cell = Cell::at(i, height, width);
    if (cell.token < 0 || cell.token >= height) return false;
    if (cell.weight < 0 || cell.weight >= width) return false;
    bool& seen = met[cell.token * width + cell.weight];
    if (seen) return false;
    seen = true;
    if (cell.token % 2 == 1) {
      const Cell before = Cell::at(i - 1, height, width);
      if (before.token != cell.token - 1 || before.weight != cell.weight) return false;
    }
  }
  return true;
}
__device__ constexpr bool all_are_walked() {
  for (int height = 1; height <= 8; ++height)
    for (int width = 1; width <= 8; ++width)
      if (!is_walked(height, width)) return false;
  return true;
}
static_assert(all_are_walked());
template <int>
__global__ void nothing() {}
"""


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("change", [None, ("in_pair % 2", "0"), ("in_pair / 2", "in_pair")])
def test_tiles_of_a_group_are_walked_once_by_pairs(tmp_path, change):
    for header in gemm_plan.SOURCE.parent.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    source, schedule = tmp_path / "cells.cu", tmp_path / "schedule.cuh"
    source.write_text(CELLS)
    if change:  # that is, the kernel's own code is read
        code = schedule.read_text()
        assert code.count(change[0]) == 1
        schedule.write_text(code.replace(*change))
        with pytest.raises(jit.JitError, match="static assertion"):
            jit.compile_kernel(jit.Kernel(source, "nothing<0>"))
    else:
        jit.compile_kernel(jit.Kernel(source, "nothing<0>"))


def releases_before_reads(code: str) -> int:
    """How many arrivals of consumers there are while reads of the same stage are in flight.

    A load names the scoreboard that it sets in bits 110 to 112 of its code (7: that of a later
    load, since they return in order), and every instruction those that it waits for in bits 116
    to 121. Reads follow the wait for their stage, and an arrival the wait for WGMMAs, which says
    how many younger batches may be under way. The code is read from top to bottom: where it jumps
    back, ptxas waits for all scoreboards.
    """
    instruction = re.compile(r"\*/\s+(\S.*?);\s+/\* 0x\w{16} \*/\s+/\* (0x\w{16}) \*/")
    in_flight: dict[int, int] = {}  # scoreboard -> how many waits for stages there were before it
    found, waits, younger, multiplies = 0, 0, 0, False
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
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", text):
            younger = int(wait[1])
        elif re.search("MEMBAR|BAR.SYNC|EXIT", text):
            in_flight.clear()
        elif multiplies and "SYNCS.ARRIVE.TRANS64.A1T0" in text:
            found += any(before + younger <= waits for before in in_flight.values())
    assert multiplies
    return found


@pytest.mark.parametrize(
    "which", ["cubins", "cubins_with_bias", "family_cubins", "grouped_cubins", "experts_cubins"]
)
def test_no_stage_is_released_while_it_is_read(which, request, disassemble):
    """TMA may fill it again at once, and no hardware holds it back: see `release` in pipeline.cuh.

    Of a grouped GEMM the scheduler may fill the slot that told of a tile.
    """
    for variant, cubin in request.getfixturevalue(which).items():
        assert releases_before_reads(disassemble(cubin)) == 0, variant


VERIFIED = """
#include "pipeline.cuh"
static_assert(kIsVerifiedCompiler);
template <int>
__global__ void nothing() {}
"""


@pytest.mark.usefixtures("own_cache")
def test_a_compiler_that_was_not_verified_gets_a_fence(tmp_path, disassemble):
    """The installed one was, with the test above: see `make verify-compilers`."""
    folder, variant = tmp_path / "gemm", Variant(sanitizer_cases.FAMILIES["tokens are rows"])
    shutil.copytree(gemm_plan.SOURCE.parent, folder)
    (folder / "verified.cu").write_text(VERIFIED)
    jit.compile_kernel(jit.Kernel(folder / "verified.cu", "nothing<0>"))
    pipeline = folder / "pipeline.cuh"
    code, count = re.subn(r"(?<=__CUDACC_VER_MAJOR__ == )\d+", "99", pipeline.read_text())
    assert count == 2
    pipeline.write_text(code)
    with pytest.raises(jit.JitError, match="static assertion"):
        jit.compile_kernel(jit.Kernel(folder / "verified.cu", "nothing<0>"))
    usual = disassemble(jit.compile_kernel(variant.kernel()))
    fenced = disassemble(jit.compile_kernel(variant.kernel(folder / "gemm.cu")))
    assert fenced.count("MEMBAR") > usual.count("MEMBAR")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "variant",
    [
        Variant(sanitizer_cases.FAMILIES["weights are rows"]),
        Variant(sanitizer_cases.GROUPED_FAMILIES["weights are rows"], layout=GroupLayout.OFFSETS),
        Variant(GATE_UP_FAMILIES["weights are rows, 24"], layout=GroupLayout.OFFSETS),
        Variant(GATE_UP_FAMILIES["a tail"], layout=GroupLayout.OFFSETS),
    ],
)
def test_without_its_fence_a_release_would_come_too_early(variant, tmp_path, disassemble):
    """That is, the test above sees it."""
    tmp_path = tmp_path / "gemm"
    shutil.copytree(gemm_plan.SOURCE.parent, tmp_path)
    for name, fence in (
        ("pipeline.cuh", "if constexpr (C.swap_ab || !kIsVerifiedCompiler) fence_cta();"),
        ("consumer.cuh", "fence_cta();  // scales"),
        ("tail.cuh", "fence_cta();  // see"),
    ):
        code = (tmp_path / name).read_text()
        assert code.count(fence) == 1
        (tmp_path / name).write_text(code.replace(fence, "//" if "//" in fence else ""))
    cubin = jit.compile_kernel(variant.kernel(tmp_path / "gemm.cu"))
    assert releases_before_reads(disassemble(cubin)) > 0
