"""The cubins of the GEMMs: compiled and read, but not run."""

import itertools
import re
import shutil
from collections.abc import Callable, Hashable, Iterable
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moefp8.kernels import jit
from moefp8.kernels.common.activation import KINDS, SWIGLU, Activation
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.sm90.config import GemmConfig
from moefp8.kernels.gemm.sm90.launch import BIASES, SOURCE
from moefp8.kernels.jit.nvrtc import Nvrtc
from tests.functional.cases import GATE_UP_FAMILIES
from tests.gpu import ARCH
from tests.kernels import nvdisasm
from tests.kernels.gemm.sm90 import families
from tests.kernels.gemm.sm90.chosen import configs, experts_configs, grouped_configs
from tests.sampling import ALL_KERNELS, sample

BIAS_NAMES = tuple(BIASES.values())


class Variant(NamedTuple):
    config: GemmConfig
    layout: GroupLayout | None = None
    bias: str = "kNone"
    activation: Activation = SWIGLU

    def kernel(self, source: Path = SOURCE) -> jit.Kernel:
        name = self.config.kernel_name(self.bias, self.layout, self.activation.enumerator)
        return jit.Kernel(source, name, self.config.interleaving)


def sampled(variants: Iterable[Variant]) -> list[Variant]:
    """Every value of a field, and every layout and width of each kind of tile.

    How many stages there are follows from the other fields.
    """

    def axes(x: Variant) -> tuple[Hashable, ...]:
        config = x.config
        kind = config.swap_ab, config.gate_up, config.saves_gate_up
        met = (*kind, x.layout), (config.swap_ab, config.wgmma_n)
        return (*astuple(replace(config, stages=0)), *x[1:], *met)

    return sample(variants, axes, 1)


def in_turn(configs: Iterable[GemmConfig], kinds: Iterable[Any], field: str) -> list[Variant]:
    """Each configuration with one of the kinds."""
    pairs = zip(configs, itertools.cycle(kinds), strict=False)
    return [Variant(config, **{field: kind}) for config, kind in pairs]


def of_all(configs: Iterable[GemmConfig], layouts: Iterable[GroupLayout]) -> list[Variant]:
    return list(itertools.starmap(Variant, itertools.product(configs, layouts)))


def grouped_variants() -> list[Variant]:
    """All layouts of every family, and one of each other configuration."""
    of_families = of_all(families.GROUPED_FAMILIES.values(), GroupLayout)
    return [*in_turn(grouped_configs(), GroupLayout, "layout"), *of_families]


def experts_variants() -> list[Variant]:
    """What the routed experts launch: gate and up with both layouts, all else with one."""
    layouts, chosen = (GroupLayout.OFFSETS, GroupLayout.MASKED), experts_configs()
    gate_up = of_all((x for x in chosen if x.gate_up), layouts)
    saving = [Variant(x, GroupLayout.OFFSETS) for x in saving_configs()]
    of_families = in_turn((*chosen, *GATE_UP_FAMILIES.values()), layouts, "layout")
    return [*gate_up, *saving, *of_families]


def saving_configs() -> list[GemmConfig]:
    """What a forward launches that a backward follows; of few tokens, only the most columns."""
    small = {f"weights are rows, {n}" for n in (8, 16, 24)} if not ALL_KERNELS else set()
    of_families = (x for name, x in GATE_UP_FAMILIES.items() if name not in small)
    return [replace(config, saves_gate_up=True) for config in of_families]


def activation_variants() -> list[Variant]:
    """Forwards that save, which have the fewest registers left; one activation for each config."""
    kinds = [Activation(kind) for kind in KINDS if kind != "swiglu"]
    variants = [
        Variant(config, GroupLayout.OFFSETS, activation=kind)
        for kind in kinds
        for config in saving_configs()
    ]
    return variants if ALL_KERNELS else variants[:: len(kinds) + 1]


def bias_variants() -> list[Variant]:
    """Biases of groups, in the variants that have the fewest registers left; in turns a sample."""
    saving = saving_configs()
    down = [x for x in experts_configs() if not x.gate_up]
    kinds = itertools.cycle(BIAS_NAMES[1:])
    gpt_oss = Activation("gpt_oss")
    variants = [
        Variant(config, GroupLayout.OFFSETS, next(kinds), gpt_oss if config.gate_up else SWIGLU)
        for config in (*saving, *down)
    ]
    return variants if ALL_KERNELS else variants[::4]


VARIANTS = {
    "dense": lambda: sampled(map(Variant, configs())),
    # A bias comes on top when most registers are in use. Every sixth is a sample.
    "with a bias": lambda: in_turn(configs()[:: 1 if ALL_KERNELS else 6], BIAS_NAMES[1:], "bias"),
    "families": lambda: in_turn(families.FAMILIES.values(), BIAS_NAMES, "bias"),
    "grouped": lambda: sampled(grouped_variants()),
    "experts": lambda: sampled(experts_variants()),
    "activations": activation_variants,
    "biases of groups": bias_variants,
}


@pytest.fixture(scope="module")
def cubins_of(tmp_path_factory) -> Callable[[str], dict[Variant, jit.Cubin]]:
    """Compiled anew, so that the logs are those of today's compiler; by a name in `VARIANTS`."""

    @cache
    def compiled(which: str) -> dict[Variant, jit.Cubin]:
        variants = list(dict.fromkeys(VARIANTS[which]()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOEFP8_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
            cubins = jit.compile_kernels((variant.kernel() for variant in variants), ARCH)
        return dict(zip(variants, cubins, strict=True))

    return compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    "which", ["dense", "with a bias", "grouped", "experts", "activations", "biases of groups"]
)
def test_every_configuration_compiles_and_spills_nothing(which, cubins_of):
    problems = {variant: cubin.problems() for variant, cubin in cubins_of(which).items()}
    found = {variant: each for variant, each in problems.items() if each}
    if "V12.6" in Nvrtc().version:
        for variant in [x for x in found if x.layout is None and x.config.wgmma_n == 176]:
            assert all("spill" in line for line in found.pop(variant))  # it costs speed alone
    assert found == {}


@pytest.fixture(scope="module")
def disassemble(tmp_path_factory) -> Callable[[Iterable[jit.Cubin]], list[str]]:
    if not nvdisasm.is_installed():
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    folder = tmp_path_factory.mktemp("cubins")
    return lambda cubins: nvdisasm.texts_of([cubin.image for cubin in cubins], folder)


@pytest.fixture(scope="module")
def codes_of(cubins_of, disassemble) -> Callable[[str], dict[Variant, str]]:
    """The machine code of each variant; by a name in `VARIANTS`."""

    @cache
    def disassembled(which: str) -> dict[Variant, str]:
        cubins = cubins_of(which)
        return dict(zip(cubins, disassemble(cubins.values()), strict=True))

    return disassembled


@pytest.mark.slow
@pytest.mark.parametrize("which", ["families", "grouped", "experts"])
def test_machine_code_is_what_was_meant(which, codes_of):
    for (config, layout, *_), code in codes_of(which).items():
        dimensions = "3D" if config.grouped else "2D"
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


def test_a_promotion_is_rounded_once(codes_of):
    """Else a row would get other bits in other tiles. All FADDs would be of promotions here."""
    codes = [code for (config, *_), code in codes_of("dense").items() if config.parts == 2]
    assert codes
    for code in codes:
        assert ("FFMA" in code, "FADD" in code) == (True, False)


CELLS = """
#include "schedule.cuh"

// Each tile once, and of those that follow each other in a band the same weights.
__device__ constexpr bool is_walked(int height, int width, int band) {
  bool met[256] = {};
  for (int i = 0; i < height * width; ++i) {
    const Cell cell = Cell::at(i, height, width, band);
    if (cell.token < 0 || cell.token >= height) return false;
    if (cell.weight < 0 || cell.weight >= width) return false;
    bool& seen = met[cell.token * width + cell.weight];
    if (seen) return false;
    seen = true;
    if (cell.token % band != 0) {
      const Cell before = Cell::at(i - 1, height, width, band);
      if (before.token != cell.token - 1 || before.weight != cell.weight) return false;
    }
  }
  return true;
}
__device__ constexpr bool all_are_walked() {
  for (int band : {1, 2, 3, 5, 16})
    for (int height : {1, 2, 3, 4, 5, 6, 15, 16, 17, 35})
      for (int width : {1, 2, 3, 7})
        if (!is_walked(height, width, band)) return false;
  return true;
}
static_assert(all_are_walked());
template <int>
__global__ void nothing() {}
"""


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "change",
    [
        None,
        ("in_band % 2", "0"),
        ("in_band / 2", "in_band"),
        ("in_band % rows", "0"),
        ("in_band / rows", "in_band"),
        ("i / (band * width) * band", "0"),
    ],
)
def test_tiles_of_a_group_are_walked_once_in_bands(tmp_path, change):
    shutil.copytree(SOURCE.parent, tmp_path, dirs_exist_ok=True)
    source, schedule = tmp_path / "cells.cu", tmp_path / "schedule.cuh"
    source.write_text(CELLS)
    if change:  # that is, the kernel's own code is read
        code = schedule.read_text()
        assert code.count(change[0]) == 1
        schedule.write_text(code.replace(*change))
        with pytest.raises(jit.JitError, match="static assertion"):
            jit.compile_kernel(jit.Kernel(source, "nothing<0>"), ARCH)
    else:
        jit.compile_kernel(jit.Kernel(source, "nothing<0>"), ARCH)


def releases_before_reads(code: str) -> int:
    """How many arrivals of consumers there are while reads of the same stage are in flight.

    A load names the scoreboard that it sets in bits 110 to 112 of its code (7: that of a later
    load, since they return in order), and every instruction those that it waits for in bits 116
    to 121. Reads follow the wait for their stage, and so do its WGMMAs. An arrival follows the wait
    for these, which says how many younger batches may be under way, or there are none. The code is
    read from top to bottom: where it jumps back, ptxas waits for all scoreboards.
    """
    instruction = re.compile(r"\*/\s+(\S.*?);\s+/\* 0x\w{16} \*/\s+/\* (0x\w{16}) \*/")
    in_flight: dict[int, int] = {}  # scoreboard -> the stage that is read
    found, stage, released, multiplies = 0, 0, 0, False  # a wait for a stage counts it
    batches: list[int] = []  # of WGMMAs: the stage that each multiplies
    for text, upper in instruction.findall(code):
        control = int(upper, 16) >> 46
        for board in range(6):
            if control >> 6 >> board & 1:
                in_flight.pop(board, None)
        multiplies |= "WARPGROUP.ARRIVE" in text
        if "LDS" in text:
            oldest = min(in_flight.pop(7, stage), in_flight.get(control & 7, stage))
            in_flight[control & 7] = oldest
        elif "SYNCS.PHASECHK" in text:
            released = stage = stage + 1
        elif "QGMMA" in text and "gsb0" in text:
            batches.append(stage)
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", text):
            released = batches[-1 - int(wait[1])]
        elif re.search("MEMBAR|BAR.SYNC|EXIT", text):
            in_flight.clear()
        elif multiplies and "SYNCS.ARRIVE.TRANS64.A1T0" in text:
            found += any(read <= released for read in in_flight.values())
    assert multiplies
    return found


@pytest.mark.parametrize("which", VARIANTS)
def test_no_stage_is_released_while_it_is_read(which, codes_of):
    """TMA may fill it again at once, and no hardware holds it back: see `release` in pipeline.cuh.

    In a grouped GEMM, the scheduler may fill the slot that told of a tile.
    """
    for variant, code in codes_of(which).items():
        assert releases_before_reads(code) == 0, variant


VERIFIED = """
#include "pipeline.cuh"
static_assert(kIsVerifiedCompiler);
template <int>
__global__ void nothing() {}
"""


@pytest.mark.usefixtures("own_cache")
def test_a_compiler_that_was_not_verified_gets_a_fence(tmp_path, disassemble):
    """The installed one was verified by the test above: see `make verify-compilers`."""
    folder, variant = tmp_path / "gemm", Variant(families.FAMILIES["tokens are rows"])
    shutil.copytree(SOURCE.parent, folder)
    (folder / "verified.cu").write_text(VERIFIED)
    jit.compile_kernel(jit.Kernel(folder / "verified.cu", "nothing<0>"), ARCH)
    pipeline = folder / "pipeline.cuh"
    code, count = re.subn(r"(?<=__CUDACC_VER_MAJOR__ == )\d+", "99", pipeline.read_text())
    assert count == 2
    pipeline.write_text(code)
    with pytest.raises(jit.JitError, match="static assertion"):
        jit.compile_kernel(jit.Kernel(folder / "verified.cu", "nothing<0>"), ARCH)
    kernels = variant.kernel(), variant.kernel(folder / "gemm.cu")
    usual, fenced = disassemble(jit.compile_kernel(x, ARCH) for x in kernels)
    assert fenced.count("MEMBAR") > usual.count("MEMBAR")


WEIGHTS_ARE_ROWS = families.GROUPED_FAMILIES["weights are rows"]
GATE_UP_OF_FEW = GATE_UP_FAMILIES["weights are rows, 24"]
FENCE = "if constexpr (C.swap_ab || !kIsVerifiedCompiler) fence_cta();"


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("file", "fence", "variant"),
    [
        ("pipeline", FENCE, Variant(families.FAMILIES["weights are rows"])),
        ("pipeline", FENCE, Variant(WEIGHTS_ARE_ROWS, GroupLayout.OFFSETS)),
        ("pipeline", FENCE, Variant(GATE_UP_OF_FEW, GroupLayout.OFFSETS)),
        ("schedule", "fence_cta();  // the arrival", Variant(GATE_UP_OF_FEW, GroupLayout.OFFSETS)),
    ],
)
def test_without_its_fence_a_release_would_come_too_early(
    file, fence, variant, tmp_path, disassemble
):
    """The test above sees that. What other fences there are, today's compilers do not need."""
    folder = tmp_path / "gemm"
    shutil.copytree(SOURCE.parent, folder)
    header = folder / f"{file}.cuh"
    code = header.read_text()
    assert code.count(fence) == 1
    header.write_text(code.replace(fence, "//" if "//" in fence else ""))
    (code,) = disassemble([jit.compile_kernel(variant.kernel(folder / "gemm.cu"), ARCH)])
    assert releases_before_reads(code) > 0
