// Push tokens on Hopper: each one, with its choices, once to each rank that holds one of its experts.
#include "floats.cuh"
#include "ranks.cuh"

struct Choices {
  const uint8_t* ids;   // int32 or int64 [T, k]
  const float* scores;  // [T, k]
  uint32_t num_tokens, max_tokens, top_k, num_experts;
  uint32_t id_bytes;
  uint32_t are_sent;  // whether ids and scores are; without tokens, their addresses are null

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

struct Tokens {
  const uint8_t* x;     // [T, H]
  int64_t x_row_bytes;  // the pitch of its rows
  uint32_t row_bytes;   // of which so many are a row
  uint32_t hidden_size, num_k_blocks;
  int64_t rows, row_pitch;      // where in a memory the slots' rows lie, and how far from one another
  int64_t scales, scale_pitch;  // those of scales, if tokens are quantized
  int64_t ids, scores;          // of choices: int32 and fp32 [P M, k]
  int64_t reached;              // [T] in this rank's memory: a bit for each rank that gives something back
  int64_t own_scores;           // [T, k] there: the scores, where the others do not write before results have come
};

struct Arguments {
  Ranks ranks;
  uint64_t turn;  // that it begins
  Choices choices;
  Tokens tokens;
  float min_amax;  // a block's largest magnitude counts as at least this
};

// Every rank gets the choices of all slots of this rank: those without a token are of no one.
__device__ inline void push_choices(const Arguments& args, const Memories& memories) {
  const auto& [ranks, turn, choices, tokens, min_amax] = args;
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  if (first == 0) ranks.state->turn = turn;
  if (choices.are_sent) {
    const uint32_t begin = ranks.rank * choices.max_tokens * choices.top_k;
    for (uint32_t i = first; i < choices.max_tokens * choices.top_k; i += step) {
      const bool exists = i < choices.num_tokens * choices.top_k;
      const int id = exists ? choices.expert(i) : choices.num_experts;
      const float score = exists ? choices.scores[i] : 0;
      for (uint32_t d = 0; d < ranks.num_ranks; ++d) {
        reinterpret_cast<int*>(memories.of[d] + tokens.ids)[begin + i] = id;
        reinterpret_cast<float*>(memories.of[d] + tokens.scores)[begin + i] = score;
      }
    }
  }
  uint8_t* memory = memories.of[ranks.rank];
  if (choices.are_sent) {
    float* scores = reinterpret_cast<float*>(memory + tokens.own_scores);
    for (uint32_t i = first; i < choices.num_tokens * choices.top_k; i += step) scores[i] = choices.scores[i];
  }
  uint32_t* reached = reinterpret_cast<uint32_t*>(memory + tokens.reached);
  for (uint32_t i = first; i < choices.num_tokens; i += step) {
    uint32_t bits = 0;
    for (uint32_t j = 0; j < choices.top_k; ++j) bits |= choices.rank_bit(i * choices.top_k + j, ranks.num_ranks);
    reached[i] = bits;
  }
}

// The last CTA that has pushed tells the other ranks, and waits for each of them. All threads call it.
__device__ inline void meet(const Ranks& ranks, const Memories& memories, uint64_t turn) {
  __shared__ bool is_last_cta;
  State& state = *ranks.state;
  __syncthreads();
  if (threadIdx.x == 0) is_last_cta = is_last(state, 0, gridDim.x);
  __syncthreads();
  if (!is_last_cta) return;
  const uint64_t value = next_value(state, Push::kTokens, turn);
  if (threadIdx.x == ranks.rank) {
    check_turn(ranks, turn, newest_turn(state));
  } else if (threadIdx.x < ranks.num_ranks) {
    tell(words(memories.of[threadIdx.x], 0) + ranks.rank, value);
    wait_for_rank(ranks, memories, 0, threadIdx.x, value);
  }
  __syncthreads();
  let_next_kernel_start();  // not before: while this waits, SMs are free for what the others wait for
  if (threadIdx.x == 0) {
    uint64_t& count = state.counts[static_cast<int>(Push::kTokens)];
    state.counts[static_cast<int>(Push::kResults)] = count;  // a turn that was open has ended
    ++count;
  }
}

// rows[slot], scales[slot] = quantize_1x128(x[t]) in the memory of each rank that has an expert of token t.
// Grid: 8 threads hold a block of 128 elements; all CTAs go along the tokens' blocks, row by row.
// Shared memory: an address for each rank, and a word. Barriers: those are complete; the meeting's.
// Alignment: rows and row_pitch of 16 B; vectorized if x and its pitch are too and H is one of 8; else any.
template <Input kInput, bool kVectorized>
__global__ void __launch_bounds__(256) push_codes_kernel(const __grid_constant__ Arguments args) {
  const auto& [ranks, turn, choices, tokens, min_amax] = args;
  const uint32_t column = threadIdx.x % kLanes * kColumns;
  const uint32_t num_blocks = choices.num_tokens * tokens.num_k_blocks, step = gridDim.x * blockDim.x / kLanes;
  __shared__ Memories memories;
  memories.load(ranks);
  wait_for_previous_kernel();
  const bool ends_turn = is_open(*ranks.state);
  struct Held {
    uint32_t token, k_block, width;
    Floats<kInput> share;
  };
  const auto load = [&](uint32_t index) {  // past the last block comes the last one again
    index = min(index, num_blocks - 1);
    Held held{index / tokens.num_k_blocks};
    held.k_block = index - held.token * tokens.num_k_blocks;
    held.width = min(tokens.hidden_size - held.k_block * kBlock, kBlock);
    held.share.template load<kVectorized>(tokens, held.token, held.k_block, column, held.width);
    return held;
  };
  uint32_t index = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  constexpr uint32_t kInWarp = kWarp / kLanes;
  Held next;
  if (num_blocks > 0) next = load(index);  // beside what tells whether a turn is open
  if (ends_turn) end_turn(ranks, memories);
  push_choices(args, memories);
  if (num_blocks > 0) {
#pragma unroll 1
    for (; index / kInWarp * kInWarp < num_blocks; index += step) {  // the same for all blocks of a warp
      const Held held = next;
      next = load(index + step);
      const Scale scale = held.share.scale(min_amax);
      const uint4 codes = held.share.codes(scale);
      const int64_t slot = ranks.rank * choices.max_tokens + held.token;
      const int64_t code_at = tokens.rows + slot * tokens.row_pitch + held.k_block * kBlock + column;
      const int64_t scale_at = tokens.scales + slot * tokens.scale_pitch + held.k_block * 4;
      for (uint32_t bits = choices.ranks_of<kLanes>(held.token, ranks.num_ranks); bits != 0; bits &= bits - 1) {
        uint8_t* memory = memories.of[__ffs(bits) - 1];
        if (column < held.width) *reinterpret_cast<uint4*>(memory + code_at) = codes;
        if (column == 0) *reinterpret_cast<float*>(memory + scale_at) = scale.scale_inv;
      }
    }
  }
  meet(ranks, memories, turn);
}

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
// Grid: a warp moves a piece of a row at a time.
// Shared memory: an address for each rank, and a word. Barriers: those are complete; the meeting's.
// Alignment: that of Unit, for all rows and their length.
template <class Unit>
__global__ void __launch_bounds__(256) push_rows_kernel(const __grid_constant__ Arguments args) {
  const auto& [ranks, turn, choices, tokens, min_amax] = args;
  const uint32_t num_units = tokens.row_bytes / sizeof(Unit), num_pieces = ceil_div(num_units, Piece<Unit>::kUnits);
  const uint32_t warps = gridDim.x * blockDim.x / kWarp, end = choices.num_tokens * num_pieces;
  __shared__ Memories memories;
  memories.load(ranks);
  wait_for_previous_kernel();
  if (is_open(*ranks.state)) end_turn(ranks, memories);
  push_choices(args, memories);
#pragma unroll 1
  for (uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp; i < end; i += warps) {
    const uint32_t token = i / num_pieces, first = (i - token * num_pieces) * Piece<Unit>::kUnits;
    uint32_t bits = choices.ranks_of<kWarp>(token, ranks.num_ranks);
    if (bits == 0) continue;
    Piece<Unit> piece;
    piece.load(tokens.x + token * tokens.x_row_bytes, first, num_units);
    const int64_t slot = ranks.rank * choices.max_tokens + token;
    for (; bits != 0; bits &= bits - 1) {
      piece.store(memories.of[__ffs(bits) - 1] + tokens.rows + slot * tokens.row_pitch, first, num_units);
    }
  }
  meet(ranks, memories, turn);
}
