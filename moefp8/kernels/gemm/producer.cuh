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
  if constexpr (!kShared || C::kMulticast == 1) {
    tma_load<C::kDimensions>(elected, destination, map, full, {k_block * kBlock, first, matrix}, policy);
  } else {
    const int share = rank % C::kMulticast, slice = size / C::kMulticast;
    const uint16_t ranks = ((1 << C::kMulticast) - 1) << (rank - share);
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
using SchedulerOf = typename Select<C::kGrouped, SchedulerClient<C>, StaticScheduler<C>>::Type;
template <class C>
using GroupedSchedulerOf = typename Select<C::kGrouped, GroupedScheduler<C>, NoGroupedScheduler>::Type;

// One warp: both operands of every stage and the scales of its tokens, by TMA.
template <class C>
struct Producer {
  using Piece = typename TileCoord<C>::Piece;

  Shared<C>& shared;
  const TokenMaps<C>& token_maps;
  const TensorMap& token_scale_map;
  const WeightMaps<C>& weight_maps;
  bool elected;
  int rank = C::kMulticast == 1 ? 0 : cluster_rank();
  L2Policy usual = L2Policy::usual(), read_once = L2Policy::read_once();

  template <class Call>
  static __device__ void for_each_piece(Call call) {
#pragma unroll
    for (int weight = 0; weight < C::kWeights; weight += C::kSmallestPiece) {
      const auto piece = TileCoord<C>::piece(weight);
      if (weight == piece.begin) call(piece);
    }
  }
  __device__ void load_weights(const SchedulerOf<C>& schedule) {
    // Segments that are blocks of rows share weights, and nobody knows which.
    const bool is_read_once = C::kGrouped && C::kGroupLayout != GroupLayout::kRows && schedule.coord.is_only;
    shared.full[schedule.stage].arrive_and_expect(elected, schedule.args->stage_bytes[schedule.coord.token_box()]);
#pragma unroll
    for (int i = 0; i < C::kKBlocksPerStage; ++i) {
      for_each_piece([&](Piece piece) {
        load_operand<C::kMulticastRows == C::kSwapAb, C>(
            elected, rank, shared.weight_operand(schedule.stage, i) + piece.begin * kBlock,
            weight_maps.of_piece[piece.index], piece.size, shared.full[schedule.stage], schedule.k * C::kKBlocksPerStage + i,
            schedule.coord.weight(*schedule.args, piece.begin), schedule.coord.group,
            is_read_once ? read_once : usual);
      });
    }
  }
  __device__ void load_tokens(const SchedulerOf<C>& schedule) {
#pragma unroll
    for (int i = 0; i < C::kKBlocksPerStage; ++i) {
      load_operand<C::kMulticastRows != C::kSwapAb, C>(elected, rank, shared.token_operand(schedule.stage, i),
                                                           token_maps.of_box[schedule.coord.token_box()],
                                                           schedule.coord.box_tokens(),
                                                           shared.full[schedule.stage], schedule.k * C::kKBlocksPerStage + i,
                                                           schedule.coord.first_token, schedule.coord.matrix, usual);
    }
    const int first_scale = schedule.coord.first_token - schedule.coord.scale_offset();
    tma_load<C::kDimensions>(elected, &shared.tokens[schedule.stage], token_scale_map, shared.full[schedule.stage],
                             {first_scale, schedule.k * C::kKBlocksPerStage, schedule.coord.matrix}, usual);
  }

  // Of a grouped GEMM, while the numbers of tokens are on their way: the operands that the first stage takes if all
  // groups have as many tokens as expected, into the L2 cache. If it takes others, nothing is lost but a little time
  // of the memory. Where tokens lie is known only if each group has a matrix of its own; and they are fetched in vain
  // while a kernel may still write them.
  __device__ void prefetch_expected(const Arguments& args) {
    constexpr bool kSharesWeights = C::kTogether > 1 && !C::kSameTokens;
    const int height = args.groups.expected_tiles, width = C::kSwapAb ? args.num_row_tiles : args.num_col_tiles;
    if (kSharesWeights || C::kGroupLayout == GroupLayout::kRows || height == 0) return;
    const int tile = blockIdx.x / C::kTogether, rank = blockIdx.x % C::kTogether;
    TileCoord<C> coord;
    coord.group = tile / (height * width);
    if (coord.group >= args.groups.num_groups) return;
    const Cell cell = Cell::at(tile - coord.group * height * width, height, width);
    coord.tile = cell.weight * C::kTogether + rank;
    coord.first_token = min(cell.token * C::kTokenStep, args.last_token);
    if (C::kMulticastsTokens) coord.first_token += rank * (C::kTokens / C::kMulticast);  // its slice
    const bool with_tokens = C::kGroupLayout == GroupLayout::kMasked && !args.programmatic;
#pragma unroll
    for (int i = 0; i < C::kKBlocksPerStage; ++i) {
      for_each_piece([&](Piece piece) {
        const Corner at{i * kBlock, coord.weight(args, piece.begin), coord.group};
        tma_prefetch(elected, weight_maps.of_piece[piece.index], at);
      });
      const Corner at{i * kBlock, coord.first_token, coord.group};
      tma_prefetch(elected && with_tokens, token_maps.of_box[C::kTokenBoxes - 1], at);
    }
  }

  // The first round. Memory answers about in the order in which it is asked, so each stage is asked for
  // as a whole. But while the previous kernel may still write the tokens, the first `num_ahead` stages, of one tile,
  // get their weights: of a dense GEMM only one, behind the weights of more the tokens would wait.
  __device__ void fill(SchedulerOf<C>& schedule, bool programmatic) {
    int num_ahead = programmatic;
    bool waits = true;
    if constexpr (C::kGrouped) {
      waits = schedule.args->groups.bounds_ready;  // else the scheduler has waited
      num_ahead = programmatic && waits && !schedule.done() ? min(C::kStages, schedule.k_end) : 0;
    }
    auto ahead = schedule;
#pragma unroll 1
    for (int i = 0; i < num_ahead; ++i, ++ahead.k, ahead.next_stage()) load_weights(ahead);
    if (waits) wait_for_previous_kernel();
#pragma unroll 1
    for (int i = 0; i < C::kStages && !schedule.done(); ++i, schedule.next()) {
      if constexpr (C::kGrouped) schedule.want_next();
      if (i >= num_ahead) load_weights(schedule);
      load_tokens(schedule);
    }
    let_next_kernel_start();
  }
  __device__ void load_until(SchedulerOf<C>& schedule, int k_end) {
#pragma unroll 1
    for (; schedule.k < k_end; ++schedule.k, schedule.next_stage()) {
      shared.empty[schedule.stage].wait(schedule.parity ^ 1);
      load_weights(schedule), load_tokens(schedule);
    }
  }
  // All other rounds.
  __device__ void run(SchedulerOf<C> schedule) {
#pragma unroll 1
    for (; !schedule.done(); schedule.next_tile()) {
      if constexpr (C::kGrouped) {
        load_until(schedule, schedule.wants_at());
        schedule.want_next();
      }
      load_until(schedule, schedule.k_end);
    }
    if constexpr (C::kGrouped && C::kMulticast > 1) {  // this CTA stays until all signals to it have arrived
#pragma unroll 1
      for (int i = 0; i < C::kStages; ++i, schedule.next_stage()) shared.empty[schedule.stage].wait(schedule.parity ^ 1);
    }
  }
};

// One warp: the weight scales of every stage, whatever their strides; TMA would ask for aligned rows. What it
// does for a stage is little, since the math warps beside it lose what it takes.
template <class C>
struct ScaleProducer {
  static constexpr int kChunk = kWarp / C::kKBlocksPerStage;  // stages whose scales are read at once: a lane, a k-block
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

  // The chunk that begins where `schedule` is. Beyond the edges any finite scale will do: the operands are zeros.
  __device__ void read(const SchedulerOf<C>& schedule) {
    const int last_block = (args.num_weights - 1) / kBlock;
    const int64_t k_block = min(schedule.k * C::kKBlocksPerStage + lane, args.num_k_blocks - 1);
    int64_t first = k_block * args.weight_scale_stride_k;
    if constexpr (C::kGrouped) first += schedule.coord.group * args.groups.weight_scale_stride;
#pragma unroll
    for (int weight = 0; weight < C::kWeights; weight += C::kSmallestPiece) {
      if (!TileCoord<C>::begins_scale(weight)) continue;
      const int64_t block = min(schedule.coord.weight(args, weight) / kBlock, last_block);
      const float* scales = C::kGateUp && weight > 0 ? args.activation.up_scales : args.weight_scales;
      chunk.scales[TileCoord<C>::scale(weight)] = scales[first + block * args.weight_scale_stride];
    }
  }
  // After `read` of the first chunk. Each is read while the one before it is handed out.
  __device__ void run(Shared<C>& shared, SchedulerOf<C> schedule) {
#pragma unroll 1
    while (!schedule.done()) {
      const auto read_before = chunk;
      const int num_stages = min(schedule.k_end - schedule.k, kChunk);
      int i = 0;
      const auto hand_out = [&](int end) {
#pragma unroll 1
        for (; i < end; ++i, schedule.next_stage()) {
          shared.empty[schedule.stage].wait(schedule.parity ^ 1);
          if (lane / C::kKBlocksPerStage == i) {
#pragma unroll
            for (int j = 0; j < C::kWeightScales; ++j)
              shared.weights[schedule.stage].scales[lane % C::kKBlocksPerStage][j] = read_before.scales[j];
          }
          shared.full[schedule.stage].arrive();
        }
      };
      if (C::kGrouped && args.groups.tile_counter != nullptr) hand_out(num_stages - kKept);
      schedule.k += num_stages;
      if (schedule.k == schedule.k_end) schedule.next_tile();
      if (!schedule.done()) read(schedule);
      hand_out(num_stages);
    }
  }
};
