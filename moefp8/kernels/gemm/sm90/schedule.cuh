// Which tiles a CTA computes, in which order. Every role of a CTA walks over the same tiles and stages:
// - `StaticScheduler`, of a dense GEMM: every warp computes for itself where the next tile is.
// - `GroupedScheduler`, of a grouped GEMM: which tiles there are depends on numbers that only the device knows. One
//   warp reads them, finds the tiles of this CTA, and tells all others through a ring in shared memory, `TileRing`.
//   So no other warp waits for memory, or divides, where a tile ends.
// - `SchedulerClient`: how those others read that ring.
#pragma once
#include "config.cuh"
#include "mbarrier.cuh"

// Which tokens and weights a tile takes. The tokens lie side by side. The weights come in pieces: as many whole blocks
// as fit, then half a block, a quarter, and so on, as the bits of tile_weights say. The first pieces of all tiles lie
// before all second ones, and so on. So each begins at a multiple of its size, and none takes part of one block and
// part of the next:
//
//   tile_weights = 112, 8 tiles:  64: 0 1|2 3|4 5|6 7|  32: 0 1 2 3|4 5 6 7|  16: 0 1 2 3 4 5 6 7|   (| ends a block)
//
// Promotion takes 3 scales. If the tiles lay side by side, the scale could change after any 16 weights.
template <GemmConfig C>
struct TileCoord {
  int first_token;
  int tile;  // which tile of weights
  // Which tokens of the tile are the group's, or those of half a tile: the first, and the one after the last << 16.
  int rows;
  // Only grouped GEMMs use these:
  int matrix;   // the one that has the tokens
  int group;    // the one whose weights it takes
  int is_only;  // whether no other tile of its segment takes these weights

  static __device__ TileCoord none() { return {-1}; }
  __device__ bool is_none() const { return first_token < 0; }
  __device__ void set_rows(int begin, int end) {
    rows = begin < end ? begin - first_token | (end - first_token) << 16 : 0;
  }
  __device__ int scale_offset() const { return C.begins_anywhere ? first_token % 4 : 0; }
  __device__ int begin() const { return rows & 0xffff; }
  __device__ int end() const { return rows >> 16; }
  // The index of the box that holds the rows: 64 tokens for each math warpgroup or, in the last one, all of the tile.
  __device__ int token_box() const { return C.num_token_boxes == 1 ? 0 : max(0, (end() - 1) / 64); }
  __device__ int box_tokens() const {
    return C.num_token_boxes == 1 ? C.most_tokens : min(64 * (token_box() + 1), C.most_tokens);
  }
  __device__ bool has_tail() const { return end() > C.wgmma_m; }
  __device__ bool is_half() const { return C.halves_tiles && end() == 64; }

  struct Piece {
    int begin, size, index;
  };
  // The piece with the weight `i` of a tile. A constant `i` makes all of these constant.
  static __device__ Piece piece(int i) {
    if (C.gate_up) return {i / C.outputs * C.outputs, C.outputs, i / C.outputs};
    if (i < C.block_weights) return {0, C.block_weights, 0};
    const int size = 1 << (31 - __clz(i ^ C.tile_weights));  // the highest bit in which they differ
    const int begin = i & -size;
    return {begin, size, (C.block_weights > 0) + __popc(begin % kBlock)};
  }
  // The index of the scale of the weight `i`: a whole block has one, and so has every smaller piece.
  static __device__ int scale(int i) {
    return C.gate_up ? piece(i).index : i / kBlock + __popc(piece(i).begin % kBlock);
  }
  static __device__ bool begins_scale(int i) { return i == 0 || scale(i) != scale(i - 8); }  // weights come in 8s

  // Where the weight `i` of the tile lies among all weights, or among all of gate's or of up's.
  __device__ int weight(const Arguments& args, int i) const {
    if (C.gate_up) return tile * C.outputs + i % C.outputs;
    const int num_tiles = C.swap_ab ? args.num_row_tiles : args.num_col_tiles;
    return piece(i).begin * num_tiles + tile * piece(i).size + i - piece(i).begin;
  }
};

// The next stage of the pipeline, and the parity of its barriers' phase.
template <GemmConfig C>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next_stage() {
    if (++stage == C.stages) stage = 0, parity ^= 1;
  }
};

// The ring through which the scheduler of a grouped GEMM tells the others where the next tiles are.
constexpr int kTileSlots = 4;
template <GemmConfig C, bool kNeeded = C.grouped>
struct TileRing {
  struct alignas(16) {
    TileCoord<C> coord;
  } coords[kTileSlots];
  Barrier full[kTileSlots], empty[kTileSlots];
  // These serve where tiles are taken from a counter. `wanted`: the producer soon needs the next one. In a cluster, the
  // first CTA takes it, writes it to `tile` of the other one (`told`), and waits until that was read (`heard`).
  Barrier wanted, told, heard;
  int tile;

  __device__ void init() {
    for (int i = 0; i < kTileSlots; ++i) full[i].init(1), empty[i].init(C.math_warpgroups * kWarpgroup + 2 * kWarp);
    wanted.init(kWarp);
    if constexpr (C.tiles_per_cluster > 1) told.init(1), heard.init(C.tiles_per_cluster - 1);
  }
};
template <GemmConfig C>
struct TileRing<C, false> {};

template <GemmConfig C>
struct Shared;  // pipeline.cuh defines it

// ---- Dense ----

template <GemmConfig C>
struct StaticScheduler : Ring<C> {
  const Arguments* args;
  int k_begin, k_end, num_clusters, tile;
  TileCoord<C> coord;
  int k;  // which stage along K

  __device__ StaticScheduler(const Shared<C>&, const Arguments& arguments) : args(&arguments) {
    const int slice = C.split_k == 1 ? 0 : cluster_rank();
    const int num_k = ceil_div(args->num_k_blocks, C.k_blocks_per_stage);  // < 2^24
    k_begin = num_k * slice / C.split_k;
    k_end = num_k * (slice + 1) / C.split_k;
    num_clusters = gridDim.x / C.split_k;
    tile = blockIdx.x / C.split_k;
    start_tile();
  }
  __device__ void start_tile() {
    int col, row, tile = this->tile, half = 0;
    const bool is_half = C.halves_tiles && tile >= args->num_whole_tiles;
    if (is_half) {  // both halves of a tile are computed at about the same time
      half = (tile - args->num_whole_tiles) % 2;
      tile = args->num_whole_tiles + (tile - args->num_whole_tiles) / 2;
    }
    if (args->num_row_tiles == 1) {  // no divisions where latency counts
      row = 0, col = tile;
    } else if (args->num_col_tiles == 1) {
      row = tile, col = 0;
    } else {
      uint32_t first = 0, height = args->band, in_band = tile;
      if (args->band < args->num_row_tiles) {
        const uint32_t band_tiles = args->band * args->num_col_tiles, band = uint32_t(tile) / band_tiles;
        in_band -= band * band_tiles, first = band * args->band;
        height = min(args->band, args->num_row_tiles - int(first));
      }
      col = height == args->band ? in_band * args->inverse >> 33 : in_band / height;
      row = first + in_band - col * height;
    }
    const int tokens = C.swap_ab ? col : row;
    coord.first_token = min(tokens * C.most_tokens, args->last_token);  // some are computed and stored twice, alike
    coord.tile = C.swap_ab ? row : col;
    if constexpr (C.halves_tiles) {
      coord.first_token += 64 * half;
      coord.rows = (is_half ? 64 : C.wgmma_m) << 16;
    }
    k = k_begin;
  }
  __device__ void start() {}
  // How many stages all tiles of this CTA have.
  __device__ int num_stages() const {
    const int num_tiles = ceil_div(this->num_tiles() - tile, num_clusters);
    return num_tiles * (k_end - k_begin);
  }
  // Half a tile counts as one.
  __device__ int num_tiles() const {
    const int num_tiles = args->num_row_tiles * args->num_col_tiles;
    return C.halves_tiles ? 2 * num_tiles - args->num_whole_tiles : num_tiles;
  }
  __device__ bool done() const { return tile >= num_tiles(); }
  __device__ void next_tile() {
    tile += num_clusters;
    if (!done()) start_tile();
  }
  __device__ void next() {
    this->next_stage();
    if (++k == k_end) next_tile();
  }
};

// ---- Grouped ----

// The tokens from `begin` to `end` belong to one group. There may be none.
struct Segment {
  int begin, end, group;
};

// The first rows of a block of 128 belong to one group. Two rounds of reads find where they end.
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

// The segment `i` of the list that segments.cu has written. Behind the last one are empty ones, so that no read waits
// for the number of segments.
__device__ inline Segment found_segment(const int* list, int i) {
  const int4 entry = reinterpret_cast<const int4*>(list)[1 + i];
  return {entry.x, entry.y, entry.z};
}

// Whatever `bounds` holds, nothing outside of the tensors is touched.
template <GroupLayout kGroupLayout>
__device__ Segment segment(const Groups& groups, int i) {
  if (i >= groups.num_segments) return {0, 0, i};
  if constexpr (kGroupLayout == GroupLayout::kRows) return rows_of_block(groups, i);
  else if constexpr (kGroupLayout == GroupLayout::kSegments) return found_segment(groups.bounds, i);
  else if constexpr (kGroupLayout == GroupLayout::kMasked) return {0, min(groups.bounds[i], groups.num_tokens), i};
  else if (groups.bounds == nullptr) return {0, groups.num_tokens, i};  // there is a single group
  else return {max(groups.bounds[i], 0), min(groups.bounds[i + 1], groups.num_tokens), i};
}

// Where the tile `i` of a segment lies. A band of tiles of tokens, one after the other, reads the same weights; then come
// their tiles of the next weights; after all weights, the next band.
struct Cell {
  int token, weight;

  static __device__ constexpr Cell at(uint32_t i, uint32_t height, uint32_t width, uint32_t band) {
    const uint32_t first = height <= band ? 0 : i / (band * width) * band, in_band = i - first * width;
    const uint32_t rows = height - first < band ? height - first : band;
    if (rows == 1) return {int(first), int(in_band)};
    if (rows == 2) return {int(first + in_band % 2), int(in_band / 2)};  // no division where tiles are few
    return {int(first + in_band % rows), int(in_band / rows)};
  }
};

// Whether this CTA takes tiles from the counter, for all of its cluster.
template <GemmConfig C>
__device__ bool takes_for_cluster(const Arguments& args) {
  return args.groups.tile_counter != nullptr && (C.tiles_per_cluster == 1 || cluster_rank() % C.tiles_per_cluster == 0);
}

// One warp finds the tiles of this CTA, one after the other. Tiles are counted segment by segment, and each lane keeps
// one of 32 segments. Tiles take unequal times, so clusters that take one after the other from a common counter end
// together.
template <GemmConfig C>
struct GroupedScheduler {
  const Arguments& args;
  const int lane;
  int tile = blockIdx.x / C.tiles_per_cluster;
  int first_segment = -kWarp;
  Segment mine, next_mine;
  int num_found = 0;  // segments of kSegments
  int tiles_end = 0;  // how many tiles this lane's segment and all before it have

  // The reads begin as early as can be, since the answer takes long.
  __device__ void prepare() {
    if (!args.groups.bounds_ready) wait_for_previous_kernel();
    next_mine = segment<C.group_layout>(args.groups, lane);
    if constexpr (C.group_layout == GroupLayout::kSegments) num_found = args.groups.bounds[0];
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
  // Goes to the tile after the tile number `i` of this CTA. All CTAs of a cluster go to the same one.
  __device__ void next_tile(TileRing<C>& tiles, int i) {
    const int num_clusters = gridDim.x / C.tiles_per_cluster;
    if (args.groups.tile_counter == nullptr) {
      tile += num_clusters;
    } else if (takes_for_cluster<C>(args)) {
      tiles.wanted.wait(i % 2);
      if (lane == 0) tile = num_clusters + atomicAdd(args.groups.tile_counter, 1);
      tile = __shfl_sync(~0u, tile, 0);
      if constexpr (C.tiles_per_cluster > 1) {
        if (i > 0) tiles.heard.wait((i - 1) % 2);
        const bool tells = 0 < lane && lane < C.tiles_per_cluster;
        store_in_cluster(tells, &tiles.tile, tiles.told, cluster_rank() + (tells ? lane : 0), tile);
      }
    } else if constexpr (C.tiles_per_cluster > 1) {
      const int first = cluster_rank() / C.tiles_per_cluster * C.tiles_per_cluster;
      if (i > 0 && lane == 0) tiles.heard.arrive_in_cluster(first);  // this CTA has read the tile before
      tiles.told.arrive_and_expect(lane == 0, sizeof(int));
      tiles.told.wait(i % 2);
      tile = tiles.tile;
    }
  }
  __device__ TileCoord<C> find() {
    uint32_t found;
    while ((found = __ballot_sync(~0u, tile < tiles_end)) == 0) {
      if (first_segment + kWarp >= num_segments()) return TileCoord<C>::none();
      next_segments();
    }
    const int owner = __ffs(found) - 1;
    const int begin = __shfl_sync(~0u, mine.begin, owner), end = __shfl_sync(~0u, mine.end, owner);
    const int height = token_tiles(begin, end), width = weight_tiles();
    const int in_segment = tile - (__shfl_sync(~0u, tiles_end, owner) - height * width);
    const Cell cell = Cell::at(in_segment, height, width, args.band);
    const int rank = C.tiles_per_cluster == 1 ? 0 : cluster_rank() % C.tiles_per_cluster;

    const int from = first_token_of(begin) + cell.token * C.tile_tokens;
    TileCoord<C> coord;
    coord.first_token = min(from, args.last_token);
    // The last tile must not end within 64 tokens, because TMA could not store them: it overlaps the one before it.
    // What is computed and stored twice is the same.
    if (C.begins_anywhere) {
      const int in_rows = min(end - from, C.wgmma_m);  // the tail is stored without TMA
      coord.first_token = min(coord.first_token, max(begin, end - ceil_div(in_rows, 64) * 64));
    }
    coord.tile = cell.weight * C.tiles_per_cluster + rank;
    const int most = cell.token < height - 1 ? C.tile_tokens : C.most_tokens;
    coord.set_rows(max(begin, coord.first_token), min(end, coord.first_token + most));
    coord.group = __shfl_sync(~0u, mine.group, owner);
    coord.matrix = C.group_layout == GroupLayout::kMasked ? coord.group : 0;
    coord.is_only = height == 1;
    return coord;
  }
  __device__ void next_segments() {
    const int tiles_before = __shfl_sync(~0u, tiles_end, kWarp - 1);
    first_segment += kWarp, mine = next_mine;
    next_mine = segment<C.group_layout>(args.groups, first_segment + kWarp + lane);  // long before it is needed
    tiles_end = token_tiles(mine.begin, mine.end) * weight_tiles();
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int before = __shfl_up_sync(~0u, tiles_end, step);
      if (lane >= step) tiles_end += before;
    }
    tiles_end += tiles_before;
  }
  __device__ int num_segments() const {
    return C.group_layout == GroupLayout::kSegments ? num_found : args.groups.num_segments;
  }
  // Where the first tile of a segment begins.
  static __device__ int first_token_of(int begin) { return C.begins_anywhere ? begin : begin / 4 * 4; }
  static __device__ int token_tiles(int begin, int end) {
    return begin < end ? ceil_div(max(end - first_token_of(begin) - C.tail, 1), C.tile_tokens) : 0;
  }
  __device__ int weight_tiles() const { return C.swap_ab ? args.num_row_tiles : args.num_col_tiles; }
};

// What `StaticScheduler` is in a dense GEMM, for the roles that read what the scheduling warp finds.
template <GemmConfig C>
struct SchedulerClient : Ring<C> {
  static constexpr int k_begin = 0;
  static constexpr int kWantedAhead = 4;  // stages

  Shared<C>* shared;
  const Arguments* args;
  int k_end;
  TileCoord<C> coord;
  int k;  // which stage along K
  int num_tiles = 0;

  __device__ SchedulerClient(Shared<C>& memory, const Arguments& arguments)
      : shared(&memory), args(&arguments), k_end(ceil_div(args->num_k_blocks, C.k_blocks_per_stage)) {}
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
    fence_cta();  // the arrival would overtake the reads: see `release` in pipeline.cuh
    tiles.empty[slot].arrive();
    ++num_tiles, k = 0;
  }
  __device__ void next() {
    this->next_stage();
    if (++k == k_end) next_tile();
  }
  // One warp asks for the tile after this one. It asks early enough, since the answer comes from memory, but no
  // earlier, since other clusters cannot take in the end what this one has taken.
  __device__ int wants_at() const { return max(0, k_end - kWantedAhead); }
  __device__ void want_next() {
    if (k == wants_at() && takes_for_cluster<C>(*args)) shared->tiles.wanted.arrive();
  }
};

template <GemmConfig C>
using SchedulerOf = typename Select<C.grouped, SchedulerClient<C>, StaticScheduler<C>>::Type;
