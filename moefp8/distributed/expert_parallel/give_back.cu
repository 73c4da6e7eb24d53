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

// An item of a push to the other ranks. `give.load` begins to read what a slot has here, for kAtOnce units of a thread
// together; `give.has` tells whether it has something, and what.
template <class Unit, int kAtOnce, class Give>
__device__ inline void push(const Arguments& args, const Memories& memories, const Item& item, const Give& give) {
  const Order& order = args.order;
  const uint32_t max_tokens = args.max_tokens, num_others = args.num_others.value, top_k = args.top_k;
  const uint32_t first_token = item.chunk * order.num_tokens;
  const uint32_t num_tokens = min(order.num_tokens, max_tokens - first_token), begin = item.part * order.units_of_item;
  const uint32_t end = min(num_tokens * num_others * args.units.value, begin + order.units_of_item);
  struct Place {
    uint32_t source, token, unit;
  };
  const auto place_of = [&](uint32_t i) {
    // Neighbouring rows go to different ranks, so that all links are busy at all times.
    const uint32_t row = args.units.quotient(i), in_chunk = args.num_others.quotient(row);
    uint32_t source = row - in_chunk * num_others + args.ranks.rank + 1;
    if (source >= args.ranks.num_ranks) source -= args.ranks.num_ranks;
    return Place{source, first_token + in_chunk, i - row * args.units.value};
  };
#pragma unroll 1
  for (uint32_t i = begin + threadIdx.x; i < end; i += kAtOnce * blockDim.x) {
    Unit values[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const Place place = place_of(min(i + j * blockDim.x, end - 1));
      give.load(place.source * max_tokens + place.token, place.unit, values[j]);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * blockDim.x >= end) break;
      const Place place = place_of(i + j * blockDim.x);
      const uint32_t slot = place.source * max_tokens + place.token;
      if (!give.has(slot, place.unit, values[j])) continue;
      const int64_t there = args.ranks.rank * max_tokens + place.token;
      uint8_t* memory = memories.of[place.source];
      reinterpret_cast<Unit*>(memory + args.sums.rows)[there * args.units.value + place.unit] = values[j];
      if (place.unit != 0 || args.results.of_choices == nullptr) continue;
      float* of_choices = reinterpret_cast<float*>(memory + args.sums.of_choices) + there * top_k;
      for (uint32_t choice = 0; choice < top_k; ++choice) {
        of_choices[choice] = args.results.of_choices[static_cast<int64_t>(slot) * top_k + choice];
      }
    }
  }
}

// An item of a sum, in FP32 and in the order of ranks. No load has a condition that is in memory, so that all are in
// flight at once: what a rank has not given is read, and not added.
template <class Unit, int kAtOnce, class Give>
__device__ inline void sum(const Arguments& args, const uint8_t* memory, const Item& item, const Give& give) {
  constexpr int kRanks = 2;  // whose rows are in flight together
  const Order& order = args.order;
  const uint32_t first_token = item.chunk * order.num_tokens, rank = args.ranks.rank, top_k = args.top_k;
  const uint32_t num_ranks = args.ranks.num_ranks;
  if (first_token >= args.num_tokens) return;
  const uint32_t num_tokens = min(order.num_tokens, args.num_tokens - first_token);
  const uint32_t begin = item.part * order.units_of_item;
  const uint32_t end = min(num_tokens * args.units.value, begin + order.units_of_item);
  const uint32_t* reached = reinterpret_cast<const uint32_t*>(memory + args.sums.reached);
  const Unit* rows = reinterpret_cast<const Unit*>(memory + args.sums.rows);
  const int64_t of_rank = static_cast<int64_t>(args.max_tokens) * args.units.value;
  const auto load = [&](uint32_t first, int64_t at, Unit(&values)[kRanks]) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (first + r < num_ranks && first + r != rank) values[r] = rows[(first + r) * of_rank + at];
    }
  };
#pragma unroll 1
  for (uint32_t i = begin + threadIdx.x; i < end; i += kAtOnce * blockDim.x) {
    uint32_t bits[kAtOnce];
    Unit own[kAtOnce], values[kAtOnce][kRanks];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint32_t k = min(i + j * blockDim.x, end - 1), in_chunk = args.units.quotient(k);
      const uint32_t token = first_token + in_chunk, unit = k - in_chunk * args.units.value;
      load(0, int64_t{token} * args.units.value + unit, values[j]);
      give.load(rank * args.max_tokens + token, unit, own[j]);
      bits[j] = reached[token];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint32_t k = i + j * blockDim.x;
      if (k >= end) break;
      const uint32_t in_chunk = args.units.quotient(k), token = first_token + in_chunk;
      const uint32_t unit = k - in_chunk * args.units.value;
      const int64_t at = int64_t{token} * args.units.value + unit;
      if (bits[j] >> rank & 1) give.own(rank * args.max_tokens + token, unit, own[j]);
      Columns<Unit> sums = {};
      for (uint32_t first = 0; first < num_ranks; first += kRanks) {
        if (first > 0) load(first, at, values[j]);
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          if (bits[j] >> (first + r) & 1) sums.add(first + r == rank ? own[j] : values[j][r]);
        }
      }
      reinterpret_cast<Unit*>(args.sums.y)[at] = sums.rounded();
      if (unit != 0 || args.results.of_choices == nullptr) continue;
      const float* of_choices = reinterpret_cast<const float*>(memory + args.sums.of_choices);
      for (uint32_t choice = 0; choice < top_k; ++choice) {
        float of_choice = 0;
        for (uint32_t other = 0; other < num_ranks; ++other) {
          const float* of_slots = other == rank ? args.results.of_choices : of_choices;
          const int64_t slot = other * args.max_tokens + token;
          if (bits[j] >> other & 1) of_choice += of_slots[slot * top_k + choice];
        }
        args.sums.y_of_choices[int64_t{token} * top_k + choice] = of_choice;
      }
    }
  }
}

// Calls work(i) for the numbers below `end` that this CTA takes, one by one; for one alone if its first is not below
// `num_staying`. All threads call both, and meet behind each work; then thread 0 calls end_work(i), while the others are
// at the next one.
template <class Work, class EndWork>
__device__ inline void take_items(uint32_t* num_taken, uint32_t end, uint32_t num_staying, const Work& work,
                                  const EndWork& end_work) {
  __shared__ uint32_t taken[2];  // this item and the next one, in turns
  if (threadIdx.x == 0) taken[0] = atomicAdd(num_taken, 1u);
  __syncthreads();
  const bool stays = taken[0] < num_staying;
#pragma unroll 1
  for (uint32_t turn = 0; taken[turn] < end; turn ^= 1) {
    const uint32_t i = taken[turn];
    uint32_t next = end;
    if (stays && threadIdx.x == 0) next = atomicAdd(num_taken, 1u);  // it comes during this one
    work(i);
    if (threadIdx.x == 0) taken[turn ^ 1] = next;
    __syncthreads();
    if (threadIdx.x == 0) end_work(i);
  }
}

// What the kernels before have told, and to whom, is older than the previous one.
template <class Unit, int kAtOnce, class Give>
__device__ inline void push_and_sum(const Arguments& args, const Give& give) {
  __shared__ Memories memories;
  __shared__ uint64_t value;
  const Ranks& ranks = args.ranks;
  const Order& order = args.order;
  State& state = *ranks.state;
  if (threadIdx.x == 0) value = next_value(state, Push::kResults, state.signature);
  memories.load(ranks);
  const auto push_item = [&](uint32_t i) {
    push<Unit, kAtOnce>(args, memories, {i / order.num_pushes, i % order.num_pushes}, give);
  };
  const auto end_push = [&](uint32_t i) {
    const uint32_t word = 1 + i / order.num_pushes;
    if (!is_last(state, word, order.num_pushes)) return;
    for (uint32_t rank = 0; rank < ranks.num_ranks; ++rank) {
      if (rank != ranks.rank) tell(words(memories.of[rank], word) + ranks.rank, value);
    }
  };
  const auto sum_item = [&](uint32_t i) {
    const Item item = {i / order.num_sums, i % order.num_sums};
    wait_for_others(ranks, memories, 1 + item.chunk, value);
    wait_for_previous_kernel();  // which may read the memory of y
    sum<Unit, kAtOnce>(args, memories.of[ranks.rank], item, give);
  };
  take_items(&state.num_pushes, order.num_chunks * order.num_pushes, order.num_pushing, push_item, end_push);
  take_items(&state.num_sums, order.num_chunks * order.num_sums, ~0u, sum_item, [](uint32_t) {});
  if (threadIdx.x == 0 && atomicAdd(&state.num_left, 1u) == gridDim.x - 1) {
    state.num_pushes = state.num_sums = state.num_left = 0;
    ++state.counts[static_cast<int>(Push::kResults)];
  }
}

template <class Unit>
struct GiveSlots {
  const Arguments& args;

  __device__ void load(uint32_t slot, uint32_t unit, Unit& value) const {
    value = reinterpret_cast<const Unit*>(args.results.y)[int64_t{slot} * args.units.value + unit];
  }
  __device__ bool has(uint32_t slot, uint32_t unit, Unit& value) const {
    const int* ids = args.results.ids + static_cast<int64_t>(slot) * args.top_k;
    bool is_here = false;
    for (uint32_t j = 0; j < args.top_k; ++j) is_here |= ids[j] - args.results.first_expert < args.results.num_experts;
    return is_here;
  }
  __device__ void own(uint32_t slot, uint32_t unit, Unit& value) const {}
};

template <Input kWeights>
struct GiveSums {
  const Arguments& args;

  __device__ void load(uint32_t slot, uint32_t unit, uint4& value) const {}
  __device__ bool has(uint32_t slot, uint32_t unit, uint4& value) const {
    return has<kWeights>(args.rows, slot, unit, value);
  }
  __device__ void own(uint32_t slot, uint32_t unit, uint4& value) const {
    if (args.sums.scores == 0) {
      has(slot, unit, value);
      return;
    }
    Rows own = args.rows;
    own.weight_choice_bytes = sizeof(float), own.weight_token_bytes = own.top_k * own.weight_choice_bytes;
    const int64_t before = args.ranks.rank * args.max_tokens * own.weight_token_bytes;  // of slots of other ranks
    own.weights = args.ranks.state->memory[args.ranks.rank] + args.sums.scores - before;
    has<Input::kFloat>(own, slot, unit, value);
  }

 private:
  template <Input kOfWeights>
  __device__ static bool has(const Rows& rows, uint32_t slot, uint32_t unit, uint4& value) {
    Columns<uint4> sums = {};
    const bool has_row = weighted_sum<kOfWeights, 4>(rows, slot, unit * 8, sums.values);
    value = sums.rounded();
    return has_row;
  }
};

// The sums of y[d, slot] over the ranks d with an expert of a token of this rank, and those of of_choices.
// Grid: any; a CTA works at an item at a time, a thread at units of rows.
// Shared memory: an address for each rank, items, and a word. Barriers: all threads meet behind each item.
// Alignment: that of Unit, for y, its rows and their length.
template <class Unit>
__global__ void __launch_bounds__(256, 4) give_back_kernel(const __grid_constant__ Arguments args) {
  wait_for_previous_kernel();
  push_and_sum<Unit, 2>(args, GiveSlots<Unit>{args});
}

// The same with y[slot] = sum of weights[slot, j] * rows.y[token_to_row[slot, j]] over j, rounded to BF16, as
// `combine_kernel` has it; the weights of this rank's own slots are sums.scores.
// Grid, shared memory and barriers: as above, with units of eight columns.
// Alignment: rows.y and its rows are at multiples of 16 B; H is a multiple of 8.
template <Input kWeights>
__global__ void __launch_bounds__(256, 3) combine_and_give_back_kernel(const __grid_constant__ Arguments args) {
  push_and_sum<uint4, 1>(args, GiveSums<kWeights>{args});
}
