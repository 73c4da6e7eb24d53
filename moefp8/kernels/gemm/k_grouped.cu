// The GEMM of gradients in weights on Hopper: d[e][M, N] = sum over the tokens t of expert e of a[:, t] b[:, t]^T. a
// has a scale for 128 tokens of a feature, and so has b, or one for 128 features, too.
//
// a is [B, M, 128] and b [B, N, 128] in E4M3: blocks of 128 tokens, which lie side by side. Only the device knows which
// tokens are of which expert. The kernel is persistent and warp-specialised, as gemm.cu is: one warp loads stages, the
// math warpgroups multiply and promote. A finished tile leaves through shared memory, or from registers where TMA
// cannot address d; where registers suffice, while the first products of the next one are under way.
// docs/design/wgrad.md says why it is so.
#include "mbarrier.cuh"
#include "matrix.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kBlock = 128;  // tokens that have one scale and one promotion
constexpr int kStep = 32;    // tokens of one WGMMA

enum class Output { kBFloat16, kFloat, kAccumulate };  // the last one adds to what d holds in FP32

// The template argument of the kernel; k_grouped_config.py says what each field means.
struct KGroupedConfig {
  int warpgroups;           // of the math
  int parts;                // WGMMAs of 64 rows, one below the other, that each of them has of a tile
  int tile_n;               // columns of a tile
  int stages;
  int multicast;            // 2: the CTAs of a cluster have the same rows, and load half of them each, for both; else 1
  bool blocks_b;            // b has a scale for 128 features as well, not for each of them
  bool stages_output;       // tiles leave through shared memory by TMA, which d must allow; else from registers
  Output output;
  int shared_bytes;         // as the host counts them

  int tile_m = 64 * warpgroups * parts;
  int threads = (warpgroups + 1) * kWarpgroup;
  int stage_bytes = (tile_m + tile_n) * kBlock + (tile_m + (blocks_b ? 4 : tile_n)) * 4;
  int math_registers = warpgroups == 2 ? 240 : 160;
  int producer_registers = warpgroups == 2 ? 24 : 32;
  // Registers do not suffice to store a tile while products of the next one are under way.
  bool stores_first = !blocks_b;
  int element_bytes = output == Output::kBFloat16 ? 2 : 4;
  int box_n = 128 / element_bytes;  // columns of one TMA store: a span of the swizzle
  int output_boxes = tile_n / box_n;
  int output_buffers = stages_output ? (output == Output::kBFloat16 ? parts : 1) : 0;  // of each warpgroup
  int scales_b = blocks_b ? 4 : tile_n;  // in one box: TMA moves 16 bytes at least
};

struct Arguments {
  const int* expert_offsets;  // [E + 1]; null: there is one expert, with num_tokens
  uint8_t* d;                 // [E, M, N]
  int64_t d_matrix_bytes, d_row_bytes;
  int num_experts, num_tokens, m, n;
  int num_row_tiles, num_col_tiles;  // of clusters
  int band;                   // row tiles that are walked together, for the L2 cache
  int aligned;                // whether eight BF16 or two FP32 of a row of d can be written at once
};

template <KGroupedConfig C, bool kNeeded = C.stages_output>
struct Staging {
  alignas(1024) uint8_t boxes[C.warpgroups][C.output_buffers][C.output_boxes][64 * 128];
};
template <KGroupedConfig C>
struct Staging<C, false> {};

template <KGroupedConfig C>
struct Shared {
  // 1024 B: required by the 128 B swizzle.
  alignas(1024) uint8_t rows[C.stages][C.tile_m * kBlock];
  alignas(1024) uint8_t cols[C.stages][C.tile_n * kBlock];
  [[no_unique_address]] Staging<C> output;
  struct alignas(128) {  // 128 B: required by TMA
    float rows[C.tile_m];
    alignas(128) float cols[C.scales_b];
  } scales[C.stages];
  alignas(8) Barrier full[C.stages];
  Barrier empty[C.stages];
};

// The tiles of this CTA, one after the other, expert by expert. All tiles of an expert take equally long, and each
// round over the CTAs has tiles of one or two experts, so nobody waits for others at the end.
template <KGroupedConfig C>
struct Schedule {
  struct Tile {
    int index, expert, row, col;
    int begin, end;  // the expert's tokens
  };
  const Arguments& args;
  Tile next;                    // found while the tile before is computed, since it takes as long as a block of tokens
  int expert, row, col;         // where the tile lies
  int first_block, num_blocks;  // of the expert's tokens
  int block;                    // the next one, counted from the expert's first; -1 is the last one, which comes first:
  int first_steps;              // of its tokens only some exist, which take so many WGMMAs
  int stage = 0;
  uint32_t parity = 0;
  bool done;

  __device__ Schedule(const Arguments& arguments) : args(arguments) {
    find(blockIdx.x / C.multicast);
    next_tile();
  }
  __device__ void next_tile() {
    done = next.index >= args.num_experts * args.num_row_tiles * args.num_col_tiles;
    expert = next.expert, row = next.row, col = next.col;
    // Whatever the offsets are, no other block is read.
    const int begin = min(max(next.begin, 0), args.num_tokens), end = min(next.end, args.num_tokens);
    const int num_tokens = max(end - begin, 0);
    first_block = begin / kBlock + expert;
    num_blocks = ceil_div(num_tokens, kBlock);
    block = -1;
    first_steps = ceil_div(num_tokens - (num_blocks - 1) * kBlock, kStep);
    find(next.index + gridDim.x / C.multicast);
  }
  __device__ void next_stage() {
    if (++stage == C.stages) stage = 0, parity ^= 1;
    ++block;
  }
  __device__ int stage_before() const { return stage == 0 ? C.stages - 1 : stage - 1; }

 private:
  __device__ void find(int index) {
    const uint32_t of_expert = args.num_row_tiles * args.num_col_tiles, rank = C.multicast > 1 ? cluster_rank() : 0;
    next.index = index;
    next.expert = min(uint32_t(index) / of_expert, args.num_experts - 1);
    const uint32_t i = index - next.expert * of_expert, band = args.band, of_band = band * args.num_col_tiles;
    const uint32_t first = i / of_band * band, in_band = i - first * args.num_col_tiles;
    const uint32_t height = max(min(int(band), args.num_row_tiles - int(first)), 1);
    next.row = (first + in_band % height) * C.tile_m;
    next.col = (in_band / height * C.multicast + rank) * C.tile_n;
    next.begin = 0, next.end = args.num_tokens;
    if (args.expert_offsets != nullptr)
      next.begin = args.expert_offsets[next.expert], next.end = args.expert_offsets[next.expert + 1];
  }
};

struct Maps {
  TensorMap a, b, a_scales, b_scales, d;
};

template <KGroupedConfig C>
__device__ void produce(Shared<C>& shared, const Maps& maps, const Arguments& args) {
  const bool elected = elect_one();
  const L2Policy policy = L2Policy::usual();
  Schedule<C> schedule(args);
#pragma unroll 1
  for (; !schedule.done; schedule.next_tile()) {
#pragma unroll 1
    for (; schedule.block < schedule.num_blocks - 1; schedule.next_stage()) {
      const int block = schedule.first_block + (schedule.block < 0 ? schedule.num_blocks - 1 : schedule.block);
      const int stage = schedule.stage;
      Barrier& full = shared.full[stage];
      shared.empty[stage].wait(schedule.parity ^ 1);
      full.arrive_and_expect(elected, C.stage_bytes);
      if constexpr (C.multicast > 1) {
        constexpr int kHalf = C.tile_m / 2;
        const int first = cluster_rank() * kHalf;
        tma_load_multicast(elected, shared.rows[stage] + first * kBlock, maps.a, full, {0, schedule.row + first, block},
                           3);
      } else {
        tma_load<3>(elected, shared.rows[stage], maps.a, full, {0, schedule.row, block}, policy);
      }
      tma_load<3>(elected, shared.cols[stage], maps.b, full, {0, schedule.col, block}, policy);
      tma_load<2>(elected, shared.scales[stage].rows, maps.a_scales, full, {schedule.row, block, 0}, policy);
      tma_load<2>(elected, shared.scales[stage].cols, maps.b_scales, full,
                  {C.blocks_b ? schedule.col / kBlock / 4 * 4 : schedule.col, block, 0}, policy);
    }
  }
  if constexpr (C.multicast > 1) {  // this CTA stays until all signals to it have arrived
#pragma unroll 1
    for (int i = 0; i < C.stages; ++i, schedule.next_stage()) shared.empty[schedule.stage].wait(schedule.parity ^ 1);
  }
}

// ---- The math ----

// Where a math thread stands: its fragments of a 64-row WGMMA lie in rows row and row + 8, and in columns col and
// col + 1 of 8.
template <KGroupedConfig C>
struct Thread {
  const int group = warp_uniform(threadIdx.x / kWarpgroup), lane = threadIdx.x % kWarp;
  const int row = group * 64 * C.parts + threadIdx.x % kWarpgroup / kWarp * 16 + lane / 4, col = lane % 4 * 2;
};

// The scales of a block of tokens that a thread needs, for all parts. Those of single columns are the reason why a
// warpgroup has its parts below each other: they come from shared memory, which the tensor cores wait for, too.
template <KGroupedConfig C, bool kBlocksB = C.blocks_b>
struct Scales {
  float rows[C.parts][2];
  float2 cols[C.tile_n / 8];

  __device__ void load(const Shared<C>& shared, const Schedule<C>& schedule, const Thread<C>& thread) {
    const auto& scales = shared.scales[schedule.stage];
#pragma unroll
    for (int i = 0; i < 2 * C.parts; ++i) rows[i / 2][i % 2] = scales.rows[thread.row + i / 2 * 64 + i % 2 * 8];
#pragma unroll
    for (int j = 0; j < C.tile_n / 8; ++j) cols[j] = *reinterpret_cast<const float2*>(scales.cols + 8 * j + thread.col);
  }
  // That of the i-th product of a thread in a part.
  __device__ float product(int part, int i) const {
    return __fmul_rn(rows[part][i / 2 % 2], i % 2 ? cols[i / 4].y : cols[i / 4].x);
  }
};
template <KGroupedConfig C>
struct Scales<C, true> {
  float rows[C.parts][2];  // times that of all columns

  __device__ void load(const Shared<C>& shared, const Schedule<C>& schedule, const Thread<C>& thread) {
    const auto& scales = shared.scales[schedule.stage];
    const float of_block = scales.cols[schedule.col / kBlock % 4];
#pragma unroll
    for (int i = 0; i < 2 * C.parts; ++i)
      rows[i / 2][i % 2] = __fmul_rn(scales.rows[thread.row + i / 2 * 64 + i % 2 * 8], of_block);
  }
  __device__ float product(int part, int i) const { return rows[part][i / 2 % 2]; }
};

template <KGroupedConfig C>
struct ProductBuffer {
  float products[C.tile_n / 2];

  // Gives the tensor cores the products of one part of a stage. kIsWhole: all tokens of the block exist.
  template <bool kIsWhole>
  __device__ void begin(Shared<C>& shared, const Schedule<C>& schedule, int part, const Thread<C>& thread) {
    const int stage = schedule.stage;
    const uint32_t a = wgmma_descriptor_low(shared.rows[0] + (thread.group * C.parts + part) * 64 * kBlock) +
                       stage * (sizeof(shared.rows[0]) / 16);
    const uint32_t b = wgmma_descriptor_low(shared.cols[0]) + stage * (sizeof(shared.cols[0]) / 16);
    pin_registers(products);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlock / kStep; ++i) {
      if (kIsWhole || i < schedule.first_steps) {
        const uint32_t step = i * kDescriptorStepK;
        wgmma<C.tile_n>(products, wgmma_descriptor(a + step), wgmma_descriptor(b + step), i > 0);
      }
    }
    wgmma_commit();
  }
  // The registers of the products are free until `begin` overwrites them, which the compiler cannot know.
  __device__ void forget() {
#pragma unroll
    for (int i = 0; i < C.tile_n / 2; ++i) products[i] = 0.0f;
  }
  // total += product * (row scale * column scale), once the tensor cores are done. Product and sum are rounded once.
  __device__ void promote(float (&total)[C.tile_n / 2], const Scales<C>& scales, int part) {
    pin_registers(products);
#pragma unroll
    for (int i = 0; i < C.tile_n / 2; ++i) total[i] = fmaf(scales.product(part, i), products[i], total[i]);
  }
};

// The producers of both CTAs may fill the stage again. The fence is there because the arrival would overtake reads.
template <KGroupedConfig C>
__device__ void release(Shared<C>& shared, int stage) {
  fence_cta();
  shared.empty[stage].arrive();
  if constexpr (C.multicast > 1) {
    if (threadIdx.x % kWarp == 0) shared.empty[stage].arrive_in_cluster(cluster_rank() ^ 1);
  }
}

// Exchanges words with the lane that is `distance` away: one of each pair stays, the other one goes.
__device__ inline void exchange(uint32_t& low, uint32_t& high, bool is_upper, int distance) {
  const uint32_t got = __shfl_xor_sync(~0u, is_upper ? low : high, distance);
  low = is_upper ? got : low, high = is_upper ? high : got;
}

// Four lanes side by side have the rows of a 4x4 square of words; afterwards they have its columns.
__device__ inline void transpose_words(uint32_t (&words)[4], int lane) {
  exchange(words[0], words[1], lane & 1, 1), exchange(words[2], words[3], lane & 1, 1);
  exchange(words[0], words[2], lane & 2, 2), exchange(words[1], words[3], lane & 2, 2);
}

template <Output kOutput>
__device__ inline void store_two(float* d, float x, float y) {
  if constexpr (kOutput == Output::kAccumulate) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(d), "f"(x), "f"(y) : "memory");
  } else {
    *reinterpret_cast<float2*>(d) = {x, y};
  }
}
template <Output kOutput>
__device__ inline void store_one(float* d, float x) {
  if constexpr (kOutput == Output::kAccumulate) atomicAdd(d, x);  // one CTA has the tile: nobody else adds
  else *d = x;
}

// Stores one part of a tile from registers.
template <KGroupedConfig C>
__device__ void store_part(const float (&total)[C.tile_n / 2], const Arguments& args, int expert, int row, int col,
                           const Thread<C>& thread) {
  uint8_t* matrix = args.d + expert * args.d_matrix_bytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at_row = row + thread.row + 8 * half;
    uint8_t* target = matrix + at_row * args.d_row_bytes;
    const bool exists = at_row < args.m;
    if constexpr (C.output == Output::kBFloat16) {
#pragma unroll
      for (int j = 0; j < C.tile_n / 8; j += 4) {  // four groups of 8 columns: each lane gets one of them
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = 4 * (j + i) + 2 * half;
          words[i] = pack_bf16(total[first], total[first + 1]);
        }
        transpose_words(words, thread.lane);
        int first = col + (j + thread.lane % 4) * 8;
        asm volatile("" : "+r"(first));  // else the compiler forms all addresses ahead of all stores
        if (args.aligned) {
          if (exists && first < args.n) {
            *reinterpret_cast<uint4*>(target + first * 2) = {words[0], words[1], words[2], words[3]};
          }
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (exists && first + i < args.n)
              reinterpret_cast<uint16_t*>(target)[first + i] = words[i / 2] >> i % 2 * 16;
          }
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < C.tile_n / 8; ++j) {
        const int first = col + j * 8 + thread.col;
        const float x = total[4 * j + 2 * half], y = total[4 * j + 2 * half + 1];
        float* two = reinterpret_cast<float*>(target) + first;
        if (args.aligned) {
          if (exists && first < args.n) store_two<C.output>(two, x, y);
        } else {
          if (exists && first < args.n) store_one<C.output>(two, x);
          if (exists && first + 1 < args.n) store_one<C.output>(two + 1, y);
        }
      }
    }
  }
}

// Stores one part of a tile through shared memory. Rows of a box are 128 B long, and its units of 16 B are swizzled.
template <KGroupedConfig C>
__device__ void store_staged(const float (&total)[C.tile_n / 2], Shared<C>& shared, const Maps& maps, int expert,
                             int row, int col, int part, const Thread<C>& thread) {
  uint8_t(&boxes)[C.output_boxes][64 * 128] = shared.output.boxes[thread.group][part % C.output_buffers];
  const bool is_first = threadIdx.x % kWarpgroup == 0;
  if (is_first) tma_store_wait_read<C.output_buffers - 1>();
  named_barrier<kWarpgroup>(1 + thread.group);
  const int warp_row = threadIdx.x % kWarpgroup / kWarp * 16;
  if constexpr (C.output == Output::kBFloat16) {
    // Four matrices at a time: rows 0-7 and 8-15 of two groups of 8 columns. Lane l addresses row l % 8 of matrix
    // l / 8.
#pragma unroll
    for (int j = 0; j < C.tile_n / 8; j += 2) {
      const int y = warp_row + thread.lane % 16, unit = (j + thread.lane / 16) % 8 ^ y % 8;
      const auto packed = [&](int i) { return pack_bf16(total[4 * j + 2 * i], total[4 * j + 2 * i + 1]); };
      const uint32_t address = shared_address(boxes[j / 8]) + y * 128 + unit * 16;
      store_matrices<false>(address, packed(0), packed(1), packed(2), packed(3));
    }
  } else {
#pragma unroll
    for (int i = 0; i < C.tile_n / 4; ++i) {  // two columns of row i % 2 * 8
      const int y = warp_row + thread.lane / 4 + i % 2 * 8, x = i / 2 * 8 + thread.col, unit = x / 4 % 8 ^ y % 8;
      *reinterpret_cast<float2*>(boxes[x / 32] + y * 128 + unit * 16 + x % 4 * 4) = {total[2 * i], total[2 * i + 1]};
    }
  }
  fence_for_async();
  named_barrier<kWarpgroup>(1 + thread.group);
  if (is_first) {
    const int first_row = row + (thread.group * C.parts + part) * 64;
#pragma unroll
    for (int i = 0; i < C.output_boxes; ++i) {
      const Corner at{col + i * C.box_n, first_row, expert};
      if constexpr (C.output == Output::kAccumulate) tma_add(maps.d, boxes[i], at);
      else tma_store<3>(maps.d, boxes[i], at);
    }
    tma_store_commit();
  }
}

// Writes zeros to the tile of an expert that has no tokens.
template <KGroupedConfig C>
__device__ void store_zeros(const Arguments& args, const Schedule<C>& schedule) {
  constexpr int kBytes = C.output == Output::kBFloat16 ? 2 : 4;
  const int unit = args.aligned ? 8 / kBytes : 1, width = min(C.tile_n, args.n - schedule.col);
  const int lane = threadIdx.x % kWarp, num_rows = min(C.tile_m, args.m - schedule.row);
#pragma unroll 1
  for (int row = threadIdx.x / kWarp; row < num_rows; row += C.warpgroups * kWarpgroup / kWarp) {
    uint8_t* target = args.d + schedule.expert * args.d_matrix_bytes + (schedule.row + row) * args.d_row_bytes;
#pragma unroll 1
    for (int i = lane * unit; i < width; i += kWarp * unit) {
      uint8_t* element = target + (schedule.col + i) * kBytes;
      if (args.aligned) *reinterpret_cast<uint2*>(element) = {};
      else if (kBytes == 2) *reinterpret_cast<uint16_t*>(element) = 0;
      else *reinterpret_cast<uint32_t*>(element) = 0;
    }
  }
}

template <KGroupedConfig C>
__device__ void consume(Shared<C>& shared, const Maps& maps, const Arguments& args) {
  const Thread<C> thread;
  Schedule<C> schedule(args);
  float total[C.parts][C.tile_n / 2];
  ProductBuffer<C> buffer;
  Scales<C> scales;
  int expert = -1, row = 0, col = 0;  // where the tile in `total` lies; -1: there is none yet

  const auto store = [&](int part) __attribute__((always_inline)) {
    if (expert >= 0) {
      if constexpr (C.stages_output) store_staged<C>(total[part], shared, maps, expert, row, col, part, thread);
      else store_part<C>(total[part], args, expert, row + part * 64, col, thread);
    }
#pragma unroll
    for (int i = 0; i < C.tile_n / 2; ++i) total[part][i] = 0.0f;
  };
  const auto store_all = [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int part = 0; part < C.parts; ++part) store(part);
  };
  // The stage was waited for. What can be done while the tensor cores have products, is done then: scales are read, the
  // stage before is released, the next one is waited for.
  const auto compute_block = [&](bool is_first) __attribute__((always_inline)) {
    const int stage_before = schedule.stage_before();
#pragma unroll
    for (int part = 0; part < C.parts; ++part) {
      if (is_first) buffer.template begin<false>(shared, schedule, part, thread);
      else buffer.template begin<true>(shared, schedule, part, thread);
      if (part == 0) {
        if (!is_first) release(shared, stage_before);
        scales.load(shared, schedule, thread);
      }
      if (part == C.parts - 1) {
        schedule.next_stage();
        if (schedule.block < schedule.num_blocks - 1) shared.full[schedule.stage].wait(schedule.parity);
      }
      if (is_first && !C.stores_first) store(part);
      wgmma_wait<0>();
      buffer.promote(total[part], scales, part);
    }
  };

#pragma unroll 1
  for (; !schedule.done; schedule.next_tile()) {
    if (schedule.num_blocks == 0) {
      if constexpr (C.output != Output::kAccumulate) store_zeros<C>(args, schedule);
      continue;
    }
    if constexpr (C.stores_first) {
      store_all();
      buffer.forget();
    }
    shared.full[schedule.stage].wait(schedule.parity);
    compute_block(true);
#pragma unroll 1
    while (schedule.block < schedule.num_blocks - 1) compute_block(false);
    release(shared, schedule.stage_before());
    expert = schedule.expert, row = schedule.row, col = schedule.col;
  }
  store_all();
  if (C.stages_output && threadIdx.x % kWarpgroup == 0) tma_store_wait_read();
}

// Formula   d[e] (+)= sum over blocks of 128 tokens of e of (a_scale * b_scale) * (a b^T), each summed by WGMMA.
// Grid      as many clusters as run at once, at most one for each tile; they walk over the tiles of all experts. A CTA
//           has a tile of `parts` times 64 rows for each math warpgroup and tile_n columns.
// Shared    `stages` stages of both operands and their scales; tiles on their way out.
// Barriers  full[stage]: one arrival of the producer's elected lane, and TMA's bytes;
//           empty[stage]: each math thread, and with multicast each math warp of the other CTA.
// Alignment a, b and scales: address and pitches multiples of 16 B (TMA); d too if it leaves through shared memory.
template <KGroupedConfig C>
__global__ void __launch_bounds__(C.threads, 1)
    k_grouped_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments args) {
  static_assert(sizeof(Shared<C>) <= C.shared_bytes, "the host counts as the compiler does");
  static_assert(C.tile_n % 32 == 0, "store_part");
  static_assert(!C.blocks_b || kBlock % C.tile_n == 0, "all columns of a tile have one scale");
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<C>*>(memory);

  if (threadIdx.x == 0) {
    for (int i = 0; i < C.stages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(C.warpgroups * (kWarpgroup + (C.multicast > 1 ? 4 : 0)));
    }
    fence_barrier_init();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();
  if constexpr (C.multicast > 1) cluster_arrive(), cluster_wait();

  if (warp_uniform(threadIdx.x / kWarpgroup) == C.warpgroups) {
    give_registers<C.producer_registers>();
    if (warp_uniform(threadIdx.x % kWarpgroup / kWarp) == 0) produce<C>(shared, maps, args);
  } else {
    take_registers<C.math_registers>();
    consume<C>(shared, maps, args);
  }
}
