// Exchange of tokens between the Hopper GPUs of a host, each of which writes into the others' memory.
//
// T tokens of a rank, at most M of any, k choices each, P ranks, E experts, H hidden. Every rank has a memory of one
// layout, which all others can write. Token t of rank s has slot s * M + t in what a rank receives; what rank d gives
// back for it has slot d * M + t. So each place has one writer, whatever the timing, and nothing has to be counted.
//
// The kernels push, tell all ranks that they have, and wait until all have told: then the memory of this rank is
// complete, and the next kernel may read it. A push to tokens' slots and one of results take turns, and nobody pushes
// before all have told of the push before: so nobody writes what may still be read.
#include "fp8.cuh"

constexpr int kMaxRanks = 16;
constexpr int kBlock = 128;
constexpr int kLanes = 8;  // threads that hold a block
constexpr int kColumns = kBlock / kLanes;

struct Ranks {
  uint8_t* memory[kMaxRanks];  // that of each
  uint32_t rank, num_ranks;    // this one, P
};

// How ranks meet at the end of a kernel.
struct Meeting {
  uint64_t* count;       // how many there were, on this GPU
  uint32_t* num_ended;   // CTAs that have pushed, on this GPU; 0 between kernels
  int64_t arrivals;      // where in a memory [P] words lie, in which each rank tells
  uint64_t signature;    // what all ranks must be at, below 2^32
  uint64_t deadline_ns;  // how long to wait
  uint32_t* error;       // [4] in the host's memory: kind, rank, what it told
};

struct Choices {
  const uint8_t* ids;   // int32 or int64 [T, k]
  const float* scores;  // [T, k], or null: they are not sent
  uint32_t num_tokens, max_tokens, top_k, num_experts;
  uint32_t id_bytes;

  // The expert of choice i, or E for an id of no one.
  __device__ uint32_t expert(uint32_t i) const {
    const uint64_t id = id_bytes == 8 ? reinterpret_cast<const uint64_t*>(ids)[i]
                                      : reinterpret_cast<const uint32_t*>(ids)[i];
    return id < num_experts ? static_cast<uint32_t>(id) : num_experts;
  }
  // Rank r has the experts [r E / P, (r + 1) E / P), each rounded down.
  __device__ uint32_t rank_bit(uint32_t i, uint32_t num_ranks) const {
    const uint32_t e = expert(i);
    return e < num_experts ? 1u << ((e + 1) * num_ranks - 1) / num_experts : 0;
  }
  // A bit for each rank that has an expert of the token. kThreads neighbouring threads, a power of two, ask together.
  template <int kThreads>
  __device__ uint32_t ranks_of(uint32_t token, uint32_t num_ranks) const {
    uint32_t bits = 0;
    for (uint32_t j = threadIdx.x % kThreads; j < top_k; j += kThreads) bits |= rank_bit(token * top_k + j, num_ranks);
#pragma unroll
    for (int distance = kThreads / 2; distance > 0; distance /= 2) {
      bits |= __shfl_xor_sync(0xffffffff, bits, distance);
    }
    return bits;
  }
};

// ---- Meeting ----

__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline void tell(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ inline uint64_t heard(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Writes down what is wrong, and ends all work of this process on the GPU, so that no result is taken for right.
__device__ inline void fail(const Meeting& meeting, uint32_t kind, uint32_t rank, uint64_t told) {
  meeting.error[1] = rank, meeting.error[2] = static_cast<uint32_t>(told >> 32), meeting.error[3] = told;
  fence_system();
  meeting.error[0] = kind;
  fence_system();
  asm volatile("trap;");
}

// All threads of the CTA call it when they have pushed. The last CTA tells all ranks, and waits for each of them.
__device__ inline void meet(const Meeting& meeting, const Ranks& ranks) {
  __shared__ uint64_t value;
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();  // what the CTA has pushed comes before what the last CTA tells
    value = 0;
    if (atomicAdd(meeting.num_ended, 1u) == gridDim.x - 1) {
      fence_system();
      *meeting.num_ended = 0;
      value = ++*meeting.count << 32 | meeting.signature;
    }
  }
  __syncthreads();
  if (value == 0 || threadIdx.x >= ranks.num_ranks) return;
  tell(reinterpret_cast<uint64_t*>(ranks.memory[threadIdx.x] + meeting.arrivals) + ranks.rank, value);
  const uint64_t* word = reinterpret_cast<uint64_t*>(ranks.memory[ranks.rank] + meeting.arrivals) + threadIdx.x;
  const uint64_t begin = now_ns();
  for (uint64_t told = heard(word); told != value; told = heard(word)) {
    if (told >> 32 == value >> 32) fail(meeting, 2, threadIdx.x, told);  // it is at something else
    if (now_ns() - begin > meeting.deadline_ns) fail(meeting, 1, threadIdx.x, told);
  }
}

// ---- Pushing tokens ----

struct Tokens {
  const uint8_t* x;     // [T, H]
  int64_t x_row_bytes;  // the pitch of its rows
  uint32_t row_bytes;   // of which so many are a row
  uint32_t hidden_size, num_k_blocks;
  int64_t rows, row_pitch;      // where in a memory the slots' rows lie, and how far from one another
  int64_t scales, scale_pitch;  // those of scales, if tokens are quantized
  int64_t ids, scores;          // of choices: int32 and fp32 [P M, k]
  int* token_to_row;            // [T, P]: the slot of what a rank gives back, -1 if it gives nothing; or null
};

struct PushArguments {
  Ranks ranks;
  Meeting meeting;
  Choices choices;
  Tokens tokens;
};

// Every rank gets the choices of all slots of this rank: those without a token are of no one.
__device__ inline void push_choices(const PushArguments& args) {
  const auto& [ranks, meeting, choices, tokens] = args;
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  if (choices.scores != nullptr) {
    const uint32_t begin = ranks.rank * choices.max_tokens * choices.top_k;
    for (uint32_t i = first; i < choices.max_tokens * choices.top_k; i += step) {
      const bool exists = i < choices.num_tokens * choices.top_k;
      const int id = exists ? choices.expert(i) : choices.num_experts;
      const float score = exists ? choices.scores[i] : 0;
      for (uint32_t d = 0; d < ranks.num_ranks; ++d) {
        reinterpret_cast<int*>(ranks.memory[d] + tokens.ids)[begin + i] = id;
        reinterpret_cast<float*>(ranks.memory[d] + tokens.scores)[begin + i] = score;
      }
    }
  }
  if (tokens.token_to_row == nullptr) return;
  for (uint32_t i = first; i < choices.num_tokens * ranks.num_ranks; i += step) {
    const uint32_t token = i / ranks.num_ranks, d = i - token * ranks.num_ranks;
    uint32_t bits = 0;
    for (uint32_t j = 0; j < choices.top_k; ++j) bits |= choices.rank_bit(token * choices.top_k + j, ranks.num_ranks);
    tokens.token_to_row[i] = bits >> d & 1 ? static_cast<int>(d * choices.max_tokens + token) : -1;
  }
}

// rows[slot], scales[slot] = quantize_1x128(x[t]) in the memory of each rank that has an expert of token t.
// Grid: 8 threads hold a block of 128 elements; all CTAs go along the tokens' blocks, row by row.
// Shared memory: a word. Barriers: the meeting's.
// Alignment: rows and row_pitch of 16 B; vectorized if x and its pitch are too and H is one of 8; else any.
template <Input kInput, bool kVectorized>
__global__ void __launch_bounds__(256) push_codes_kernel(const __grid_constant__ PushArguments args, float min_amax) {
  const auto& [ranks, meeting, choices, tokens] = args;
  const uint32_t column = threadIdx.x % kLanes * kColumns, num_blocks = choices.num_tokens * tokens.num_k_blocks;
  const uint32_t step = gridDim.x * blockDim.x / kLanes;
  wait_for_previous_kernel();
  push_choices(args);
  struct Held {
    uint32_t token, k_block, width;
    Eight<kInput> low, high;
  };
  const auto load = [&](uint32_t index) {  // past the last block comes the last one again
    index = min(index, num_blocks - 1);
    Held held{index / tokens.num_k_blocks};
    held.k_block = index - held.token * tokens.num_k_blocks;
    held.width = min(tokens.hidden_size - held.k_block * kBlock, kBlock);
    const int64_t first_byte = static_cast<int64_t>(held.k_block) * kBlock * Eight<kInput>::kElementBytes;
    const uint8_t* block = tokens.x + held.token * tokens.x_row_bytes + first_byte;
    held.low.template load<kVectorized>(block, column, held.width);
    held.high.template load<kVectorized>(block, column + 8, held.width);
    return held;
  };
  uint32_t index = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  constexpr uint32_t kInWarp = kWarp / kLanes;
  if (num_blocks > 0) {
    Held next = load(index);
#pragma unroll 1
    for (; index / kInWarp * kInWarp < num_blocks; index += step) {  // the same for all blocks of a warp
      const Held held = next;
      next = load(index + step);
      uint32_t amax = Eight<kInput>::amax(Eight<kInput>::larger(held.low.largest(), held.high.largest()));
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        amax = max(amax, __shfl_xor_sync(0xffffffff, amax, distance));
      }
      const Scale scale(amax, false, min_amax);
      const uint2 low = held.low.e4m3(scale), high = held.high.e4m3(scale);
      const uint4 codes = {low.x, low.y, high.x, high.y};
      const int64_t slot = ranks.rank * choices.max_tokens + held.token;
      const int64_t code_at = tokens.rows + slot * tokens.row_pitch + held.k_block * kBlock + column;
      const int64_t scale_at = tokens.scales + slot * tokens.scale_pitch + held.k_block * 4;
      for (uint32_t bits = choices.ranks_of<kLanes>(held.token, ranks.num_ranks); bits != 0; bits &= bits - 1) {
        uint8_t* memory = ranks.memory[__ffs(bits) - 1];
        if (column < held.width) *reinterpret_cast<uint4*>(memory + code_at) = codes;
        if (column == 0) *reinterpret_cast<float*>(memory + scale_at) = scale.scale_inv;
      }
    }
  }
  meet(meeting, ranks);
}

// ---- Moving rows as they are ----

constexpr int kAtOnce = 4;  // units of a thread that are in flight together

// What a warp moves at once: neighbouring units of a row.
template <class Unit>
struct Piece {
  static constexpr uint32_t kUnits = kWarp * kAtOnce;
  Unit units[kAtOnce];

  __device__ void load(const uint8_t* row, uint32_t first, uint32_t end) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t unit = first + i * kWarp + threadIdx.x % kWarp;
      if (unit < end) units[i] = reinterpret_cast<const Unit*>(row)[unit];
    }
  }
  __device__ void store(uint8_t* row, uint32_t first, uint32_t end) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t unit = first + i * kWarp + threadIdx.x % kWarp;
      if (unit < end) reinterpret_cast<Unit*>(row)[unit] = units[i];
    }
  }
};

// rows[slot] = x[t] in the memory of each rank that has an expert of token t.
// Grid: a warp moves a piece of a row at a time. Shared memory: a word. Barriers: the meeting's.
// Alignment: that of Unit, for all rows and their length.
template <class Unit>
__global__ void __launch_bounds__(256) push_rows_kernel(const __grid_constant__ PushArguments args) {
  const auto& [ranks, meeting, choices, tokens] = args;
  const uint32_t num_units = tokens.row_bytes / sizeof(Unit), num_pieces = ceil_div(num_units, Piece<Unit>::kUnits);
  const uint32_t warps = gridDim.x * blockDim.x / kWarp, end = choices.num_tokens * num_pieces;
  wait_for_previous_kernel();
  push_choices(args);
#pragma unroll 1
  for (uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp; i < end; i += warps) {
    const uint32_t token = i / num_pieces, first = (i - token * num_pieces) * Piece<Unit>::kUnits;
    uint32_t bits = choices.ranks_of<kWarp>(token, ranks.num_ranks);
    if (bits == 0) continue;
    Piece<Unit> piece;
    piece.load(tokens.x + token * tokens.x_row_bytes, first, num_units);
    const int64_t slot = ranks.rank * choices.max_tokens + token;
    for (; bits != 0; bits &= bits - 1) {
      piece.store(ranks.memory[__ffs(bits) - 1] + tokens.rows + slot * tokens.row_pitch, first, num_units);
    }
  }
  meet(meeting, ranks);
}

// ---- Giving back ----

struct Results {
  const uint8_t* y;         // [P M, H], the rows of slots, or null: none are given back
  uint32_t row_bytes;       // of a row, which is its pitch, too
  const float* of_choices;  // [P M, k], or null
  int64_t rows, of_scores;  // where in a memory [P M, H] and [P M, k] lie
};

struct ReturnArguments {
  Ranks ranks;
  Meeting meeting;
  Choices choices;  // of all slots: num_tokens is P M
  Results results;
};

// rows[rank * M + t] = y[s * M + t] in the memory of rank s, for each slot with an expert here; of_scores of all slots.
// Grid: a warp moves a piece of a row at a time. Shared memory: a word. Barriers: the meeting's.
// Alignment: that of Unit, for all rows and their length.
template <class Unit>
__global__ void __launch_bounds__(256) return_kernel(const __grid_constant__ ReturnArguments args) {
  const auto& [ranks, meeting, choices, results] = args;
  const uint32_t num_units = results.row_bytes / sizeof(Unit), num_pieces = ceil_div(num_units, Piece<Unit>::kUnits);
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, num_threads = gridDim.x * blockDim.x;
  const uint32_t end = results.y == nullptr ? 0 : choices.num_tokens * num_pieces;
  wait_for_previous_kernel();
#pragma unroll 1
  for (uint32_t i = thread / kWarp; i < end; i += num_threads / kWarp) {
    const uint32_t slot = i / num_pieces, first = (i - slot * num_pieces) * Piece<Unit>::kUnits;
    if ((choices.ranks_of<kWarp>(slot, ranks.num_ranks) >> ranks.rank & 1) == 0) continue;
    const uint32_t source = slot / choices.max_tokens, token = slot - source * choices.max_tokens;
    Piece<Unit> piece;
    piece.load(results.y + static_cast<int64_t>(slot) * results.row_bytes, first, num_units);
    const int64_t there = ranks.rank * choices.max_tokens + token;
    piece.store(ranks.memory[source] + results.rows + there * results.row_bytes, first, num_units);
  }
  if (results.of_choices != nullptr) {
    const uint32_t in_rank = choices.max_tokens * choices.top_k;
    for (uint32_t i = thread; i < choices.num_tokens * choices.top_k; i += num_threads) {
      const uint32_t source = i / in_rank, at = i - source * in_rank;
      reinterpret_cast<float*>(ranks.memory[source] + results.of_scores)[ranks.rank * in_rank + at] =
          results.of_choices[i];
    }
  }
  meet(meeting, ranks);
}
