"""`jit.interleave` against what nvdisasm reads in the same cubins, instruction by instruction."""

import re
from pathlib import Path

import pytest

from moefp8.kernels import jit
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.sm90 import heuristic
from moefp8.kernels.gemm.sm90.expert_configs import choose_experts_configs
from moefp8.kernels.gemm.sm90.launch import kernel_of
from moefp8.kernels.jit.elf import code_ranges
from moefp8.kernels.jit.interleave import interleaved, promotions
from tests.gpu import ARCH
from tests.kernels.nvdisasm import Instruction, instructions_of

YIELD, REUSE = 1 << 45, 7 << 58
PATTERNS = "01", "01111", "1", "0"


def kernels() -> dict[str, jit.Kernel]:
    """Tokens as rows and as columns; one math warpgroup, two, and three."""
    dense = {m: heuristic.choose_config(m, 4096, 7168, 132) for m in (16, 128, 4096)}
    gate_up, down = choose_experts_configs(128, 256, 7168, 2048, 132)
    return {
        **{f"dense, {m} tokens": kernel_of(config, None) for m, config in dense.items()},
        "gate and up": kernel_of(gate_up, None, GroupLayout.OFFSETS),
        "down": kernel_of(down, None, GroupLayout.OFFSETS),
    }


@pytest.fixture(scope="module", params=kernels())
def image(request, tmp_path_factory) -> bytes:
    """The cubin as the compiler made it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEFP8_INTERLEAVE", "0")
        return jit.compile_kernel(kernels()[request.param], ARCH).image


def is_promotion(opcode: str, operands: list[str]) -> bool:
    """`FFMA R4, R5, R6.reuse, R4`"""
    registers = [x.removesuffix(".reuse") for x in operands]
    of_registers = all(re.fullmatch(r"R\d+", x) for x in registers)
    return opcode == "FFMA" and of_registers and registers[0] == registers[3]


def runs_in(instructions: list[Instruction]) -> list[list[int]]:
    """Indices of four promotions or more that follow one another."""
    runs: list[list[int]] = [[]]
    for i, instruction in enumerate(instructions):
        if is_promotion(*instruction):
            runs[-1].append(i)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if len(run) >= 4]


@pytest.fixture(scope="module")
def read(image, tmp_path_factory) -> dict[str | None, list[Instruction]]:
    """The instructions of what is made with each pattern; with None, of what there was."""
    images = {None: image} | {pattern: interleaved(image, pattern) for pattern in PATTERNS}
    found = instructions_of(list(images.values()), tmp_path_factory.mktemp("codes"))
    return dict(zip(images, found, strict=True))


@pytest.fixture(scope="module")
def before(read) -> list[Instruction]:
    return read[None]


def test_the_runs_are_those_that_nvdisasm_shows(image, before):
    ((begin, end),), instructions = code_ranges(image), before
    assert len(instructions) == (end - begin) // 16
    expected = runs_in(instructions)
    assert sum(map(len, expected)) >= 32
    found = [[(x.at - begin) // 16 for x in run] for run in promotions(image)]
    assert found == expected
    for run in promotions(image):
        for x in run:
            factor = instructions[(x.at - begin) // 16][1][2]
            assert f"R{x.factor}" == factor.removesuffix(".reuse")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_only_yield_and_reuse_of_promotions_change(image, before, read, pattern):
    made, after = interleaved(image, pattern), read[pattern]
    ((begin, _),) = code_ranges(image)
    restored = bytearray(made)
    for run in runs_in(before):
        for i, at in enumerate(run):
            place = slice(begin + at * 16, begin + at * 16 + 16)
            old, new = (int.from_bytes(x[place], "little") >> 64 for x in (image, made))
            goes_on = pattern[i % len(pattern)] == "1"
            assert bool(new & YIELD) == goes_on
            assert (old ^ new) & ~(YIELD | REUSE) == 0
            assert image[place][:8] == made[place][:8]
            check_reuse(before[at][1], after[at][1], after[at + 1][1], goes_on)
            restored[place] = image[place]
    assert bytes(restored) == image


def check_reuse(before: list[str], after: list[str], following: list[str], goes_on: bool) -> None:
    """What yields keeps no operand; what goes on keeps what the next instruction reads there."""
    plain = [x.removesuffix(".reuse") for x in before]
    assert [x.removesuffix(".reuse") for x in after] == plain
    kept = [x for x in after if x.endswith(".reuse")]
    if not goes_on:
        assert kept == []
    elif kept and kept != [x for x in before if x.endswith(".reuse")]:
        assert kept == [f"{plain[2]}.reuse"]
        assert following[2].removesuffix(".reuse") == plain[2]


def test_twice_is_as_once(image):
    once = interleaved(image, "01111")
    assert interleaved(once, "01111") == once
    assert once != image


def test_without_a_promotion_nothing_changes(tmp_path):
    image = jit.compile_kernel(jit.Kernel(gemm_source(tmp_path), "nothing"), ARCH).image
    assert list(promotions(image)) == []
    assert interleaved(image, "0") == image


def gemm_source(folder: Path) -> Path:
    path = folder / "nothing.cu"
    path.write_text("__global__ void nothing(float* x, float y) { *x = *x * y + 1; }")
    return path


# How a kernel asks for it


def test_it_can_be_switched_off(monkeypatch):
    kernel = kernels()["dense, 4096 tokens"]
    monkeypatch.setenv("MOEFP8_INTERLEAVE", "0")
    plain = jit.compile_kernel(kernel, ARCH).image
    monkeypatch.setenv("MOEFP8_INTERLEAVE", "1")
    made = jit.compile_kernel(kernel, ARCH).image
    assert made == interleaved(plain, kernel.interleaving) != plain
    monkeypatch.delenv("MOEFP8_INTERLEAVE")
    assert jit.compile_kernel(kernel, ARCH).image == made


@pytest.mark.usefixtures("fresh_jit")
def test_pattern_and_pass_are_part_of_the_key(tmp_path, monkeypatch):
    source = gemm_source(tmp_path)

    def num_entries() -> int:
        return len(list((tmp_path / "cache").glob("*.cubin")))

    for expected, pattern in enumerate(("", "01", "011"), start=1):
        jit.compile_kernel(jit.Kernel(source, "nothing", pattern), ARCH)
        assert num_entries() == expected
    monkeypatch.setattr("moefp8.kernels.jit.kernel.VERSION", 1000)
    jit.compile_kernel(jit.Kernel(source, "nothing", "011"), ARCH)
    assert num_entries() == 4
    jit.compile_kernel(
        jit.Kernel(source, "nothing"), ARCH
    )  # as compiled: the same whatever the pass
    assert num_entries() == 4


def test_kernels_whose_sums_two_warpgroups_promote_are_interleaved():
    of = {name: kernel.interleaving for name, kernel in kernels().items()}
    assert of == {
        **{"dense, 16 tokens": "", "dense, 128 tokens": "", "dense, 4096 tokens": "01111111"},
        **{"gate and up": "01111", "down": "01111"},
    }
