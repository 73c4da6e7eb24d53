"""The text of `k_grouped/schedule.cuh` on the CPU: which tokens a tile sums over."""

import itertools
import subprocess
from pathlib import Path

import pytest

from moefp8.kernels import round_up
from moefp8.kernels.gemm.sm90 import k_grouped
from tests.fakes import cuda_on_cpu

FOLDER = Path(k_grouped.__file__).parent
LEAST, MOST = -(2**31), 2**31 - 1
NUM_TOKENS, BLOCK, STEP = 2000, 128, 32
# What the kernels' own headers tell the schedule.
DEVICE = """
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#define __device__
constexpr int kWarpgroup = 128;
struct TensorMap {};
struct { unsigned x; } blockIdx, gridDim;
template <class A, class B> auto min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}
template <class A, class B> auto max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
int cluster_rank() { return 0; }
"""
# Each tile of one CTA: its expert, and the tokens from the first block on.
PROGRAM = """
#include "schedule.cuh"
constexpr KGroupedConfig kConfig{.warpgroups = 2, .parts = 1, .tile_n = 128, .stages = 4,
    .multicast = 1, .blocks_b = false, .stages_output = true, .output = Output::kFloat};
int main() {
  int offsets[4];
  while (scanf("%d %d %d %d", offsets, offsets + 1, offsets + 2, offsets + 3) == 4) {
    Arguments args{};
    args.expert_offsets = offsets, args.num_experts = 3, args.num_tokens = NUM_TOKENS;
    args.num_row_tiles = args.num_col_tiles = args.band = 1;
    gridDim.x = 1;
    for (Schedule<kConfig> tiles(args); !tiles.done; tiles.next_tile())
      printf("%d %d %d ", tiles.first_block, tiles.num_blocks, tiles.first_steps);
    puts("");
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "tma.cuh").write_text(DEVICE)
    (folder / "program.cpp").write_text(PROGRAM.replace("NUM_TOKENS", str(NUM_TOKENS)))
    include = f"-I{folder}", f"-I{FOLDER}"
    command = "g++", "-std=c++20", "-O1", "-ftrapv", *include, "program.cpp", "-o", "program"
    subprocess.run(command, cwd=folder, check=True)
    return folder / "program"


def tiles_of(program: Path, all_offsets: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """(first block, blocks, WGMMAs of the last block) of each expert."""
    told = "\n".join(" ".join(map(str, offsets)) for offsets in all_offsets)
    done = subprocess.run([program], input=told, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, "a sum overflows"
    lines = [[*map(int, line.split())] for line in done.stdout.splitlines()]
    return [[*zip(*(line[i::3] for i in range(3)), strict=True)] for line in lines]


def test_an_expert_has_the_blocks_of_its_tokens(program):
    offsets = (0, 130, 130, NUM_TOKENS)
    (found,) = tiles_of(program, [offsets])
    for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
        first, num_blocks, steps = found[expert]
        assert num_blocks == -(-(end - begin) // BLOCK)
        if num_blocks:
            assert first == begin // BLOCK + expert
            last = end - begin - (num_blocks - 1) * BLOCK
            assert steps == round_up(last, STEP) // STEP


def test_whatever_offsets_are_no_sum_is_longer_than_all_tokens(program):
    values = LEAST, LEAST + 1, -1, 0, 5, NUM_TOKENS, NUM_TOKENS + 1, MOST - 1, MOST
    all_offsets = [*itertools.product(values, repeat=4)]
    for offsets, found in zip(all_offsets, tiles_of(program, all_offsets), strict=True):
        assert len(found) == 3
        for first, num_blocks, _ in found:
            assert 0 <= num_blocks <= -(-NUM_TOKENS // BLOCK), offsets
            assert num_blocks == 0 or 0 <= first <= NUM_TOKENS // BLOCK + 2, offsets
