// What tells one variant of the GEMM from another, and the arguments that the host gives to all of them.
//
// WGMMA computes D[64, N] from a row operand and a column operand. Either may hold the tokens: the rows as a rule; with
// `swap_ab` the columns, for small M, since WGMMA's rows come in 64s and its columns in 8s. "Rows" and "columns" in
// this folder are always WGMMA's; "tokens" are the M rows of a, "weights" the N rows of b.
#pragma once
#include "activation.cuh"
#include "base.cuh"

constexpr int kBlock = 128;  // elements of K that have one scale and one promotion

enum class Bias { kNone, kFloat, kBFloat16, kHalf };

// What says which group a token belongs to, see `Groups`. It is a compile-time constant because each instruction on
// the way to the first load costs time: no cache holds it yet.
enum class GroupLayout {
  kDense,    // there are no groups: all tokens have the same weights
  kOffsets,  // group g has the rows from bounds[g] to bounds[g + 1]
  kMasked,   // group g has the first bounds[g] rows of its own matrix
  kRows,     // row i is of the group bounds[i], or of none if that is -1; of each 128 rows, the first are of one group
             // and the others of none
  kSegments, // bounds is the list of segments that segments.cu has found in such rows
};

__host__ __device__ constexpr int gcd(int x, int y) { return y == 0 ? x : gcd(y, x % y); }

// The template argument of the kernel. config.py fills in the first two parts, under the same names, and documents
// how they are derived: whatever the host needs as well is derived there and nowhere else. What only the kernel needs
// is derived in the third part.
struct GemmConfig {
  // ---- Chosen by the host ----
  int wgmma_m, wgmma_n;     // the tile of a CTA; 64 of wgmma_m for each math warpgroup but the tail's
  int stages;               // how many the pipeline has
  int parts;                // WGMMAs that cover the tile of a warpgroup: side by side or, if stacked, below each other
  int k_blocks_per_stage;
  int multicast;            // 2: the two CTAs of a cluster load half of the tokens each, for both; else 1
  int split_k;              // CTAs of a cluster that divide K among them
  int ctas_per_sm;
  bool swap_ab;             // weights are the row operand, tokens the column operand
  int num_product_buffers;  // sets of WGMMA accumulators: with two, one is promoted while the other is computed
  bool grouped;             // each group of tokens has weights of its own
  bool gate_up;             // half of a tile's weights are gate's, half up's for the same outputs; the activation follows
  int tail;                 // tokens behind wgmma_m, the columns of a math warpgroup of their own: tail.cuh
  bool halves_tiles;        // the last tiles may be halves: 64 tokens, and a part of the weights for each warpgroup
  bool saves_gate_up;       // gate and up are also stored in BF16, for a backward
  Bias bias;
  GroupLayout group_layout;
  Activation activation;    // of gate and up

  // ---- Derived by the host, which needs it too ----
  bool stacked;                 // a warpgroup has 64 rows of gate and 64 of up
  int row_warpgroups;           // math warpgroups without the tail's
  int math_warpgroups;
  int threads;
  bool shares_scale_with_peer;  // the other CTA of the cluster has the other 64 of the 128 outputs that share a scale
  int tiles_per_cluster;        // two CTAs of a cluster may compute tiles of the same tokens, side by side
  int tile_tokens;              // how far apart tiles of tokens begin
  int most_tokens;              // tokens of a tile: the last one of a group has the tail, too
  int tile_weights;
  int outputs;                  // values that a tile computes for each token
  int num_weight_pieces;        // see `TileCoord`
  int weight_scales;            // how many a tile has in one k-block
  bool begins_anywhere;         // a tile may begin at any token, and its box of scales up to three tokens before it
  int num_token_boxes;          // one for each number of 64 tokens that a group, or half a tile, may have left
  int token_scales;             // how many one row of that box has
  int slice_owners;             // CTAs that get a slice of the sums when K is divided
  int store_n;                  // columns that are stored at once: of a part, or of such a slice
  int store_box_weights, store_box_tokens;  // the box of one TMA store: as wide as one span of the swizzle
  int shared_bytes;             // as the host counts them; gemm.cu asserts that the compiler agrees

  // ---- Derived here, for the kernel alone ----
  // An initialiser calls no function: NVRTC would not take what follows it for constant.
  int dimensions = grouped ? 3 : 2;  // how many a, b and d have
  int part_n = stacked ? wgmma_n : wgmma_n / parts;
  bool has_short_tiles = grouped && num_token_boxes > 1;  // a group may end before the rows of some warpgroups
  // A warpgroup reads the scales of the next stage under the products of this one. Where stages are what it waits for,
  // it would wait longer: deep ones of small tiles.
  bool reads_scales_ahead = num_product_buffers == 1 && row_warpgroups == 2 && k_blocks_per_stage == 1 && !swap_ab;
  // Registers do not suffice to run the epilogue of a tile while products of the next one are under way.
  bool stores_first = gate_up && !stacked &&
                      ((row_warpgroups == 3 && parts == 1) ||
                       (row_warpgroups == 1 && parts == 2 && saves_gate_up && bias != Bias::kNone));
  int block_weights = tile_weights / kBlock * kBlock;  // the size of the first piece, if there is a whole block
  int smallest_piece = gate_up ? outputs : tile_weights % kBlock == 0 ? kBlock : tile_weights & -tile_weights;
  int store_boxes = swap_ab || gate_up ? 1 : store_n / store_box_weights;
  int store_box_bytes = store_box_weights * store_box_tokens * (gate_up ? 1 : 2);
  int tail_boxes = gate_up ? 1 : tile_weights / 64;  // each has 64 outputs
  // Registers of a thread once warpgroups have exchanged them. At launch all threads have the same number, a multiple
  // of 8, and these use it up. A scheduler needs more registers than the warps that load.
  bool moves_registers = math_warpgroups > 1 && ctas_per_sm == 1;
  int math_registers = tail > 0 ? 184 : (math_warpgroups == 2 ? 240 : 160) - (grouped ? 8 : 0);
  int tail_registers = 104;
  int producer_registers = tail > 0 ? 40 : (math_warpgroups == 2 ? 24 : 32) + (grouped ? 8 * math_warpgroups : 0);
};

template <GemmConfig C>
__host__ __device__ constexpr bool is_valid() {
  static_assert(C.wgmma_m % 64 == 0 && C.wgmma_n <= 256, "TMA boxes");
  static_assert(C.part_n % (C.part_n > 128 ? 16 : 8) == 0 && C.part_n <= 192, "wgmma.cuh");
  static_assert(C.math_warpgroups <= 3, "registers");
  static_assert(C.token_scales <= 256, "TMA boxes");
  static_assert(C.stages >= (C.reads_scales_ahead ? 2 : C.num_product_buffers),
                "a warpgroup may wait for the stage after one that it has not released");
  static_assert(C.num_product_buffers == 1 || (C.num_product_buffers == 2 && C.parts <= 2 && !C.swap_ab),
                "a part keeps its buffer");
  static_assert(!C.halves_tiles || (C.parts == 2 && C.row_warpgroups == 2 && C.k_blocks_per_stage == 1 && !C.swap_ab),
                "a warpgroup for each part");
  static_assert(!C.halves_tiles || C.part_n <= C.block_weights, "the first part has a single scale");
  static_assert(C.split_k == 1 || C.parts == 1, "the sums of a tile are divided among CTAs as a whole");
  static_assert(C.grouped == (C.group_layout != GroupLayout::kDense), "what says which group a token is of");
  static_assert(C.grouped ? C.split_k == 1 : !C.gate_up && C.multicast == 1 && C.tail == 0,
                "what only dense, and only grouped GEMMs have");
  static_assert(C.multicast == 1 || (C.multicast == 2 && !C.swap_ab && C.most_tokens % 16 == 0),
                "each CTA loads whole swizzle atoms");
  static_assert(!C.gate_up || C.outputs * (C.shares_scale_with_peer ? 2 : 1) == kBlock, "a scale for 128 outputs");
  static_assert(!C.gate_up || C.multicast == 1 || C.shares_scale_with_peer, "both are the same other CTA");
  static_assert(!C.stacked || (C.wgmma_m == 128 && C.parts == 2), "one warpgroup, with gate and up");
  static_assert(C.tail == 0 || (C.begins_anywhere && C.wgmma_m == 128 && C.wgmma_n == 128), "twice 64 weights");
  static_assert(C.tail == 0 || (C.parts * C.num_product_buffers * C.k_blocks_per_stage * C.ctas_per_sm == 1 &&
                                C.multicast == 1 && C.tail % 8 == 0 && C.tail <= 32), "what registers suffice for");
  return true;
}

// Which rows of a grouped GEMM are of which group: `bounds` says so, and an earlier kernel may have written it.
struct Groups {
  const int* bounds;
  int num_groups;
  int num_segments;    // groups, or blocks of 128 rows; of kSegments the most that there may be
  int num_tokens;      // rows of a, or of each of its matrices
  int expected_tiles;  // tiles of tokens in a group
  int64_t weight_scale_stride;
  void* d;
  int64_t d_row_stride, d_matrix_stride;  // in elements
  int bounds_ready;   // whether `bounds` was complete before the previous kernel began
  // Counts the tiles that were taken, from zero. A cluster begins with the tile of its own index, and takes another
  // from the counter when it needs one. Null: the n-th cluster of c has the tiles n, n + c, n + 2c, ...
  int* tile_counter;
};

// What up has of its own, and where activated values go: E4M3 with a scale for each token and 128 outputs.
struct GateUp {
  const float* up_scales;  // with the layout of `weight_scales`, which are gate's
  ActivationArguments activation;
  float* scales;           // [matrices, outputs/128, pitch]
  int64_t pitch;
  uint8_t* saved;          // of `saves_gate_up`: BF16 [tokens, 2, outputs]
  int64_t saved_row_bytes; // the pitch of rows of outputs, a multiple of 16
};

constexpr int kMaxTokenBoxes = 4;

struct Arguments {
  const float* weight_scales;  // [N/128, K/128], any strides, counted in elements
  int64_t weight_scale_stride, weight_scale_stride_k;
  const void* bias;  // contiguous: [N], or [groups, N], or of gate and up [groups, 2, N], gate first
  int num_weights, num_k_blocks;
  int last_token;                    // where the last tile of tokens begins
  int stage_bytes[kMaxTokenBoxes];   // what TMA writes into a stage, with each box of tokens
  int num_row_tiles, num_col_tiles;  // tiles of clusters; a grouped GEMM has at most so many of tokens
  int num_whole_tiles;               // of a dense GEMM: those before the halves
  int band;                          // row tiles of a dense GEMM, tiles of tokens of a group, that are walked
                                     // together, for the L2 cache
  int64_t inverse;                   // 2^33 / band, rounded up, since a division takes long. For all
                                     // x < 2^33 / band, (x * inverse) >> 33 == x / band exactly
  int programmatic;                  // whether the previous kernel may still write the tokens
  Groups groups;
  GateUp gate_up;
};
