// The warps that load: a ring of stages, filled for the math warpgroups of gemm.cu.
#pragma once
#include "groups.cuh"
#include "tile.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"

// One k-block of one operand. Where CTAs share it, each loads a slice for all of them.
template <bool kShared, class C>
__device__ void load_operand(bool elected, int rank, uint8_t* destination, const TensorMap& map, int size,
                             Barrier& full, int k_block, int first, int matrix, L2Policy policy) {
  if constexpr (!kShared || C::kShare == 1) {
    tma_load<C::kDimensions>(elected, destination, map, full, {k_block * kBlock, first, matrix}, policy);
  } else {
    const int share = rank % C::kShare, slice = size / C::kShare;
    const uint16_t ranks = ((1 << C::kShare) - 1) << (rank - share);
    tma_load_multicast<C::kDimensions>(elected, destination + share * slice * kBlock, map, full,
                                       {k_block * kBlock, first + share * slice, matrix}, ranks);
  }
}

template <class C>
struct WeightMaps {
  TensorMap of_piece[C::kPieces];  // they differ in the size of the box
};
template <class C>
struct TokenMaps {
  TensorMap of_box[C::kTokenBoxes];  // and so do these
};
// Who finds the tiles. Of a dense GEMM, every warp does.
template <class C>
using WalkOf = typename Select<C::kGrouped, Follower<C>, Walk<C>>::Type;
template <class C>
using SchedulerOf = typename Select<C::kGrouped, Scheduler<C>, NoScheduler>::Type;

// One warp: both operands of every stage and the scales of its tokens, by TMA.
template <class C>
struct Loader {
  using Piece = typename Place<C>::Piece;

  Shared<C>& shared;
  const TokenMaps<C>& token_maps;
  const TensorMap& token_scale_map;
  const WeightMaps<C>& weight_maps;
  bool elected;
  int rank = C::kShare == 1 ? 0 : cluster_rank();
  L2Policy usual = L2Policy::usual(), read_once = L2Policy::read_once();

  template <class Call>
  static __device__ void for_each_piece(Call call) {
#pragma unroll
    for (int weight = 0; weight < C::kWeights; weight += C::kSmallestPiece) {
      const auto piece = Place<C>::piece(weight);
      if (weight == piece.begin) call(piece);
    }
  }
  __device__ void load_weights(const WalkOf<C>& walk) {
    // Segments that are blocks of rows share weights, and nobody knows which.
    const bool is_read_once = C::kGrouped && C::kKind != Kind::kRows && walk.place.is_only;
    shared.full[walk.stage].arrive_and_expect(elected, walk.args->stage_bytes[walk.place.token_box()]);
#pragma unroll
    for (int i = 0; i < C::kDepth; ++i) {
      for_each_piece([&](Piece piece) {
        load_operand<C::kShareRows == C::kWeightsAreRows, C>(
            elected, rank, shared.weight_operand(walk.stage, i) + piece.begin * kBlock,
            weight_maps.of_piece[piece.index], piece.size, shared.full[walk.stage], walk.k * C::kDepth + i,
            walk.place.weight(*walk.args, piece.begin), walk.place.group,
            is_read_once ? read_once : usual);
      });
    }
  }
  __device__ void load_tokens(const WalkOf<C>& walk) {
#pragma unroll
    for (int i = 0; i < C::kDepth; ++i) {
      load_operand<C::kShareRows != C::kWeightsAreRows, C>(elected, rank, shared.token_operand(walk.stage, i),
                                                           token_maps.of_box[walk.place.token_box()],
                                                           walk.place.box_tokens(),
                                                           shared.full[walk.stage], walk.k * C::kDepth + i,
                                                           walk.place.first_token, walk.place.matrix, usual);
    }
    const int first_scale = walk.place.first_token - walk.place.scale_offset();
    tma_load<C::kDimensions>(elected, &shared.tokens[walk.stage], token_scale_map, shared.full[walk.stage],
                             {first_scale, walk.k * C::kDepth, walk.place.matrix}, usual);
  }

  // Of a grouped GEMM, while the numbers of tokens are on their way: the operands that the first stage takes if all
  // groups have as many tokens as expected, into the L2 cache. If it takes others, nothing is lost but a little time
  // of the memory. Where tokens lie is known only if each group has a matrix of its own; and they are fetched in vain
  // while a kernel may still write them.
  __device__ void prefetch_expected(const Arguments& args) {
    constexpr bool kSharesWeights = C::kTogether > 1 && !C::kSameTokens;
    const int height = args.groups.expected_tiles, width = C::kWeightsAreRows ? args.num_row_tiles : args.num_col_tiles;
    if (kSharesWeights || C::kKind == Kind::kRows || height == 0) return;
    const int tile = blockIdx.x / C::kTogether, rank = blockIdx.x % C::kTogether;
    Place<C> place;
    place.group = tile / (height * width);
    if (place.group >= args.groups.num_groups) return;
    const Cell cell = Cell::at(tile - place.group * height * width, height, width);
    place.tile = cell.weight * C::kTogether + rank;
    place.first_token = min(cell.token * C::kTokenStep, args.last_token);
    if (C::kSharesTokens) place.first_token += rank * (C::kTokens / C::kShare);  // its slice
    const bool with_tokens = C::kKind == Kind::kMasked && !args.programmatic;
#pragma unroll
    for (int i = 0; i < C::kDepth; ++i) {
      for_each_piece([&](Piece piece) {
        const Corner at{i * kBlock, place.weight(args, piece.begin), place.group};
        tma_prefetch(elected, weight_maps.of_piece[piece.index], at);
      });
      const Corner at{i * kBlock, place.first_token, place.group};
      tma_prefetch(elected && with_tokens, token_maps.of_box[C::kTokenBoxes - 1], at);
    }
  }

  // The first round. Memory answers about in the order in which it is asked, so each stage is asked for
  // as a whole. But while the previous kernel may still write the tokens, the first `num_ahead` stages, of one tile,
  // get their weights: of a dense GEMM only one, behind the weights of more the tokens would wait.
  __device__ void fill(WalkOf<C>& walk, bool programmatic) {
    int num_ahead = programmatic;
    bool waits = true;
    if constexpr (C::kGrouped) {
      waits = walk.args->groups.bounds_are_old;  // else the scheduler has waited
      num_ahead = programmatic && waits && !walk.done() ? min(C::kStages, walk.k_end) : 0;
    }
    auto ahead = walk;
#pragma unroll 1
    for (int i = 0; i < num_ahead; ++i, ++ahead.k, ahead.next_stage()) load_weights(ahead);
    if (waits) wait_for_previous_kernel();
#pragma unroll 1
    for (int i = 0; i < C::kStages && !walk.done(); ++i, walk.next()) {
      if constexpr (C::kGrouped) walk.want_next();
      if (i >= num_ahead) load_weights(walk);
      load_tokens(walk);
    }
    let_next_kernel_start();
  }
  __device__ void load_until(WalkOf<C>& walk, int k_end) {
#pragma unroll 1
    for (; walk.k < k_end; ++walk.k, walk.next_stage()) {
      shared.empty[walk.stage].wait(walk.parity ^ 1);
      load_weights(walk), load_tokens(walk);
    }
  }
  // All other rounds.
  __device__ void run(WalkOf<C> walk) {
#pragma unroll 1
    for (; !walk.done(); walk.next_tile()) {
      if constexpr (C::kGrouped) {
        load_until(walk, walk.wants_at());
        walk.want_next();
      }
      load_until(walk, walk.k_end);
    }
    if constexpr (C::kGrouped && C::kShare > 1) {  // this CTA stays until all signals to it have arrived
#pragma unroll 1
      for (int i = 0; i < C::kStages; ++i, walk.next_stage()) shared.empty[walk.stage].wait(walk.parity ^ 1);
    }
  }
};

// One warp: the weight scales of every stage, whatever their strides; TMA would ask for aligned rows. What it
// does for a stage is little, since the math warps beside it lose what it takes.
template <class C>
struct ScaleLoader {
  static constexpr int kChunk = kWarp / C::kDepth;  // stages whose scales are read at once: a lane, a k-block
  // Where tiles are taken from a counter, stages of a chunk that are handed out only when the next one is being read. For
  // that the next tile is needed: it must have been asked for by then, or this warp and the one that asks wait for each
  // other.
  static constexpr int kKept = 2;
  static_assert(kKept <= kWantedAhead, "see above");
  const Arguments& args;
  const int lane;
  struct {
    float scales[C::kWeightScales];
  } chunk;

  // The chunk that begins where `walk` is. Beyond the edges any finite scale will do: the operands are zeros.
  __device__ void read(const WalkOf<C>& walk) {
    const int last_block = (args.num_weights - 1) / kBlock;
    const int64_t k_block = min(walk.k * C::kDepth + lane, args.num_k_blocks - 1);
    int64_t first = k_block * args.weight_scale_stride_k;
    if constexpr (C::kGrouped) first += walk.place.group * args.groups.weight_scale_stride;
#pragma unroll
    for (int weight = 0; weight < C::kWeights; weight += C::kSmallestPiece) {
      if (!Place<C>::begins_scale(weight)) continue;
      const int64_t block = min(walk.place.weight(args, weight) / kBlock, last_block);
      const float* scales = C::kGateUp && weight > 0 ? args.activation.up_scales : args.weight_scales;
      chunk.scales[Place<C>::scale(weight)] = scales[first + block * args.weight_scale_stride];
    }
  }
  // After `read` of the first chunk. Each is read while the one before it is handed out.
  __device__ void run(Shared<C>& shared, WalkOf<C> walk) {
#pragma unroll 1
    while (!walk.done()) {
      const auto read_before = chunk;
      const int num_stages = min(walk.k_end - walk.k, kChunk);
      int i = 0;
      const auto hand_out = [&](int end) {
#pragma unroll 1
        for (; i < end; ++i, walk.next_stage()) {
          shared.empty[walk.stage].wait(walk.parity ^ 1);
          if (lane / C::kDepth == i) {
#pragma unroll
            for (int j = 0; j < C::kWeightScales; ++j)
              shared.weights[walk.stage].scales[lane % C::kDepth][j] = read_before.scales[j];
          }
          shared.full[walk.stage].arrive();
        }
      };
      if (C::kGrouped && args.groups.taken != nullptr) hand_out(num_stages - kKept);
      walk.k += num_stages;
      if (walk.k == walk.k_end) walk.next_tile();
      if (!walk.done()) read(walk);
      hand_out(num_stages);
    }
  }
};
