// The tiles of a grouped GEMM: which there are depends on numbers that only the device knows.
//
// The two loading warps read them and find the tiles for themselves (`GroupWalk`). The math warpgroups, whose
// registers and time are dear, learn from the first stage of each tile where it is (`Follower`).
#pragma once
#include "gemm_tile.cuh"

// The tokens from `begin` to `end` that are of one group, or none.
struct Segment {
  int begin, end, group;
};

// The first rows of 128 that are of one group; two rounds of reads that do not wait for each other.
__device__ inline Segment rows_of_block(const Groups& groups, int block) {
  constexpr int kStep = 16;
  const int begin = block * kBlock, limit = min(begin + kBlock, groups.num_tokens);
  const int group = groups.bounds[begin];
  const auto is_of_group = [&](int row) { return row < limit && groups.bounds[row] == group; };
  int end = begin;
#pragma unroll
  for (int i = 1; i <= kBlock / kStep; ++i) end += is_of_group(begin + i * kStep - 1) ? kStep : 0;
  const int first = end;
#pragma unroll
  for (int i = 0; i < kStep - 1; ++i) end += is_of_group(first + i);
  return {begin, end, group};
}

// Whatever `bounds` holds, nothing outside of the tensors is touched.
__device__ inline Segment segment(const Groups& groups, int i) {
  Segment found{0, 0, i};
  if (i >= groups.num_segments) return found;
  if (groups.kind == Groups::kRows) found = rows_of_block(groups, i);
  else if (groups.kind == Groups::kMasked) found.end = groups.bounds[i];
  else found.begin = max(groups.bounds[i], 0), found.end = groups.bounds[i + 1];
  found.end = min(found.end, groups.num_tokens);
  if (uint32_t(found.group) >= uint32_t(groups.num_groups)) found.end = found.begin;
  return found;
}

// As `Walk`, for a whole warp: each lane keeps one of 32 segments. Tiles are counted segment by segment; in a
// segment, those of few tokens lie side by side, then all weights follow, then the next tokens.
template <class C>
struct GroupWalk : Ring<C> {
  static constexpr int kTokens = C::kTokens * (C::kSharesTokens ? 1 : C::kShare);  // of a cluster

  const Arguments* args;
  int k_end, tile;
  Place<C> place;
  int k;  // which stage along K
  int first_segment = -kWarp;
  Segment mine, next_mine;
  int tiles_end;  // how many tiles this lane's segment and all before it have

  __device__ explicit GroupWalk(const Arguments& arguments) : args(&arguments) {
    k_end = ceil_div(args->num_k_blocks, C::kDepth);
    tile = blockIdx.x / C::kShare;
  }
  __device__ int lane() const { return threadIdx.x % kWarp; }
  __device__ int num_weight_tiles() const { return C::kWeightsAreRows ? args->num_row_tiles : args->num_col_tiles; }

  // Tiles begin at a multiple of 16 bytes in each row of scales: see `last_token` in gemm_config.py.
  static __device__ int token_tiles(int begin, int end) {
    return begin < end ? ceil_div(end - begin / 4 * 4, kTokens) : 0;
  }

  __device__ void prepare() {  // as early as can be, for the answer takes long
    wait_for_previous_kernel();
    next_mine = segment(args->groups, lane());
  }
  __device__ void start() {
    read_segments(0);
    start_tile();
  }
  __device__ void read_segments(int tiles_before) {
    first_segment += kWarp, mine = next_mine;
    next_mine = segment(args->groups, first_segment + kWarp + lane());  // in time
    tiles_end = token_tiles(mine.begin, mine.end) * num_weight_tiles();
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int before = __shfl_up_sync(~0u, tiles_end, step);
      if (lane() >= step) tiles_end += before;
    }
    tiles_end += tiles_before;
  }
  __device__ void start_tile() {
    k = 0;
    uint32_t found;
    while ((found = __ballot_sync(~0u, tile < tiles_end)) == 0) {
      if (first_segment + kWarp >= args->groups.num_segments) {
        place = Place<C>::none();
        return;
      }
      read_segments(__shfl_sync(~0u, tiles_end, kWarp - 1));
    }
    const int owner = __ffs(found) - 1;
    const int begin = __shfl_sync(~0u, mine.begin, owner), end = __shfl_sync(~0u, mine.end, owner);
    const uint32_t tall = token_tiles(begin, end), wide = num_weight_tiles(), band = args->band;
    uint32_t in_band = tile - (__shfl_sync(~0u, tiles_end, owner) - tall * wide), first = 0;
    if (tall > band) {
      first = in_band / (band * wide) * band;
      in_band -= first * wide;
    }
    const uint32_t height = min(band, tall - first);
    const int weight = height == 1 ? in_band : in_band / height, token = first + in_band - weight * height;
    const int rank = C::kShare == 1 ? 0 : cluster_rank() % C::kShare;
    place.tile = weight * (C::kSharesTokens ? C::kShare : 1) + (C::kSharesTokens ? rank : 0);
    const int first_token = begin / 4 * 4 + token * kTokens + (C::kSharesTokens ? 0 : rank * C::kTokens);
    place.first_token = min(first_token, args->last_token);
    place.set_rows(max(begin, first_token), min(end, first_token + C::kTokens));
    place.group = __shfl_sync(~0u, mine.group, owner);
    place.matrix = args->groups.kind == Groups::kMasked ? place.group : 0;
  }
  __device__ bool done() const { return place.is_none(); }
  __device__ void next_tile() {
    tile += gridDim.x / C::kShare;
    start_tile();
  }
  __device__ void next() {
    this->next_stage();
    if (++k == k_end) next_tile();
  }
};

// As `Walk`, on the heels of the loading warps.
template <class C>
struct Follower : Ring<C> {
  static constexpr int k_begin = 0;
  Shared<C>* shared;
  int k_end;
  Place<C> place;

  __device__ Follower(Shared<C>& memory, const Arguments& args)
      : shared(&memory), k_end(ceil_div(args.num_k_blocks, C::kDepth)) {}
  __device__ bool done() {
    shared->full[this->stage].wait(this->parity);
    const int4 told = shared->weights[this->stage].place;
    place = {told.x, told.y, told.z, told.w};
    return place.is_none();
  }
  __device__ void next_tile() {}
};
