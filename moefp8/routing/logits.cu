// The router's logits on Hopper: sums of x * weight in FP32, of x [T, H] in BF16 and weight [E, H] in FP32.
//
// A float is the sum of three BF16 numbers, of eight bits of its significand each. So three WGMMAs in BF16, whose
// products are exact, multiply as one in FP32 would. Experts are WGMMA's rows, which come from registers, where they
// are split; tokens are its columns.
//
// The same numbers are added in the same order however many tokens there are. Along H lie chunks, which WGMMA sums up;
// four chunks are a group, whose sums are added one after the other, and so are those of the groups. What this kernel
// writes are the sums of parts: of single chunks for few tokens, so that many CTAs read weights, else of groups. The
// kernel of the choice adds them up: see `add_up` in top_k.cuh.
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kDepth = 64;  // elements of H in a stage
constexpr int kSteps = kDepth / 16;  // a WGMMA takes 16 of them
constexpr int kChunk = 256, kStagesOfChunk = kChunk / kDepth;
constexpr int kInBox = 32;  // floats of a row in a TMA box: the 128 bytes of the swizzle

struct Arguments {
  float* sums;  // [parts, T, E]
  uint32_t num_tokens, num_experts, num_chunks;
  uint32_t num_parts, expert_tiles, num_items;
};

template <int kTokens, int kExperts>
struct Shared {
  static constexpr int kStages = 4;
  alignas(1024) float weights[kStages][kDepth / kInBox][kExperts * kInBox];
  alignas(1024) uint8_t tokens[kStages][kTokens * kDepth * 2];
  alignas(8) Barrier full[kStages];
  Barrier empty[kStages];
};

// What a CTA sums up: some tokens and experts, over a part of H.
template <int kTokens, int kExperts, int kChunks>
struct Item {
  uint32_t part, first_chunk, end_chunk;
  int first_token, first_expert;

  __device__ Item(const Arguments& args, uint32_t index) {
    const uint32_t rest = index / args.expert_tiles;
    first_expert = (index - rest * args.expert_tiles) * kExperts;
    const uint32_t token_tile = rest / args.num_parts;
    part = rest - token_tile * args.num_parts;
    first_token = token_tile * kTokens;
    first_chunk = part * kChunks;
    end_chunk = min(first_chunk + kChunks, args.num_chunks);
  }
};

// Two neighbouring floats as the sums of three BF16 numbers each, cut off rather than rounded: the rest is exact.
struct Parts {
  uint32_t high, middle, low;

  __device__ explicit Parts(float2 v) {
    high = upper_halves(v);
    v = {without_upper_half(v.x), without_upper_half(v.y)};
    middle = upper_halves(v);
    low = upper_halves({without_upper_half(v.x), without_upper_half(v.y)});
  }

 private:
  static __device__ uint32_t upper_halves(float2 v) {
    return __byte_perm(__float_as_uint(v.x), __float_as_uint(v.y), 0x7632);
  }
  static __device__ float without_upper_half(float x) {
    return __fadd_rn(x, -__uint_as_float(__float_as_uint(x) & 0xffff0000));
  }
};

// WGMMA's rows of 16 elements, as it takes them from the registers of a warpgroup.
struct Rows {
  uint32_t high[4], middle[4], low[4];

  __device__ void split(const float2 (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Parts parts(v[i]);
      high[i] = parts.high, middle[i] = parts.middle, low[i] = parts.low;
    }
  }
};

// The floats of these rows that a lane has. box: 128 bytes of each expert, swizzled; first: of the elements in the box.
__device__ inline void load_rows(float2 (&v)[4], const float* box, int row, int first) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int y = row + i % 2 * 8, x = first + threadIdx.x % 4 * 2 + i / 2 * 8;  // as PTX lays out a row operand
    v[i] = *reinterpret_cast<const float2*>(box + y * kInBox + ((x / 4 ^ y % 8) * 4 + x % 4));
  }
}

// The next stage, and the parity of its barriers' phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The warpgroups that multiply.
template <int kTokens, int kExperts, int kChunks>
__device__ void consume(Shared<kTokens, kExperts>& shared, const Arguments& args) {
  const int group = warp_uniform(threadIdx.x / kWarpgroup), warp = warp_uniform(threadIdx.x % kWarpgroup / kWarp);
  const int lane = threadIdx.x % kWarp, row = group * 64 + warp * 16 + lane / 4;
  const uint32_t tokens = wgmma_descriptor_low(shared.tokens[0]);
  Ring<Shared<kTokens, kExperts>::kStages> ring;
  const auto release = [&](int stage) {
    if (lane == 0) shared.empty[stage].arrive();  // all lanes had their weights when the WGMMAs began
  };
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < args.num_items; index += gridDim.x) {
    const Item<kTokens, kExperts, kChunks> item(args, index);
    float total[kTokens / 2];
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) total[i] = 0;  // were it `sum` at first, NVRTC 12.8 would wait for each WGMMA
#pragma unroll 1
    for (uint32_t chunk = item.first_chunk; chunk < item.end_chunk; ++chunk) {
      float sum[kTokens / 2];
      Rows rows[2];
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0;
      pin_registers(sum);
      int read = -1;  // the stage that the WGMMAs under way read
#pragma unroll 1
      for (int i = 0; i < kStagesOfChunk; ++i, ring.next()) {
        shared.full[ring.stage].wait(ring.parity);
        const uint32_t of_stage = tokens + ring.stage * (sizeof(shared.tokens[0]) / 16);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          float2 floats[4];
          load_rows(floats, shared.weights[ring.stage][step / 2], row, step % 2 * 16);
          wgmma_wait<1>();  // those of the step before the last: its rows are free, and maybe the stage before
          if (step == 1 && i > 0) release(read);
          Rows& of_step = rows[step % 2];
          of_step.split(floats);
          const uint64_t b = wgmma_descriptor(of_stage + step * kDescriptorStepK);
          wgmma_fence();
          wgmma_bf16<kTokens>(sum, of_step.low, b);
          wgmma_bf16<kTokens>(sum, of_step.middle, b);
          wgmma_bf16<kTokens>(sum, of_step.high, b);
          wgmma_commit();
        }
        read = ring.stage;
      }
      wgmma_wait<0>();
      pin_registers(sum);
      release(read);
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) total[i] = __fadd_rn(total[i], sum[i]);
    }
    const int64_t first_row = static_cast<int64_t>(item.part) * args.num_tokens + item.first_token;
    float* sums = args.sums + first_row * args.num_experts + item.first_expert;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const uint32_t token = i / 4 * 8 + lane % 4 * 2 + i % 2, expert = row + i / 2 % 2 * 8;
      if (item.first_token + token < args.num_tokens && item.first_expert + expert < args.num_experts)
        sums[static_cast<int64_t>(token) * args.num_experts + expert] = total[i];
    }
  }
}

// One warp. Weights are loaded before the wait, which would be wrong if the kernel before this one wrote them: the host
// lets this kernel start only when that one is over.
template <int kTokens, int kExperts, int kChunks>
__device__ void produce(Shared<kTokens, kExperts>& shared, const Arguments& args, const TensorMap& token_map,
                        const TensorMap& weight_map) {
  const bool elected = elect_one();
  const L2Policy usual = L2Policy::usual();
  const auto load_weights = [&](int stage, int first_expert, int column) {
    shared.full[stage].arrive_and_expect(elected, sizeof(shared.weights[0]) + sizeof(shared.tokens[0]));
#pragma unroll
    for (int box = 0; box < kDepth / kInBox; ++box)
      tma_load<2>(elected, shared.weights[stage][box], weight_map, shared.full[stage],
                  {column + box * kInBox, first_expert, 0}, usual);
  };
  constexpr int kStages = Shared<kTokens, kExperts>::kStages;
  Ring<kStages> ring;
  int ahead = kStages;  // the weights of the first stages are loaded before anything else
  {
    const Item<kTokens, kExperts, kChunks> item(args, blockIdx.x);
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage)
      load_weights(stage, item.first_expert, item.first_chunk * kChunk + stage * kDepth);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < args.num_items; index += gridDim.x) {
    const Item<kTokens, kExperts, kChunks> item(args, index);
    const int end = item.end_chunk * kChunk;
#pragma unroll 1
    for (int column = item.first_chunk * kChunk; column < end; column += kDepth, ring.next()) {
      if (--ahead < 0) {
        shared.empty[ring.stage].wait(ring.parity ^ 1);
        load_weights(ring.stage, item.first_expert, column);
      }
      tma_load<2>(elected, shared.tokens[ring.stage], token_map, shared.full[ring.stage], {column, item.first_token, 0},
                  usual);
    }
  }
}

// Where several warpgroups multiply, another one gives them its registers.
template <int kExperts>
constexpr int kThreads = kExperts * 2 + (kExperts == 64 ? kWarp : kWarpgroup);

// sums[p, t, e] = the sum of x[t, h] * weight[e, h] over the h of part p.
// Grid: a CTA has some items, at least one. A warp behind those that multiply loads.
// Shared memory: `Shared`.
// Barriers: full[stage]: the producer's elected lane and TMA's bytes; empty[stage]: each warp that multiplies.
// Alignment: addresses and pitches of x and weight multiples of 16 B (TMA).
template <int kTokens, int kExperts, int kChunks>
__global__ void __launch_bounds__(kThreads<kExperts>, kExperts == 64 ? 2 : 1)
    logits_kernel(const __grid_constant__ TensorMap token_map, const __grid_constant__ TensorMap weight_map,
                  const __grid_constant__ Arguments args) {
  static_assert(kTokens % 8 == 0 && kTokens <= 128 && (kExperts == 64 || kExperts == 128));
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<kTokens, kExperts>*>(memory);
  const int warp = warp_uniform(threadIdx.x / kWarp), first_other = kExperts / 16;
  if (warp == first_other) {
    if (elect_one()) {
      for (int i = 0; i < shared.kStages; ++i) shared.full[i].init(1), shared.empty[i].init(kExperts / 16);
      fence_barrier_init();
    }
    __syncwarp();
  }
  __syncthreads();
  if (warp >= first_other) {
    if constexpr (kExperts > 64) give_registers<40>();
    if (warp == first_other) produce<kTokens, kExperts, kChunks>(shared, args, token_map, weight_map);
  } else {
    if constexpr (kExperts > 64) take_registers<232>();
    consume<kTokens, kExperts, kChunks>(shared, args);
  }
}
