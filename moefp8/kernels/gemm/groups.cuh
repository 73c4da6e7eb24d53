// The tiles of a grouped GEMM: which there are depends on numbers that only the device knows.
//
// One warp reads them and finds the tiles of this CTA (`GroupedScheduler`); all others follow it, through a ring of
// places in shared memory (`SchedulerClient`). So nobody waits for memory or divides where a tile ends. Tiles take unequal
// times, so clusters that take one after the other from a common counter end together (`Groups::tile_counter`).
#pragma once
#include "tile.cuh"

constexpr int kWantedAhead = 4;  // stages

// The tokens from `begin` to `end` that are of one group, or none.
struct Segment {
  int begin, end, group;
};

// The first rows of 128 that are of one group, found in two rounds of reads.
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
  return {begin, uint32_t(group) < uint32_t(groups.num_groups) ? end : begin, group};
}

// Whatever `bounds` holds, nothing outside of the tensors is touched.
template <GroupLayout kGroupLayout>
__device__ Segment segment(const Groups& groups, int i) {
  if (i >= groups.num_segments) return {0, 0, i};
  if constexpr (kGroupLayout == GroupLayout::kRows) return rows_of_block(groups, i);
  else if constexpr (kGroupLayout == GroupLayout::kMasked) return {0, min(groups.bounds[i], groups.num_tokens), i};
  else if (groups.bounds == nullptr) return {0, groups.num_tokens, i};  // of a single group
  else return {max(groups.bounds[i], 0), min(groups.bounds[i + 1], groups.num_tokens), i};
}

// Where the tile `i` of a segment lies: two tiles of tokens side by side, so that they share weights, then the next
// weights, then the next two.
struct Cell {
  int token, weight;

  static __device__ constexpr Cell at(uint32_t i, uint32_t height, uint32_t width) {
    const uint32_t first = height <= 2 ? 0 : i / (2 * width) * 2, in_pair = i - first * width;
    if (height - first == 1) return {int(first), int(in_pair)};
    return {int(first + in_pair % 2), int(in_pair / 2)};
  }
};

// Whether this CTA takes tiles from the counter, for all of its cluster.
template <class C>
__device__ bool takes_for_cluster(const Arguments& args) {
  return args.groups.tile_counter != nullptr && (C::kTogether == 1 || cluster_rank() % C::kTogether == 0);
}

// One warp: finds the tiles of this CTA, one after the other. Each lane keeps one of 32 segments. Tiles are counted
// segment by segment.
template <class C>
struct GroupedScheduler {
  // From one tile of a cluster to the next.
  static constexpr int kStep = C::kTokenStep * (C::kSameTokens ? 1 : C::kTogether);

  const Arguments& args;
  const int lane;
  int tile = blockIdx.x / C::kTogether;
  int first_segment = -kWarp;
  Segment mine, next_mine;
  int tiles_end = 0;  // how many tiles this lane's segment and all before it have

  // As early as can be, for the answer takes long.
  __device__ void prepare() {
    if (!args.groups.bounds_ready) wait_for_previous_kernel();
    next_mine = segment<C::kGroupLayout>(args.groups, lane);
  }
  __device__ void run(Shared<C>& shared) {
#pragma unroll 1
    for (int i = 0;; next_tile(shared.tiles, i++)) {
      const TileCoord<C> coord = find();
      const int slot = i % kTileSlots;
      shared.tiles.empty[slot].wait(i / kTileSlots % 2 ^ 1);
      if (lane == 0) {
        shared.tiles.coords[slot].coord = coord;
        shared.tiles.full[slot].arrive();
      }
      if (coord.is_none()) return;
    }
  }

 private:
  // The one after the tile number `i` of this CTA. In a cluster all have the same.
  __device__ void next_tile(Tiles<C>& tiles, int i) {
    const int num_clusters = gridDim.x / C::kTogether;
    if (args.groups.tile_counter == nullptr) {
      tile += num_clusters;
    } else if (takes_for_cluster<C>(args)) {
      tiles.wanted.wait(i % 2);
      if (lane == 0) tile = num_clusters + atomicAdd(args.groups.tile_counter, 1);
      tile = __shfl_sync(~0u, tile, 0);
      if constexpr (C::kTogether > 1) {
        if (i > 0) tiles.heard.wait((i - 1) % 2);
        const bool tells = 0 < lane && lane < C::kTogether;
        store_in_cluster(tells, &tiles.tile, tiles.told, cluster_rank() + (tells ? lane : 0), tile);
      }
    } else if constexpr (C::kTogether > 1) {
      const int first = cluster_rank() / C::kTogether * C::kTogether;
      if (i > 0 && lane == 0) tiles.heard.arrive_in_cluster(first);  // of the tile before
      tiles.told.arrive_and_expect(lane == 0, sizeof(int));
      tiles.told.wait(i % 2);
      tile = tiles.tile;
    }
  }
  __device__ TileCoord<C> find() {
    uint32_t found;
    while ((found = __ballot_sync(~0u, tile < tiles_end)) == 0) {
      if (first_segment + kWarp >= args.groups.num_segments) return TileCoord<C>::none();
      next_segments();
    }
    const int owner = __ffs(found) - 1;
    const int begin = __shfl_sync(~0u, mine.begin, owner), end = __shfl_sync(~0u, mine.end, owner);
    const int height = token_tiles(begin, end), width = weight_tiles();
    const int in_segment = tile - (__shfl_sync(~0u, tiles_end, owner) - height * width);
    const Cell cell = Cell::at(in_segment, height, width);
    const int rank = C::kTogether == 1 ? 0 : cluster_rank() % C::kTogether;

    const int from = first_token_of(begin) + cell.token * kStep + (C::kSameTokens ? 0 : rank * C::kTokenStep);
    TileCoord<C> coord;
    coord.first_token = min(from, args.last_token);
    // The last two tiles of tokens rather overlap than that the last one ends within 64 of them, which TMA could not
    // store. What is computed and stored twice is the same.
    if (C::kBeginsAnywhere) {
      const int in_rows = min(end - from, C::kWgmmaM);  // the tail is stored without TMA
      coord.first_token = min(coord.first_token, max(begin, end - ceil_div(in_rows, 64) * 64));
    }
    coord.tile = C::kSameTokens ? cell.weight * C::kTogether + rank : cell.weight;
    const int most = cell.token < height - 1 ? C::kTokenStep : C::kTokens;
    coord.set_rows(max(begin, coord.first_token), min(end, coord.first_token + most));
    coord.group = __shfl_sync(~0u, mine.group, owner);
    coord.matrix = C::kGroupLayout == GroupLayout::kMasked ? coord.group : 0;
    coord.is_only = height == 1;
    return coord;
  }
  __device__ void next_segments() {
    const int tiles_before = __shfl_sync(~0u, tiles_end, kWarp - 1);
    first_segment += kWarp, mine = next_mine;
    next_mine = segment<C::kGroupLayout>(args.groups, first_segment + kWarp + lane);  // in time
    tiles_end = token_tiles(mine.begin, mine.end) * weight_tiles();
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int before = __shfl_up_sync(~0u, tiles_end, step);
      if (lane >= step) tiles_end += before;
    }
    tiles_end += tiles_before;
  }
  // Of the first tile.
  static __device__ int first_token_of(int begin) { return C::kBeginsAnywhere ? begin : begin / 4 * 4; }
  static __device__ int token_tiles(int begin, int end) {
    return begin < end ? ceil_div(max(end - first_token_of(begin) - C::kTail, 1), kStep) : 0;
  }
  __device__ int weight_tiles() const { return C::kSwapAb ? args.num_row_tiles : args.num_col_tiles; }
};

struct NoGroupedScheduler {
  const Arguments& args;
  const int lane;
  __device__ void prepare() {}
  template <class Memory>
  __device__ void run(Memory&) {}
};

// As `StaticScheduler`, on the heels of the scheduler.
template <class C>
struct SchedulerClient : Ring<C> {
  static constexpr int k_begin = 0;

  Shared<C>* shared;
  const Arguments* args;
  int k_end;
  TileCoord<C> coord;
  int k;  // which stage along K
  int num_tiles = 0;

  __device__ SchedulerClient(Shared<C>& memory, const Arguments& arguments)
      : shared(&memory), args(&arguments), k_end(ceil_div(args->num_k_blocks, C::kKBlocksPerStage)) {}
  __device__ void start() { next_tile(); }
  __device__ bool done() const { return coord.is_none(); }
  __device__ void next_tile() {
    auto& tiles = shared->tiles;
    const int slot = num_tiles % kTileSlots;
    tiles.full[slot].wait(num_tiles / kTileSlots % 2);
    const TileCoord<C> told = tiles.coords[slot].coord;
    coord.first_token = warp_uniform(told.first_token), coord.tile = warp_uniform(told.tile);
    coord.rows = warp_uniform(told.rows), coord.matrix = warp_uniform(told.matrix);
    coord.group = warp_uniform(told.group), coord.is_only = warp_uniform(told.is_only);
    fence_cta();  // the arrival would overtake the reads: see `release` in gemm.cu
    tiles.empty[slot].arrive();
    ++num_tiles, k = 0;
  }
  __device__ void next() {
    this->next_stage();
    if (++k == k_end) next_tile();
  }
  // One warp asks for the tile after this one: early enough, for it has to come from memory; and late, for what is taken
  // early, others cannot take in the end.
  __device__ int wants_at() const { return max(0, k_end - kWantedAhead); }
  __device__ void want_next() {
    if (k == wants_at() && takes_for_cluster<C>(*args)) shared->tiles.wanted.arrive();
  }
};
