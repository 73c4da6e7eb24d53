// The warps that fill the stages of the pipeline. `Producer` loads both operands and the scales of the tokens by TMA,
// `ScaleProducer` the scales of the weights.
#pragma once
#include "pipeline.cuh"
#include "tma.cuh"

template <GemmConfig C>
struct WeightMaps {
  TensorMap of_piece[C.num_weight_pieces];  // they differ in the size of the box
};
template <GemmConfig C>
struct TokenMaps {
  TensorMap of_box[C.num_token_boxes];  // and so do these
};

// One warp. Its elected lane issues the loads.
template <GemmConfig C>
struct Producer {
  using Piece = typename TileCoord<C>::Piece;

  Shared<C>& shared;
  const TokenMaps<C>& token_maps;
  const TensorMap& token_scale_map;
  const WeightMaps<C>& weight_maps;
  bool elected;
  int rank = C.multicast > 1 ? cluster_rank() : 0;
  L2Policy usual = L2Policy::usual(), read_once = L2Policy::read_once();

  template <class Call>
  static __device__ void for_each_piece(Call call) {
#pragma unroll
    for (int weight = 0; weight < C.tile_weights; weight += C.smallest_piece) {
      const auto piece = TileCoord<C>::piece(weight);
      if (weight == piece.begin) call(piece);
    }
  }
  // Loads one k-block of one operand; with multicast, a slice of the tokens for both CTAs of the cluster.
  template <bool kMulticast>
  __device__ void load_operand(uint8_t* destination, const TensorMap& map, int size, Barrier& full, int k_block,
                               int first, int matrix, L2Policy policy) {
    if constexpr (kMulticast) {
      const int half = rank % 2, slice = size / 2;
      const uint16_t ranks = 3 << (rank - half);
      tma_load_multicast(elected, destination + half * slice * kBlock, map, full,
                         {k_block * kBlock, first + half * slice, matrix}, ranks);
    } else {
      tma_load<C.dimensions>(elected, destination, map, full, {k_block * kBlock, first, matrix}, policy);
    }
  }
  __device__ void load_weights(const SchedulerOf<C>& schedule) {
    const TileCoord<C>& coord = schedule.coord;
    // Blocks of kRows may have the same weights as other blocks, and nobody knows which.
    const bool is_read_once = C.grouped && C.group_layout != GroupLayout::kRows && coord.is_only;
    shared.full[schedule.stage].arrive_and_expect(elected, schedule.args->stage_bytes[coord.token_box()]);
#pragma unroll
    for (int i = 0; i < C.k_blocks_per_stage; ++i) {
      for_each_piece([&](Piece piece) {
        load_operand<false>(shared.weight_operand(schedule.stage, i) + piece.begin * kBlock,
                            weight_maps.of_piece[piece.index], piece.size, shared.full[schedule.stage],
                            schedule.k * C.k_blocks_per_stage + i, coord.weight(*schedule.args, piece.begin),
                            coord.group, is_read_once ? read_once : usual);
      });
    }
  }
  __device__ void load_tokens(const SchedulerOf<C>& schedule) {
    const TileCoord<C>& coord = schedule.coord;
#pragma unroll
    for (int i = 0; i < C.k_blocks_per_stage; ++i) {
      load_operand<(C.multicast > 1)>(shared.token_operand(schedule.stage, i), token_maps.of_box[coord.token_box()],
                                      coord.box_tokens(), shared.full[schedule.stage],
                                      schedule.k * C.k_blocks_per_stage + i, coord.first_token, coord.matrix, usual);
    }
    const int first_scale = coord.first_token - coord.scale_offset();
    tma_load<C.dimensions>(elected, &shared.tokens[schedule.stage], token_scale_map, shared.full[schedule.stage],
                           {first_scale, schedule.k * C.k_blocks_per_stage, coord.matrix}, usual);
  }

  // While the numbers of tokens of a grouped GEMM are on their way, this prefetches into the L2 cache what the first
  // stage takes if all groups have as many tokens as expected. If it takes something else, only a little time of the
  // memory is lost. Tokens are prefetched only if each group has a matrix of its own, so that their place is known, and
  // not while a kernel may still write them.
  __device__ void prefetch_expected(const Arguments& args) {
    const int height = args.groups.expected_tiles, width = C.swap_ab ? args.num_row_tiles : args.num_col_tiles;
    if (C.group_layout == GroupLayout::kRows || height == 0) return;
    const int tile = blockIdx.x / C.tiles_per_cluster, rank = blockIdx.x % C.tiles_per_cluster;
    TileCoord<C> coord;
    coord.group = tile / (height * width);
    if (coord.group >= args.groups.num_groups) return;
    const Cell cell = Cell::at(tile - coord.group * height * width, height, width, args.band);
    coord.tile = cell.weight * C.tiles_per_cluster + rank;
    coord.first_token = min(cell.token * C.tile_tokens, args.last_token);
    if (C.multicast > 1) coord.first_token += rank * (C.most_tokens / 2);
    const bool with_tokens = C.group_layout == GroupLayout::kMasked && !args.programmatic;
#pragma unroll
    for (int i = 0; i < C.k_blocks_per_stage; ++i) {
      for_each_piece([&](Piece piece) {
        const Corner at{i * kBlock, coord.weight(args, piece.begin), coord.group};
        tma_prefetch(elected, weight_maps.of_piece[piece.index], at);
      });
      const Corner at{i * kBlock, coord.first_token, coord.group};
      tma_prefetch(elected && with_tokens, token_maps.of_box[C.num_token_boxes - 1], at);
    }
  }

  // The first round over the stages. Memory answers about in the order in which it is asked, so each stage is asked
  // for as a whole. But while the previous kernel may still write the tokens, the first `num_ahead` stages, of one
  // tile, get their weights: in a dense GEMM only one stage, since the tokens would wait behind the weights of more.
  __device__ void fill(SchedulerOf<C>& schedule, bool programmatic) {
    int num_ahead = programmatic;
    bool waits = true;
    if constexpr (C.grouped) {
      waits = schedule.args->groups.bounds_ready;  // else the scheduler has waited
      num_ahead = programmatic && waits && !schedule.done() ? min(C.stages, schedule.k_end) : 0;
    }
    auto ahead = schedule;
#pragma unroll 1
    for (int i = 0; i < num_ahead; ++i, ++ahead.k, ahead.next_stage()) load_weights(ahead);
    if (waits) wait_for_previous_kernel();
#pragma unroll 1
    for (int i = 0; i < C.stages && !schedule.done(); ++i, schedule.next()) {
      if constexpr (C.grouped) schedule.want_next();
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
      if constexpr (C.grouped) {
        load_until(schedule, schedule.wants_at());
        schedule.want_next();
      }
      load_until(schedule, schedule.k_end);
    }
    if constexpr (C.multicast > 1) {  // this CTA stays until all signals to it have arrived
#pragma unroll 1
      for (int i = 0; i < C.stages; ++i, schedule.next_stage()) shared.empty[schedule.stage].wait(schedule.parity ^ 1);
    }
  }
};

// One warp. The scales of the weights may have any strides, and TMA would ask for aligned rows. The warp does little
// for a stage, since it takes issue slots from the math warps beside it.
template <GemmConfig C>
struct ScaleProducer {
  static constexpr int kChunk = kWarp / C.k_blocks_per_stage;  // stages that are read at once: a k-block by each lane
  // Where tiles are taken from a counter, so many stages of a chunk are handed out only while the next chunk is being
  // read. That read needs the next tile, which must have been asked for by then, or this warp and the one that asks
  // would wait for each other.
  static constexpr int kKept = 2;
  static_assert(!C.grouped || kKept <= SchedulerClient<C>::kWantedAhead, "see above");
  const Arguments& args;
  const int lane;
  struct {
    float scales[C.weight_scales];
  } chunk;

  // Reads the chunk that begins where `schedule` is. Beyond the edges any finite scale will do: the operands are zeros.
  __device__ void read(const SchedulerOf<C>& schedule) {
    const int last_block = (args.num_weights - 1) / kBlock;
    const int64_t k_block = min(schedule.k * C.k_blocks_per_stage + lane, args.num_k_blocks - 1);
    int64_t first = k_block * args.weight_scale_stride_k;
    if constexpr (C.grouped) first += schedule.coord.group * args.groups.weight_scale_stride;
#pragma unroll
    for (int weight = 0; weight < C.tile_weights; weight += C.smallest_piece) {
      if (!TileCoord<C>::begins_scale(weight)) continue;
      const int64_t block = min(schedule.coord.weight(args, weight) / kBlock, last_block);
      const float* scales = C.gate_up && weight > 0 ? args.gate_up.up_scales : args.weight_scales;
      chunk.scales[TileCoord<C>::scale(weight)] = scales[first + block * args.weight_scale_stride];
    }
  }
  // Runs after `read` of the first chunk. Each further chunk is read while the one before it is handed out.
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
          if (lane / C.k_blocks_per_stage == i) {
#pragma unroll
            for (int j = 0; j < C.weight_scales; ++j)
              shared.weights[schedule.stage].scales[lane % C.k_blocks_per_stage][j] = read_before.scales[j];
          }
          shared.full[schedule.stage].arrive();
        }
      };
      if (C.grouped && args.groups.tile_counter != nullptr) hand_out(num_stages - kKept);
      schedule.k += num_stages;
      if (schedule.k == schedule.k_end) schedule.next_tile();
      if (!schedule.done()) read(schedule);
      hand_out(num_stages);
    }
  }
};
