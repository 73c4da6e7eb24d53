// What a variant of the GEMM is made of, what it keeps in shared memory, and the order in which the
// CTAs of the dense one walk over tiles and K. "Row" and "column" are WGMMA's, see gemm.cu.
#pragma once
#include "mbarrier.cuh"

constexpr int kBlock = 128;  // of K: one scale, one promotion

enum class Bias { kNone, kFloat, kBFloat16, kHalf };

// Whether all tokens have the same weights, or what tells which group a token is of: see `Groups`. Known to the
// compiler, for each instruction that a CTA meets on the way to its first load costs time: no cache holds it.
enum class GroupLayout {
  kDense,
  kOffsets,  // group g has the rows from bounds[g] to bounds[g + 1]
  kMasked,   // group g has the first bounds[g] rows of its own matrix
  kRows,     // row i is of the group bounds[i], or of none if that is -1; of each 128 rows, the first are of one group
             // and the others of none
};

__host__ __device__ constexpr int gcd(int x, int y) { return y == 0 ? x : gcd(y, x % y); }

__host__ __device__ constexpr int count_bits(int x) { return x == 0 ? 0 : x % 2 + count_bits(x / 2); }

__host__ __device__ constexpr int largest_divisor(int x, int limit) {
  return x % limit == 0 ? limit : largest_divisor(x, limit - 1);
}

// What the configuration chooses.
template <int kWgmmaM_, int kWgmmaN_, int kParts_, int kKBlocksPerStage_, int kStages_, int kMulticast_, bool kMulticastRows_, int kSplitK_,
          int kNumProductBuffers_, int kCtasPerSm_, bool kSwapAb_, Bias kBias_, GroupLayout kGroupLayout_, bool kGateUp_,
          int kTail_, int kSharedBytes_>
struct Config {
  static constexpr int kWgmmaM = kWgmmaM_;             // of the CTA's tile: 64 for each math warpgroup that has rows
  static constexpr int kWgmmaN = kWgmmaN_;             // of the CTA's tile
  static constexpr int kParts = kParts_;           // WGMMAs beside each other that cover kWgmmaN; kStacked: kWgmmaM
  static constexpr int kKBlocksPerStage = kKBlocksPerStage_;           // k-blocks of a stage
  static constexpr int kStages = kStages_;         // stages in flight
  static constexpr int kMulticast = kMulticast_;           // neighbouring CTAs that share one operand by multicast
  static constexpr bool kMulticastRows = kMulticastRows_;  // which one
  static constexpr int kSplitK = kSplitK_;           // CTAs that divide K among them, and meet in one tile
  static constexpr int kNumProductBuffers = kNumProductBuffers_;       // of products that a warpgroup has under way
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kSwapAb = kSwapAb_;
  static constexpr Bias kBias = kBias_;
  static constexpr GroupLayout kGroupLayout = kGroupLayout_;
  static constexpr bool kGrouped = kGroupLayout != GroupLayout::kDense;  // each group of tokens has weights of its own
  // Half of the tile's weights are gate's, the others up's for the same outputs: epilogue/swiglu.cuh.
  static constexpr bool kGateUp = kGateUp_;
  // Tokens behind the kWgmmaM of the tile, which are columns of a math warpgroup of their own: tail.cuh.
  static constexpr int kTail = kTail_;
  static constexpr int kSharedBytes = kSharedBytes_;  // as the host counts them

  static constexpr int kDimensions = kGrouped ? 3 : 2;  // of a, b, d
  static constexpr bool kStacked = kGateUp && kSwapAb;  // each math warpgroup has rows of gate and of up
  static constexpr int kRowGroups = kWgmmaM / 64 / (kStacked ? kParts : 1);  // math warpgroups: those with rows
  static constexpr int kMathGroups = kRowGroups + (kTail > 0);             // all of them
  static constexpr int kThreads = (kMathGroups + 1) * kWarpgroup;
  // Of a thread, if registers move. At launch all have the same number, a multiple of 8; these use it up. A scheduler
  // needs more than those that load.
  static constexpr int kMathRegisters =
      kTail > 0 ? 184 : (kMathGroups == 2 ? 240 : kMathGroups == 3 ? 160 : 112) - (kGrouped ? 8 : 0);
  static constexpr int kTailRegisters = 104;
  static constexpr int kLoadRegisters =
      kTail > 0 ? 40 : (kMathGroups == 2 ? 24 : 32) + (kGrouped ? 8 * kMathGroups : 0);
  static constexpr int kPartN = kStacked ? kWgmmaN : kWgmmaN / kParts;
  static constexpr int kTokenStep = kSwapAb ? kWgmmaN : kWgmmaM;  // from one tile to the next of a group
  static constexpr int kTokens = kTokenStep + kTail;                  // of the last one
  // Whether a tile may begin at any token: then its box of scales begins up to three tokens before it.
  static constexpr bool kBeginsAnywhere = kGrouped && !kSwapAb;
  static constexpr int kTokenScales = kTokens + (kBeginsAnywhere ? 4 : 0);
  // Of a group that ends within a tile, some math warpgroups may have no tokens. And only as many times 64 are loaded
  // as there are, or all with a tail, where no other CTA needs more.
  static constexpr bool kHasShortTiles = kBeginsAnywhere && kMathGroups > 1;
  static constexpr bool kMulticastsTokens = kMulticast > 1 && kMulticastRows != kSwapAb;
  // Registers do not suffice to activate a tile while products of the next one are under way.
  static constexpr bool kStoresFirst = kGateUp && kRowGroups == 3 && kParts == 1;
  static constexpr int kTokenBoxes = kHasShortTiles ? kMathGroups : 1;
  static constexpr int kWeights = kSwapAb ? kWgmmaM : kWgmmaN;
  static constexpr int kOutputs = kGateUp ? kWeights / 2 : kWeights;  // values of a token that the tile computes
  static constexpr int kTailBoxes = kGateUp ? 1 : kWeights / 64;      // in which the tail leaves, 64 outputs wide
  // A tile of 64 outputs and its neighbour are computed side by side, by two CTAs of a cluster: they have one scale.
  static constexpr bool kSharesScaleWithPeer = kGateUp && kOutputs != kBlock;
  static constexpr int kTogether = kSharesScaleWithPeer ? 2 : kMulticast;  // neighbouring CTAs that walk over the same tiles
  static constexpr bool kSameTokens = kMulticastsTokens || kSharesScaleWithPeer;  // whether it is the tokens that these have in common
  // The weights of a tile come in pieces: see `TileCoord`.
  static constexpr int kBlockWeights = kWeights / kBlock * kBlock;  // of the first piece, if there is a whole block
  static constexpr int kPieces = kGateUp ? 2 : (kBlockWeights > 0) + count_bits(kWeights % kBlock);
  static constexpr int kSmallestPiece = kGateUp ? kOutputs : gcd(kWeights, kBlock);
  static constexpr int kWeightScales = kGateUp ? 2 : kWeights / kBlock + count_bits(kWeights % kBlock);

  // The sums of the CTAs that divided K meet. Each writes out a slice of the columns, as many as get equal
  // slices.
  static constexpr int kOwners = largest_divisor(kWgmmaN / 8, kSplitK);
  static constexpr int kStoreN = kSplitK == 1 ? kPartN : kWgmmaN / kOwners;
  // The output leaves in boxes that are one swizzle span wide.
  static constexpr int kBoxCols = kGateUp ? kOutputs : kSwapAb ? 64 : gcd(kStoreN, 64);
  static constexpr int kBoxRows = kSwapAb ? kStoreN : 64;
  static constexpr int kBoxBytes = kBoxCols * kBoxRows * (kGateUp ? 1 : 2) / (kStacked ? kMathGroups : 1);
  static constexpr int kBoxes = kSwapAb || kGateUp ? 1 : kStoreN / kBoxCols;

  static_assert(kWgmmaM % 64 == 0 && kWgmmaM <= 256 && kWgmmaN <= 256 && kPartN % 8 == 0, "WGMMA and TMA boxes");
  static_assert(kNumProductBuffers == 1 || (kNumProductBuffers == 2 && kParts <= 2), "a part keeps its coord among the buffers");
  static_assert(kTokenScales <= 256, "TMA boxes");
  static_assert(!kGrouped || (kSplitK == 1 && kBias == Bias::kNone), "what a grouped GEMM has no use for");
  static_assert(!kGateUp || (kGrouped && kParts * kPartN == (kStacked ? 2 * kWgmmaN : kWgmmaN)), "see `swiglu_epilogue`");
  static_assert(!kGateUp || kOutputs * (kSharesScaleWithPeer ? 2 : 1) == kBlock, "a scale for each 128 outputs");
  static_assert(!kGateUp || kMulticast == 1 || (kMulticast == 2 && kMulticastsTokens && kSharesScaleWithPeer), "who shares is the peer");
  static_assert(kTail == 0 || (kBeginsAnywhere && kWgmmaM == 128 && kWgmmaN == 128), "64 rows of weights, twice");
  static_assert(kTail == 0 || kParts * kNumProductBuffers * kKBlocksPerStage * kMulticast * kCtasPerSm == 1, "what registers suffice for");
  static_assert(kTail % 8 == 0 && kTail <= 32, "WGMMA's columns, and registers");
  static_assert(kStages >= kNumProductBuffers, "a batch may wait for the stage after that of the batch before it");
  static_assert((kMulticastRows == kSwapAb ? kSmallestPiece : kTokens) % (8 * kMulticast) == 0, "swizzle atoms");
};

// Which rows of a grouped GEMM are of which group: `bounds` says so, and a kernel before it may have written that.
struct Groups {
  const int* bounds;
  int num_groups;
  int num_segments;    // groups, or 128 rows
  int num_tokens;      // rows of a, or of each of its matrices
  int expected_tiles;  // of tokens in a group
  int64_t weight_scale_stride;
  void* d;
  int64_t d_row_stride, d_matrix_stride;  // in elements
  int bounds_ready;  // whether they were complete before the previous kernel began
  // How many tiles were taken: zero before the kernel starts. Each cluster has its first one, and takes another when it
  // needs one. Null: it has every n-th.
  int* tile_counter;
};

// What gate and up become: E4M3 with a scale for each token and 128 outputs.
struct Activation {
  const float* up_scales;  // as `weight_scales`, which are gate's
  float limit;             // of gate from above, of up on both sides; may be infinite
  float* scales;           // [matrices, outputs/128, pitch]
  int64_t pitch;
};

constexpr int kMaxTokenBoxes = 4;

struct Arguments {
  const float* weight_scales;  // [N/128, K/128], any strides, counted in elements
  int64_t weight_scale_stride, weight_scale_stride_k;
  const void* bias;  // [N]
  int num_weights, num_k_blocks;
  int last_token;                    // where the last tile of tokens begins
  int stage_bytes[kMaxTokenBoxes];   // that TMA writes, with each box of tokens
  int num_row_tiles, num_col_tiles;  // of a cluster: kMulticast CTAs are one tile; grouped, those of tokens are a bound
  int band;                          // of a dense GEMM: row tiles that are walked together, for the L2 cache
  int64_t inverse;                   // 2^33 / band, rounded up: a division takes long. Exact for all
                                     // x < 2^33 / band: (x * inverse) >> 33 == x / band
  int programmatic;                  // whether the previous kernel may still write the tokens
  Groups groups;
  Activation activation;
};

// Which tokens and weights a tile takes. The tokens lie side by side. The weights come in pieces: as many
// whole blocks as fit, then half a block, a quarter, and so on, as the bits of kWeights say. The first pieces of
// all tiles lie before all second ones, and so on. So each begins at a multiple of its size, and none takes
// part of one block and part of the next:
//
//   kWeights = 112, 8 tiles:  64: 0 1|2 3|4 5|6 7|  32: 0 1 2 3|4 5 6 7|  16: 0 1 2 3 4 5 6 7|   (| ends a block)
//
// Promotion takes 3 scales. Were the tiles to lie side by side, it could change scales after any 16 weights.
template <class C>
struct TileCoord {
  int first_token;
  int tile;  // of weights
  // Of a grouped GEMM:
  int rows;     // which tokens of the tile are the group's: the first, and the one after the last << 16
  int matrix;   // of tokens
  int group;    // of weights
  int is_only;  // whether no other tile of its segment takes these weights

  static __device__ TileCoord none() { return {-1}; }
  __device__ bool is_none() const { return first_token < 0; }
  __device__ void set_rows(int begin, int end) {
    rows = begin < end ? begin - first_token | (end - first_token) << 16 : 0;
  }
  __device__ int scale_offset() const { return C::kBeginsAnywhere ? first_token % 4 : 0; }
  __device__ int begin() const { return rows & 0xffff; }
  __device__ int end() const { return rows >> 16; }
  // Which of the boxes holds them, 64 tokens for each math warpgroup or, the last one, all of the tile's.
  __device__ int token_box() const { return C::kTokenBoxes == 1 ? 0 : max(0, (end() - 1) / 64); }
  __device__ int box_tokens() const {
    return C::kTokenBoxes == 1 ? C::kTokens : min(64 * (token_box() + 1), C::kTokens);
  }
  __device__ bool has_tail() const { return end() > C::kWgmmaM; }

  struct Piece {
    int begin, size, index;
  };
  // The one with the weight `i` of a tile. A constant `i` makes all of these constant.
  static __device__ Piece piece(int i) {
    if (C::kGateUp) return {i / C::kOutputs * C::kOutputs, C::kOutputs, i / C::kOutputs};
    if (i < C::kBlockWeights) return {0, C::kBlockWeights, 0};
    const int size = 1 << (31 - __clz(i ^ C::kWeights));  // the highest bit in which they differ
    const int begin = i & -size;
    return {begin, size, (C::kBlockWeights > 0) + __popc(begin % kBlock)};
  }
  // A whole block has one scale, and so has every smaller piece.
  static __device__ int scale(int i) {
    return C::kGateUp ? piece(i).index : i / kBlock + __popc(piece(i).begin % kBlock);
  }
  static __device__ bool begins_scale(int i) { return i == 0 || scale(i) != scale(i - 8); }  // they come in 8s

  // Where the weight `i` of the tile lies among all weights; of gate and up, among its own.
  __device__ int weight(const Arguments& args, int i) const {
    if (C::kGateUp) return tile * C::kOutputs + i % C::kOutputs;
    constexpr int kOfCluster = C::kMulticastRows == C::kSwapAb ? 1 : C::kMulticast;
    const int num_tiles = (C::kSwapAb ? args.num_row_tiles : args.num_col_tiles) * kOfCluster;
    return piece(i).begin * num_tiles + tile * piece(i).size + i - piece(i).begin;
  }
};

// Where the other CTAs that divided K put their sums of this one's slice.
template <class C, bool kNeeded = (C::kSplitK > 1)>
struct Inbox {
  float4 inbox[(C::kSplitK - 1) * C::kStoreN / 8][C::kMathGroups * kWarpgroup];
};
template <class C>
struct Inbox<C, false> {};

// Through which the scheduler of a grouped GEMM tells the others where the next tiles are.
constexpr int kTileSlots = 4;
template <class C, bool kNeeded = C::kGrouped>
struct Tiles {
  struct alignas(16) {
    TileCoord<C> coord;
  } coords[kTileSlots];
  Barrier full[kTileSlots], empty[kTileSlots];
  // Where tiles are taken: soon the next one is needed. In a cluster, the first CTA takes it and tells the others.
  Barrier wanted, told, heard;
  int tile;

  __device__ void init() {
    for (int i = 0; i < kTileSlots; ++i) full[i].init(1), empty[i].init(C::kMathGroups * kWarpgroup + 2 * kWarp);
    wanted.init(kWarp);
    if constexpr (C::kTogether > 1) told.init(1), heard.init(C::kTogether - 1);
  }
};
template <class C>
struct Tiles<C, false> {};

// Tokens of a tile that are columns: of weights that are rows all of them, else the tail.
template <class C>
struct Columns {
  static constexpr int kFirstGroup = C::kTail > 0 ? C::kRowGroups : 0, kGroups = C::kMathGroups - kFirstGroup;
  static constexpr int kFirst = C::kTail > 0 ? C::kWgmmaM : 0, kSize = C::kTail > 0 ? C::kTail : C::kWgmmaN;
};

// Where the magnitudes meet that decide a token's scale, where they are in several warps or CTAs. Of what peers
// deliver, there is room for two tiles in turn.
template <class C, bool kNeeded = C::kSharesScaleWithPeer && !C::kStacked>
struct RowMagnitudes {
  alignas(16) uint32_t of_peer[2][C::kWgmmaM];
};
template <class C>
struct RowMagnitudes<C, false> {};
template <class C, bool kNeeded = C::kStacked || (C::kGateUp && C::kTail > 0)>
struct ColumnMagnitudes {
  alignas(16) uint32_t of_warps[C::kSharesScaleWithPeer ? 2 : 1][kBlock / 16][Columns<C>::kSize];  // a warp has 16 outputs
};
template <class C>
struct ColumnMagnitudes<C, false> {};
template <class C, bool kNeeded = C::kSharesScaleWithPeer>
struct Deliveries {
  Barrier delivered[2][C::kMathGroups];
};
template <class C>
struct Deliveries<C, false> {};
template <class C>
struct Magnitudes : RowMagnitudes<C>, ColumnMagnitudes<C>, Deliveries<C> {};

// The tail on its way out.
template <class C, bool kNeeded = (C::kTail > 0)>
struct TailOutput {
  alignas(128) uint8_t tail[C::kTailBoxes][C::kTail * 64 * (C::kGateUp ? 1 : 2)];
};
template <class C>
struct TailOutput<C, false> {};

template <class C>
struct Shared : Inbox<C> {
  __device__ uint8_t* token_operand(int stage, int i) { return C::kSwapAb ? cols[stage][i] : rows[stage][i]; }
  __device__ uint8_t* weight_operand(int stage, int i) { return C::kSwapAb ? rows[stage][i] : cols[stage][i]; }

  alignas(1024) uint8_t rows[C::kStages][C::kKBlocksPerStage][(C::kWgmmaM + C::kTail) * kBlock];  // required by the 128 B swizzle
  alignas(1024) uint8_t cols[C::kStages][C::kKBlocksPerStage][C::kWgmmaN * kBlock];
  alignas(1024) uint8_t output[C::kRowGroups][C::kBoxes][C::kBoxBytes];
  [[no_unique_address]] TailOutput<C> tail_output;
  struct alignas(128) {  // 128 B: required by TMA
    float scales[C::kKBlocksPerStage][C::kTokenScales];
  } tokens[C::kStages];
  struct alignas(16) {
    float scales[C::kKBlocksPerStage][C::kWeightScales];
  } weights[C::kStages];
  [[no_unique_address]] Tiles<C> tiles;
  [[no_unique_address]] Magnitudes<C> magnitudes;
  alignas(8) Barrier full[C::kStages];
  Barrier empty[C::kStages];
  Barrier delivered;
};

// Which of the stages is next, and the parity of its barriers' phase.
template <class C>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next_stage() {
    if (++stage == C::kStages) stage = 0, parity ^= 1;
  }
};

// Walks over the stages of all tiles of this CTA, in the order in which they are computed; the
// loading and the multiplying warps each walk for themselves and meet at the barriers.
template <class C>
struct StaticScheduler : Ring<C> {
  const Arguments* args;
  int k_begin, k_end, num_clusters, tile;
  TileCoord<C> coord;
  int k;  // which stage along K

  __device__ StaticScheduler(const Shared<C>&, const Arguments& arguments) : args(&arguments) {
    const int split = C::kSplitK == 1 ? 0 : cluster_rank() / C::kMulticast;
    const int num_k = ceil_div(args->num_k_blocks, C::kKBlocksPerStage);  // < 2^24
    k_begin = num_k * split / C::kSplitK;
    k_end = num_k * (split + 1) / C::kSplitK;
    num_clusters = gridDim.x / (C::kMulticast * C::kSplitK);
    tile = blockIdx.x / (C::kMulticast * C::kSplitK);
    start_tile();
  }
  __device__ void start_tile() {
    const int share = C::kMulticast == 1 ? 0 : cluster_rank() % C::kMulticast;
    int row, col;
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
    if (C::kMulticastRows) col = col * C::kMulticast + share;
    else row = row * C::kMulticast + share;
    const int tokens = C::kSwapAb ? col : row;
    coord.first_token = min(tokens * C::kTokens, args->last_token);  // some are computed and stored twice, the same
    coord.tile = C::kSwapAb ? row : col;
    k = k_begin;
  }
  __device__ void start() {}
  // Of all tiles of this CTA.
  __device__ int num_stages() const {
    const int num_tiles = ceil_div(args->num_row_tiles * args->num_col_tiles - tile, num_clusters);
    return num_tiles * (k_end - k_begin);
  }
  __device__ bool done() const { return tile >= args->num_row_tiles * args->num_col_tiles; }
  __device__ void next_tile() {
    tile += num_clusters;
    if (!done()) start_tile();
  }
  __device__ void next() {
    this->next_stage();
    if (++k == k_end) next_tile();
  }
};

// Where this math thread stands: its warpgroup, and the fragments of a 64-row WGMMA.
template <class C>
struct Thread {
  int group, index, warp, lane;
  int row, col;  // of the fragments: row and row + 8; col and col + 1 of 8
  int peer = -1;  // of the CTAs that share an operand, the one to which this lane signals, if any
  __device__ bool has_rows(const TileCoord<C>& coord) const {
    return coord.begin() < (group + 1) * 64 && group * 64 < coord.end();
  }
  __device__ Thread()
      : group(warp_uniform(threadIdx.x / kWarpgroup)),
        index(threadIdx.x % kWarpgroup),
        warp(index / kWarp),
        lane(index % kWarp),
        row(group * 64 + warp * 16 + lane / 4),
        col(lane % 4 * 2) {
    if constexpr (C::kMulticast > 1) {
      const int rank = cluster_rank(), other = rank / C::kMulticast * C::kMulticast + lane;
      if (lane < C::kMulticast && other != rank) peer = other;
    }
  }
};

// This thread has read the stage: the CTAs that load it may fill it again. Every lane says so to its
// own CTA, whose loaders overwrite the scales that it has read; one lane to each other CTA, which
// overwrites what only the WGMMAs have read, and those are complete for the whole warp.
template <class C>
__device__ void release(Shared<C>& shared, int stage, const Thread<C>& thread) {
  // Nothing waits for reads in flight before an arrival, and it may overtake them while others keep the
  // shared memory busy. Where tokens are rows, the machine code has the scales in registers by then, as a
  // test reads there; of two batches not those of the last one of a tile: see `end` in `consume`, gemm.cu.
  if constexpr (C::kSwapAb) fence_cta();
  shared.empty[stage].arrive();
  if constexpr (C::kMulticast > 1) {
    if (thread.peer >= 0) shared.empty[stage].arrive_in_cluster(thread.peer);
  }
}

// A math warpgroup has no tokens in a tile. On each of its stages the others wait for it all the same.
template <class C, class StaticScheduler>
__device__ void skip_tile(Shared<C>& shared, StaticScheduler& schedule, const Thread<C>& thread) {
#pragma unroll 1
  for (int k = schedule.k_begin; k < schedule.k_end; ++k, schedule.next_stage()) {
    shared.full[schedule.stage].wait(schedule.parity);
    release(shared, schedule.stage, thread);
  }
}
