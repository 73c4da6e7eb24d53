// Plan, quantize and dispatch on Hopper: each token goes to the rows of its experts.
//
// Eight threads hold a block of 128 elements of a token, 16 neighbouring ones each. They read and quantize it once, and
// write its codes and its scale to each row of the token. Where tokens come as codes, these and their scales are copied.
// Where a warp can hold the choices of all tokens, a kernel of its own finds their rows without counts.
#include "floats.cuh"
#include "plan.cuh"

struct Arguments {
  Routing routing;
  const uint8_t* x;        // [T, H]
  int64_t x_row_bytes;     // the pitch of its rows
  uint8_t* rows;           // [R, H]
  int64_t row_pitch;       // their pitch, in bytes
  float* row_scales;       // [H/128, pitch]; with max_m [E, H/128, pitch]; rows innermost
  uint32_t scale_pitch;
  uint32_t hidden_size, num_k_blocks;
  uint32_t part_blocks;     // k-blocks of a CTA
  uint32_t num_parts;       // CTAs of a chunk of tokens
  uint32_t group;           // k-blocks that all tokens of the chunk have behind them before the next ones begin: 2^n
  Divisor parts, in_group;  // they divide by num_parts, and by the blocks of a group
  uint32_t num_chunks;
  uint32_t* counts;  // [chunks, slots / 2], if an earlier kernel has counted
  int* zeros;        // [2], for the kernels that follow
  float min_amax;    // a block's largest magnitude counts as at least this
  const uint8_t* x_scales;                           // float [T, H/128], where x is of codes
  int64_t x_scale_token_bytes, x_scale_block_bytes;  // the distances from one to the next
};

// What `Floats` is, of a block of codes, which pass with their scale as they are.
struct Codes {
  static constexpr bool kAreCodes = true;
  struct Given {
    float scale_inv;
  };
  uint4 x;
  Given given;

  // Past the end of the block come its last codes again.
  template <bool kVectorized>
  __device__ void load(const Arguments& args, uint32_t token, uint32_t k_block, uint32_t column, uint32_t width) {
    const uint8_t* block = args.x + token * args.x_row_bytes + static_cast<int64_t>(k_block) * kBlock;
    const uint8_t* scale = args.x_scales + token * args.x_scale_token_bytes + k_block * args.x_scale_block_bytes;
    given.scale_inv = *reinterpret_cast<const float*>(scale);
    if constexpr (kVectorized) {
      x = *reinterpret_cast<const uint4*>(block + min(column, width - kColumns));
    } else {
      uint32_t words[kColumns / 4] = {};
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        words[i / 4] |= static_cast<uint32_t>(block[min(column + i, width - 1)]) << i % 4 * 8;
      }
      x = {words[0], words[1], words[2], words[3]};
    }
  }
  __device__ Given scale(float) const { return given; }
  __device__ uint4 codes(const Given&) const { return x; }
};

// The block that a thread has a share in. All CTAs work along K, on some k-blocks of all their tokens at a time, so
// that scales of different tokens, which lie side by side, are written at about the same time. A block past the last
// token or k-block is the last one again, which is then written twice.
struct Block {
  uint32_t token, k_block;  // counted in the chunk, and in x
  uint32_t width;           // 128, or less at the end of a row

  __device__ Block(const Arguments& args, uint32_t index, uint32_t num_tokens, uint32_t part) {
    const uint32_t group = args.in_group.quotient(index), in_group = index - group * args.in_group.value;
    token = min(in_group / args.group, num_tokens - 1);
    const uint32_t in_part = min(group * args.group + in_group % args.group, args.part_blocks - 1);
    k_block = min(part * args.part_blocks + in_part, args.num_k_blocks - 1);
    width = min(args.hidden_size - k_block * kBlock, kBlock);
  }
};

// counts[c] = how many choices of the chunk c each expert has.
// Grid: a CTA of 128 threads owns a chunk of tokens.
// Shared memory: as the kernel below.
// Barriers: zeros and counts are each complete before they are read.
// Alignment: any.
template <bool kMerges>
__global__ void __launch_bounds__(128) count_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(16) int memory[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Plan<kMerges> plan(args.routing, blockIdx.x, memory);
  plan.clear();
  plan.count_chunk(args.counts, blockIdx.x);
}

// rows[r], row_scales[r] = quantize_1x128(x[t]) for each row r of token t; if Share is Codes, x[t] and its scales. The
// kernel writes the plan, too.
// Grid: a CTA of up to 1024 threads owns some k-blocks of a chunk of tokens; neighbours the next ones along K.
// Shared memory: 8 B for each slot, 4 B for each place of a row in the chunk, and if kMerges 4 B more; if kRanks 2 B for
// each slot and warp that ranks choices.
// Barriers: zeros, ranks, counts, experts and rows are each complete before they are read; 8 lanes meet in shuffles.
// Alignment: rows and row_pitch of 16 B; vectorized if x and its stride are too and H is a multiple of 8, or of 16 if
// Share is Codes, which ends no load behind a row's last code; else any.
template <class Share, bool kVectorized, bool kMerges, bool kIsCounted>
__global__ void __launch_bounds__(1024, 1) dispatch_kernel(const __grid_constant__ Arguments args) {
  constexpr bool kRanks = kIsCounted && !kMerges;  // ranking few choices takes longer than one warp takes for all
  extern __shared__ __align__(16) int memory[];
  const Routing& routing = args.routing;
  const uint32_t chunk = args.parts.quotient(blockIdx.x), part = blockIdx.x - chunk * args.num_parts;
  const Plan<kMerges> plan(routing, chunk, memory);
  const uint32_t num_tokens = plan.end - plan.begin;
  const uint32_t num_blocks = ceil_div(args.part_blocks, args.group) * args.in_group.value;
  const uint32_t lane = threadIdx.x % kLanes, column = lane * kColumns, step = blockDim.x / kLanes;
  // Where the scale of each choice lies in its column: in the masked layout that is not where its codes lie.
  int* const scale_rows = plan.rows + (kMerges ? num_tokens * routing.rows_of_token : 0);

  struct Held {
    Block block;
    Share share;
  };
  const auto load = [&](uint32_t index, bool is_planned) {
    Held held{Block(args, index, num_tokens, part)};
    const auto [token, k_block, width] = held.block;
    // A rank that receives codes may have room for many more tokens than come, which then have no row.
    if (Share::kAreCodes && is_planned && !plan.has_row(token)) return held;
    held.share.template load<kVectorized>(args, plan.begin + token, k_block, column, width);
    return held;
  };

  if (!kIsCounted) wait_for_previous_kernel();  // tokens and choices are older than counts

  uint32_t index = threadIdx.x / kLanes;
  Held next = load(index, false);  // while the plan is made
  if (!kIsCounted) let_next_kernel_start();
  plan.clear();
  if constexpr (kRanks) plan.rank();
  if constexpr (kIsCounted) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    plan.add_chunks(args.counts, chunk, args.num_chunks);
  } else {
    plan.template count<4>();
  }
  if (blockIdx.x == 0 && threadIdx.x < 2) args.zeros[threadIdx.x] = 0;
  const auto visit = [&](uint32_t i, uint32_t place, uint32_t expert, int row) {
    if (kMerges) scale_rows[place] = row + expert * (args.num_k_blocks * args.scale_pitch - routing.max_m);
    if (part == 0) routing.token_to_row[static_cast<int64_t>(plan.begin) * routing.top_k + i] = row;
  };
  if (threadIdx.x < kWarp) {
    plan.template find_experts<false>();
    if constexpr (!kRanks) plan.find_rows(visit);
  }
  __syncthreads();
  if constexpr (kRanks) {
    plan.find_ranked_rows(visit);
    __syncthreads();
  }

  constexpr uint32_t kInWarp = kWarp / kLanes;
#pragma unroll 1
  for (; index / kInWarp * kInWarp < num_blocks; index += step) {  // the same for all blocks of a warp
    const auto [block, share] = next;
    next = load(index + step, true);
    const auto scale = share.scale(args.min_amax);
    const uint4 codes = share.codes(scale);
    const int* rows = plan.rows + block.token * routing.rows_of_token;
    uint8_t* target = args.rows + static_cast<int64_t>(block.k_block) * kBlock + column;
    if (column < block.width) {
#pragma unroll 2
      for (uint32_t i = 0; i < routing.rows_of_token; i += 4) {  // whole units of 16 B, also at the end of a row
        const int4 v = *reinterpret_cast<const int4*>(rows + i);
        const int four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (four[j] >= 0) *reinterpret_cast<uint4*>(target + four[j] * args.row_pitch) = codes;
        }
      }
    }
    float* scales = args.row_scales + static_cast<int64_t>(block.k_block) * args.scale_pitch;
#pragma unroll 1
    for (uint32_t i = lane; i < routing.top_k; i += kLanes) {
      if (rows[i] >= 0) scales[scale_rows[block.token * routing.rows_of_token + i]] = scale.scale_inv;
    }
  }
}

// The choices of all tokens, one in each lane of a warp, and the row of each.
struct FewChoices {
  uint32_t count, expert;  // expert E: this lane has none
  int row;                 // -1: none

  __device__ FewChoices(const Routing& routing, uint32_t lane) : count(routing.num_tokens * routing.top_k) {
    expert = lane < count ? routing.expert(lane) : routing.num_experts;
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t other = of_lane(expert, i);
      before += other < expert || (other == expert && i < lane);
    }
    row = expert < routing.num_experts ? before : -1;
  }
  static __device__ int of_lane(int value, uint32_t lane) { return __shfl_sync(0xffffffff, value, lane); }
};

// The same as above in the contiguous layout, where all tokens have 32 choices at most.
// Grid: CTAs of 128 threads: num_parts for each token have part_blocks, up to 16, of its k-blocks each; the last one
// writes the plan.
// Shared memory: none.
// Barriers: none. Each warp finds all rows for itself.
// Alignment: as above.
template <class Share, bool kVectorized>
__global__ void __launch_bounds__(128) dispatch_few_kernel(const __grid_constant__ Arguments args) {
  const Routing& routing = args.routing;
  const uint32_t token = args.parts.quotient(blockIdx.x), part = blockIdx.x - token * args.num_parts;
  const uint32_t lane = threadIdx.x % kWarp, column = threadIdx.x % kLanes * kColumns;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (token < routing.num_tokens) {
    const uint32_t in_part = min(threadIdx.x / kLanes, args.part_blocks - 1);
    const uint32_t k_block = min(part * args.part_blocks + in_part, args.num_k_blocks - 1);
    const uint32_t width = min(args.hidden_size - k_block * kBlock, kBlock);
    Share share;
    share.template load<kVectorized>(args, token, k_block, column, width);
    const FewChoices choices(routing, lane);
    const auto scale = share.scale(args.min_amax);
    const uint4 codes = share.codes(scale);
    uint8_t* const target = args.rows + static_cast<int64_t>(k_block) * kBlock + column;
    float* const scales = args.row_scales + static_cast<int64_t>(k_block) * args.scale_pitch;
#pragma unroll 1
    for (uint32_t i = 0; i < routing.top_k; ++i) {
      const int row = FewChoices::of_lane(choices.row, token * routing.top_k + i);
      if (row < 0) continue;
      if (column < width) *reinterpret_cast<uint4*>(target + row * args.row_pitch) = codes;
      if (column == 0) scales[row] = scale.scale_inv;
    }
    return;
  }
  const FewChoices choices(routing, lane);
  if (threadIdx.x < 2) args.zeros[threadIdx.x] = 0;
  if (threadIdx.x < choices.count) routing.token_to_row[threadIdx.x] = choices.row;
#pragma unroll 1
  for (uint32_t expert = threadIdx.x; expert - lane <= routing.num_experts; expert += blockDim.x) {
    uint32_t before = 0, same = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < choices.count; ++i) {
      const uint32_t other = FewChoices::of_lane(choices.expert, i);
      before += other < expert, same += other == expert;
    }
    if (expert <= routing.num_experts) routing.expert_offsets[expert] = before;
    if (expert < routing.num_experts) routing.tokens_per_expert[expert] = same;
  }
}
