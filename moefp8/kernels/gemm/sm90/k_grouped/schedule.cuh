// Which tiles of which experts a CTA computes, in which order, and which tokens each of them sums over. The producer
// and the math walk over the same tiles and stages, and every warp computes for itself where the next tile is.
#pragma once
#include "config.cuh"

// The tiles of this CTA, one after the other, expert by expert. All tiles of an expert take equally long, and each
// round over the CTAs has tiles of one or two experts, so nobody waits for others at the end.
template <KGroupedConfig C>
struct Schedule {
  struct Tile {
    int index, expert, row, col;
    int begin, end;  // the expert's tokens
  };
  const Arguments& args;
  Tile next;                    // found while the tile before is computed, since it takes as long as a block of tokens
  int expert, row, col;         // where the tile lies
  int first_block, num_blocks;  // of the expert's tokens
  int block;                    // the next one, counted from the expert's first; -1 is the last one, which comes first:
  int first_steps;              // of its tokens only some exist, which take so many WGMMAs
  int stage = 0;
  uint32_t parity = 0;
  bool done;

  __device__ Schedule(const Arguments& arguments) : args(arguments) {
    find(blockIdx.x / C.multicast);
    next_tile();
  }
  __device__ void next_tile() {
    done = next.index >= args.num_experts * args.num_row_tiles * args.num_col_tiles;
    expert = next.expert, row = next.row, col = next.col;
    // Whatever the offsets are, no other block is read.
    const int begin = min(max(next.begin, 0), args.num_tokens), end = min(max(next.end, 0), args.num_tokens);
    const int num_tokens = max(end - begin, 0);
    first_block = begin / kBlock + expert;
    num_blocks = ceil_div(num_tokens, kBlock);
    block = -1;
    first_steps = ceil_div(num_tokens - (num_blocks - 1) * kBlock, kStep);
    find(next.index + gridDim.x / C.multicast);
  }
  __device__ void next_stage() {
    if (++stage == C.stages) stage = 0, parity ^= 1;
    ++block;
  }
  __device__ int stage_before() const { return stage == 0 ? C.stages - 1 : stage - 1; }

 private:
  __device__ void find(int index) {
    const uint32_t of_expert = args.num_row_tiles * args.num_col_tiles, rank = C.multicast > 1 ? cluster_rank() : 0;
    next.index = index;
    next.expert = min(uint32_t(index) / of_expert, args.num_experts - 1);
    const uint32_t i = index - next.expert * of_expert, band = args.band, of_band = band * args.num_col_tiles;
    const uint32_t first = i / of_band * band, in_band = i - first * args.num_col_tiles;
    const uint32_t height = max(min(int(band), args.num_row_tiles - int(first)), 1);
    next.row = (first + in_band % height) * C.tile_m;
    next.col = (in_band / height * C.multicast + rank) * C.tile_n;
    next.begin = 0, next.end = args.num_tokens;
    if (args.expert_offsets != nullptr)
      next.begin = args.expert_offsets[next.expert], next.end = args.expert_offsets[next.expert + 1];
  }
};
