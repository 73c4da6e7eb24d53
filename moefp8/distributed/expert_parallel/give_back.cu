// Give back results on Hopper: what the experts here give for a token goes to the rank that it came from, and what all
// ranks give for the tokens here is summed. What this rank gives for its own tokens is added as it is computed.
//
// The tokens of a rank are cut into chunks, and all ranks cut alike. An item is a part of a chunk's push or of its sum.
// Every CTA begins with an item of a push; those that came first go on with pushes, the others with sums, for which they
// wait until all ranks have pushed the chunk: so sums are computed while later chunks travel. Items are taken by CTAs
// that run, and CTAs that push do not wait: all that is waited for comes, however few CTAs run at once.
//
// As soon as a rank has told of its last chunk, the others may push the next tokens, and what this rank received is
// overwritten. So a sum reads nothing of that.
#include "divisor.cuh"
#include "matrix.cuh"
#include "ranks.cuh"
#include "weighted_sum.cuh"

// Rows of slots that are there.
struct Results {
  const uint8_t* y;         // bf16 [P M, H], or null: nothing is given back
  const int* ids;           // [P M, k]
  const float* of_choices;  // [P M, k], which go with the rows; or null
  uint32_t first_expert, num_experts;  // of this rank
};

// Rows of experts, of which those of a slot are summed.
struct Rows {
  const uint8_t* y;         // bf16 [R, H]
  int64_t y_row_bytes;      // the pitch of rows
  const int* token_to_row;  // [P M, k]; -1: no row
  const uint8_t* weights;   // [P M, k]
  int64_t weight_token_bytes, weight_choice_bytes;
  uint32_t top_k;
};

// Where results lie in a memory, and their sums.
struct Sums {
  int64_t rows, of_choices;  // [P M, H] and [P M, k], of the other ranks
  int64_t reached;           // [M]: a bit for each rank that gives something for a token of this rank
  int64_t scores;            // fp32 [M, k]: of this rank's tokens, the weights of its own slots; 0: those of rows
  uint8_t* y;                // bf16 [T, H]
  float* y_of_choices;       // [T, k]
};

struct Order {
  uint32_t num_chunks, num_tokens;  // of a chunk, of each rank
  uint32_t num_pushes, num_sums;    // items of a chunk
  uint32_t units_of_item;
  uint32_t num_pushing;             // CTAs
};

// A part of a chunk.
struct Item {
  uint32_t chunk, part;
};

struct Arguments {
  Ranks ranks;
  Results results;  // what the first kernel gives back
  Rows rows;        // what the second one sums
  Sums sums;
  Order order;
  uint32_t num_tokens, max_tokens, top_k;  // T, M, k
  Divisor units, num_others;               // how many units a row has; P - 1, or 1
};

// The columns of a unit: 8 of BF16, or one.
template <class Unit>
struct Columns {
  static constexpr int kColumns = sizeof(Unit) / 2;
  float values[kColumns];

  __device__ void add(const Unit& unit) {
    if constexpr (kColumns == 1) {
      values[0] = __fadd_rn(values[0], __uint_as_float(static_cast<uint32_t>(unit) << 16));
    } else {
      const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[2 * i] = __fadd_rn(values[2 * i], __uint_as_float(words[i] << 16));
        values[2 * i + 1] = __fadd_rn(values[2 * i + 1], __uint_as_float(words[i] & 0xffff0000));
      }
    }
  }
  __device__ Unit rounded() const {
    if constexpr (kColumns == 1) return bfloat16_bits(values[0]);
    else return {pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
                 pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7])};
  }
};

// An item of a push to the other ranks: `give(slot, unit, value)` tells whether a slot has a result here, and what its
// unit is.
template <class Unit, class Give>
__device__ inline void push(const Arguments& args, const Memories& memories, const Item& item, const Give& give) {
  const Order& order = args.order;
  const uint32_t max_tokens = args.max_tokens, num_others = args.num_others.value, top_k = args.top_k;
  const uint32_t first_token = item.chunk * order.num_tokens;
  const uint32_t num_tokens = min(order.num_tokens, max_tokens - first_token), begin = item.part * order.units_of_item;
  const uint32_t end = min(num_tokens * num_others * args.units.value, begin + order.units_of_item);
#pragma unroll 1
  for (uint32_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    // Neighbouring rows go to different ranks, so that all links are busy at all times.
    const uint32_t row = args.units.quotient(i), unit = i - row * args.units.value;
    const uint32_t in_chunk = args.num_others.quotient(row), token = first_token + in_chunk;
    uint32_t source = row - in_chunk * num_others + args.ranks.rank + 1;
    if (source >= args.ranks.num_ranks) source -= args.ranks.num_ranks;
    const uint32_t slot = source * max_tokens + token;
    Unit value;
    if (!give(slot, unit, value)) continue;
    const int64_t there = args.ranks.rank * max_tokens + token;
    reinterpret_cast<Unit*>(memories.of[source] + args.sums.rows)[there * args.units.value + unit] = value;
    if (unit != 0 || args.results.of_choices == nullptr) continue;
    float* of_choices = reinterpret_cast<float*>(memories.of[source] + args.sums.of_choices) + there * top_k;
    for (uint32_t j = 0; j < top_k; ++j) {
      of_choices[j] = args.results.of_choices[static_cast<int64_t>(slot) * top_k + j];
    }
  }
}

// An item of a sum, in FP32 and in the order of ranks. `give_own(slot, unit)` is what a slot of this rank has here.
template <class Unit, class Give>
__device__ inline void sum(const Arguments& args, const uint8_t* memory, const Item& item, const Give& give_own) {
  constexpr int kAtOnce = 2;  // ranks whose rows are in flight together
  const Order& order = args.order;
  const uint32_t first_token = item.chunk * order.num_tokens, rank = args.ranks.rank, top_k = args.top_k;
  if (first_token >= args.num_tokens) return;
  const uint32_t num_tokens = min(order.num_tokens, args.num_tokens - first_token);
  const uint32_t begin = item.part * order.units_of_item;
  const uint32_t end = min(num_tokens * args.units.value, begin + order.units_of_item);
  const uint32_t* reached = reinterpret_cast<const uint32_t*>(memory + args.sums.reached);
#pragma unroll 1
  for (uint32_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const uint32_t in_chunk = args.units.quotient(i), unit = i - in_chunk * args.units.value;
    const int64_t token = first_token + in_chunk, slot = rank * args.max_tokens + token;
    const uint32_t bits = reached[token];
    const Unit* rows = reinterpret_cast<const Unit*>(memory + args.sums.rows) + token * args.units.value + unit;
    const int64_t of_rank = static_cast<int64_t>(args.max_tokens) * args.units.value;
    Unit own;
    if (bits >> rank & 1) own = give_own(slot, unit);
    Columns<Unit> sums = {};
    for (uint32_t first = 0; first < args.ranks.num_ranks; first += kAtOnce) {
      Unit values[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        if (bits >> (first + r) & 1) values[r] = first + r == rank ? own : rows[(first + r) * of_rank];
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        if (bits >> (first + r) & 1) sums.add(values[r]);
      }
    }
    reinterpret_cast<Unit*>(args.sums.y)[token * args.units.value + unit] = sums.rounded();
    if (unit != 0 || args.results.of_choices == nullptr) continue;
    const float* of_choices = reinterpret_cast<const float*>(memory + args.sums.of_choices);
    for (uint32_t j = 0; j < top_k; ++j) {
      float of_choice = 0;
      for (uint32_t other = 0; other < args.ranks.num_ranks; ++other) {
        const float* of_slots = other == rank ? args.results.of_choices : of_choices;
        if (bits >> other & 1) of_choice += of_slots[(other * args.max_tokens + token) * top_k + j];
      }
      args.sums.y_of_choices[token * top_k + j] = of_choice;
    }
  }
}

// Calls work(i) for the numbers below `end` that this CTA takes, one by one; for one alone if its first is not below
// `num_staying`. All threads call both, and meet in `work`.
template <class Work>
__device__ inline void take_items(uint32_t* num_taken, uint32_t end, uint32_t num_staying, const Work& work) {
  __shared__ uint32_t taken[2];  // this item and the next one, in turns
  if (threadIdx.x == 0) taken[0] = atomicAdd(num_taken, 1u);
  __syncthreads();
  const bool stays = taken[0] < num_staying;
#pragma unroll 1
  for (uint32_t turn = 0; taken[turn] < end; turn ^= 1) {
    if (stays && threadIdx.x == 0) taken[turn ^ 1] = atomicAdd(num_taken, 1u);  // it comes during this one
    work(taken[turn]);
    if (!stays) return;
  }
}

// What the kernels before have told, and to whom, is older than the previous one.
template <class Unit, class Give, class GiveOwn>
__device__ inline void push_and_sum(const Arguments& args, const Give& give, const GiveOwn& give_own) {
  __shared__ Memories memories;
  __shared__ uint64_t value;
  const Ranks& ranks = args.ranks;
  const Order& order = args.order;
  State& state = *ranks.state;
  if (threadIdx.x == 0) value = next_value(state, Push::kResults, state.signature);
  memories.load(ranks);
  take_items(&state.num_pushes, order.num_chunks * order.num_pushes, order.num_pushing, [&](uint32_t i) {
    const Item item = {i / order.num_pushes, i % order.num_pushes};
    push<Unit>(args, memories, item, give);
    __syncthreads();
    // The other threads are at the next item meanwhile.
    if (threadIdx.x == 0 && is_last(state, 1 + item.chunk, order.num_pushes)) {
      for (uint32_t rank = 0; rank < ranks.num_ranks; ++rank) {
        if (rank != ranks.rank) tell(words(memories.of[rank], 1 + item.chunk) + ranks.rank, value);
      }
    }
  });
  take_items(&state.num_sums, order.num_chunks * order.num_sums, ~0u, [&](uint32_t i) {
    const Item item = {i / order.num_sums, i % order.num_sums};
    wait_for_others(ranks, memories, 1 + item.chunk, value);
    wait_for_previous_kernel();  // which may read the memory of y
    sum<Unit>(args, memories.of[ranks.rank], item, give_own);
    __syncthreads();
  });
  if (threadIdx.x == 0 && atomicAdd(&state.num_left, 1u) == gridDim.x - 1) {
    state.num_pushes = state.num_sums = state.num_left = 0;
    ++state.counts[static_cast<int>(Push::kResults)];
  }
}

// The sums of y[d, slot] over the ranks d with an expert of a token of this rank, and those of of_choices.
// Grid: any; a CTA works at an item at a time, a thread at a unit of a row.
// Shared memory: an address for each rank, items, and a word. Barriers: all threads meet behind each item.
// Alignment: that of Unit, for y, its rows and their length.
template <class Unit>
__global__ void __launch_bounds__(256, 4) give_back_kernel(const __grid_constant__ Arguments args) {
  const Results& results = args.results;
  const auto give_own = [&](uint32_t slot, uint32_t unit) {
    return reinterpret_cast<const Unit*>(results.y)[int64_t{slot} * args.units.value + unit];
  };
  const auto give = [&](uint32_t slot, uint32_t unit, Unit& value) {
    const int* ids = results.ids + static_cast<int64_t>(slot) * args.top_k;
    bool is_here = false;
    for (uint32_t j = 0; j < args.top_k; ++j) is_here |= ids[j] - results.first_expert < results.num_experts;
    if (is_here) value = give_own(slot, unit);
    return is_here;
  };
  wait_for_previous_kernel();
  push_and_sum<Unit>(args, give, give_own);
}

// The same with y[slot] = sum of weights[slot, j] * rows.y[token_to_row[slot, j]] over j, rounded to BF16, as
// `combine_kernel` has it; the weights of this rank's own slots are sums.scores.
// Grid, shared memory and barriers: as above, with units of eight columns.
// Alignment: rows.y and its rows are at multiples of 16 B; H is a multiple of 8.
template <Input kWeights>
__global__ void __launch_bounds__(256, 3) combine_and_give_back_kernel(const __grid_constant__ Arguments args) {
  const auto give = [&](uint32_t slot, uint32_t unit, uint4& value) {
    Columns<uint4> sums = {};
    if (!weighted_sum<kWeights, 4>(args.rows, slot, unit * 8, sums.values)) return false;
    value = sums.rounded();
    return true;
  };
  const auto give_own = [&](uint32_t slot, uint32_t unit) {
    Columns<uint4> sums = {};
    if (args.sums.scores == 0) {
      weighted_sum<kWeights, 4>(args.rows, slot, unit * 8, sums.values);
      return sums.rounded();
    }
    Rows own = args.rows;
    own.weight_choice_bytes = sizeof(float), own.weight_token_bytes = own.top_k * own.weight_choice_bytes;
    const int64_t before = args.ranks.rank * args.max_tokens * own.weight_token_bytes;  // of slots of other ranks
    own.weights = args.ranks.state->memory[args.ranks.rank] + args.sums.scores - before;
    weighted_sum<Input::kFloat, 4>(own, slot, unit * 8, sums.values);
    return sums.rounded();
  };
  push_and_sum<uint4>(args, give, give_own);
}
