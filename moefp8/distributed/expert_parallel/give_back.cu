// Give back results on Hopper: what the experts here give for a token goes to the rank that it came from, and what all
// ranks give for the tokens here is summed. What this rank gives for its own tokens is added as it is computed.
//
// director.cuh says which CTA does what, and when. The workers of a CTA push and sum, piece by piece: neighbouring units
// of a row, one of each lane.
//
// As soon as a rank has told of its last chunk, the others may push the next tokens, and what this rank received is
// overwritten. So a sum reads nothing of that.
#include "director.cuh"
#include "divisor.cuh"
#include "fp8.cuh"
#include "input.cuh"
#include "matrix.cuh"

// Rows of slots that are there.
struct Results {
  const uint8_t* y;         // bf16 [P M, H]
  const int* ids;           // [P M, k]
  const float* of_choices;  // [P M, k], which go with the rows; or null
  uint32_t first_expert, num_experts;  // of this rank
};

// Rows of experts, of which those of a slot are summed.
struct Rows {
  const uint8_t* y;         // bf16 [R, H]
  int64_t y_row_bytes;      // the pitch of rows
  const int* token_to_row;  // [P M, k]; -1: no row
  const float* weights;     // [P M, k]
};

// Where results lie in a memory, and their sums.
struct Sums {
  int64_t rows, of_choices;  // [P M, H] and [P M, k], of the other ranks
  int64_t reached;           // [M]: a bit for each rank that gives something for a token of this rank
  int64_t scores;            // fp32 [M, k]: of this rank's tokens, the weights of its own slots; 0: those of rows
  uint8_t* y;                // bf16 [T, H]
  float* y_of_choices;       // [T, k]
};

struct Arguments {
  Ranks ranks;
  uint64_t turn;    // that it ends
  Results results;  // what the first kernel gives back; of the second, of_choices alone
  Rows rows;        // what the second one sums
  Sums sums;
  Order order;
  uint32_t num_tokens, max_tokens, top_k;  // T, M, k
  uint32_t num_units;                      // of a row
  Divisor num_pieces;                      // of a row
  Divisor num_others;                      // P - 1, or 1
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

// A piece of a token's row, and the unit of it that this lane has, which may be past the row's end.
struct Place {
  uint32_t source, token, piece, unit;

  __device__ Place(uint32_t source, uint32_t token, uint32_t piece)
      : source(source), token(token), piece(piece), unit(piece * kWarp + threadIdx.x % kWarp) {}
};

// The pieces of this warp in an item of `num_rows` rows.
struct Pieces {
  uint32_t begin, end;

  __device__ Pieces(const Arguments& args, uint32_t part, uint32_t num_rows) {
    begin = (part * kWorkers + threadIdx.x / kWarp) * args.order.pieces_of_warp;
    end = min(num_rows * args.num_pieces.value, begin + args.order.pieces_of_warp);
  }
};

// An item of a push to the other ranks. `give.load` begins to read what a slot has here, for kAtOnce pieces together;
// `give.has` tells whether it has something, and what. All lanes of a warp ask for one slot.
template <class Unit, int kAtOnce, class Give>
__device__ inline void push(const Arguments& args, const Memories& memories, const Item& item, Give& give) {
  const Order& order = args.order;
  const uint32_t max_tokens = args.max_tokens, num_others = args.num_others.value, lane = threadIdx.x % kWarp;
  const uint32_t first_token = item.chunk * order.num_tokens;
  const Pieces pieces(args, item.part, min(order.num_tokens, max_tokens - first_token) * num_others);
  const auto place_of = [&](uint32_t piece) {
    // Neighbouring rows go to different ranks, so that all links are busy at all times.
    const uint32_t row = args.num_pieces.quotient(piece), in_chunk = args.num_others.quotient(row);
    uint32_t source = row - in_chunk * num_others + args.ranks.rank + 1;
    if (source >= args.ranks.num_ranks) source -= args.ranks.num_ranks;
    return Place(source, first_token + in_chunk, piece - row * args.num_pieces.value);
  };
#pragma unroll 1
  for (uint32_t first = pieces.begin; first < pieces.end; first += kAtOnce) {
    Unit values[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const Place place = place_of(min(first + j, pieces.end - 1));
      give.load(place.source * max_tokens + place.token, min(place.unit, args.num_units - 1), values[j]);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j >= pieces.end) break;
      const Place place = place_of(first + j);
      const uint32_t slot = place.source * max_tokens + place.token;
      if (!give.has(slot, min(place.unit, args.num_units - 1), values[j])) continue;
      const int64_t there = args.ranks.rank * max_tokens + place.token;
      uint8_t* memory = memories.of[place.source];
      Unit* rows = reinterpret_cast<Unit*>(memory + args.sums.rows);
      if (place.unit < args.num_units) rows[there * args.num_units + place.unit] = values[j];
      if (place.piece != 0 || args.results.of_choices == nullptr) continue;
      float* of_choices = reinterpret_cast<float*>(memory + args.sums.of_choices) + there * args.top_k;
      for (uint32_t choice = lane; choice < args.top_k; choice += kWarp) {
        of_choices[choice] = args.results.of_choices[int64_t{slot} * args.top_k + choice];
      }
    }
  }
}

// An item of a sum, in FP32 and in the order of ranks. No load has a condition that is in memory, so that all are in
// flight at once: what a rank has not given is read, and not added.
template <class Unit, int kAtOnce, class Give>
__device__ inline void sum(const Arguments& args, const uint8_t* memory, const Item& item, Give& give) {
  constexpr int kRanks = 2;  // whose rows are in flight together
  const Order& order = args.order;
  const uint32_t first_token = item.chunk * order.num_tokens, rank = args.ranks.rank, lane = threadIdx.x % kWarp;
  const uint32_t num_ranks = args.ranks.num_ranks, num_units = args.num_units;
  if (first_token >= args.num_tokens) return;
  const Pieces pieces(args, item.part, min(order.num_tokens, args.num_tokens - first_token));
  const uint32_t* reached = reinterpret_cast<const uint32_t*>(memory + args.sums.reached);
  const Unit* rows = reinterpret_cast<const Unit*>(memory + args.sums.rows);
  const int64_t of_rank = int64_t{args.max_tokens} * num_units;
  const auto place_of = [&](uint32_t piece) {
    const uint32_t row = args.num_pieces.quotient(piece);
    return Place(rank, first_token + row, piece - row * args.num_pieces.value);
  };
  const auto load = [&](uint32_t first, int64_t at, Unit(&values)[kRanks]) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (first + r < num_ranks && first + r != rank) values[r] = rows[(first + r) * of_rank + at];
    }
  };
#pragma unroll 1
  for (uint32_t first = pieces.begin; first < pieces.end; first += kAtOnce) {
    uint32_t bits[kAtOnce];
    Unit own[kAtOnce], values[kAtOnce][kRanks];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const Place place = place_of(min(first + j, pieces.end - 1));
      const uint32_t unit = min(place.unit, num_units - 1);
      load(0, int64_t{place.token} * num_units + unit, values[j]);
      give.load(rank * args.max_tokens + place.token, unit, own[j]);
      bits[j] = reached[place.token];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j >= pieces.end) break;
      const Place place = place_of(first + j);
      const uint32_t unit = min(place.unit, num_units - 1);
      const int64_t at = int64_t{place.token} * num_units + unit;
      if (bits[j] >> rank & 1) give.own(rank * args.max_tokens + place.token, unit, own[j]);
      Columns<Unit> sums = {};
      for (uint32_t of = 0; of < num_ranks; of += kRanks) {
        if (of > 0) load(of, at, values[j]);
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          if (bits[j] >> (of + r) & 1) sums.add(of + r == rank ? own[j] : values[j][r]);
        }
      }
      if (place.unit < num_units) reinterpret_cast<Unit*>(args.sums.y)[at] = sums.rounded();
      if (place.piece != 0 || args.results.of_choices == nullptr) continue;
      const float* of_choices = reinterpret_cast<const float*>(memory + args.sums.of_choices);
      for (uint32_t choice = lane; choice < args.top_k; choice += kWarp) {
        float of_choice = 0;
        for (uint32_t other = 0; other < num_ranks; ++other) {
          const float* of_slots = other == rank ? args.results.of_choices : of_choices;
          const int64_t slot = other * args.max_tokens + place.token;
          if (bits[j] >> other & 1) of_choice += of_slots[slot * args.top_k + choice];
        }
        args.sums.y_of_choices[int64_t{place.token} * args.top_k + choice] = of_choice;
      }
    }
  }
}

// What the kernels before have told, and to whom, is older than the previous one. The next kernel may start when all
// CTAs have come to sums: until then SMs are free for what other ranks wait for.
template <class Unit, int kAtOnce, class Give>
__device__ inline void push_and_sum(const Arguments& args, Give give) {
  __shared__ Memories memories;
  __shared__ Director::Plan plan;
  __shared__ Step steps[2];  // this one and the next one, in turns
  const Order& order = args.order;
  memories.load(args.ranks);
  Director director{args.ranks, args.turn, order, memories, plan};
  const bool directs = threadIdx.x >= kWorkers * kWarp;
  if (directs) director.begin(steps[0]);
#pragma unroll 1
  for (uint32_t turn = 0;; turn ^= 1) {
    __syncthreads();
    const Step step = steps[turn];
    if (step.kind == Step::kEnd) break;
    if (directs) {
      director.direct(step, steps[turn ^ 1]);
    } else if (step.kind == Step::kPush) {
      push<Unit, kAtOnce>(args, memories, {step.item / order.num_pushes, step.item % order.num_pushes}, give);
    } else if (step.kind == Step::kSum) {
      wait_for_previous_kernel();  // which may read the memory of y
      let_next_kernel_start();
      const Item item = {step.item / order.num_sums, step.item % order.num_sums};
      sum<Unit, kAtOnce>(args, memories.of[args.ranks.rank], item, give);
    }
  }
  if (directs) director.end();
}

// Rows of slots. What a lane knows of a slot it keeps from piece to piece.
template <class Unit>
class GiveSlots {
 public:
  __device__ explicit GiveSlots(const Arguments& args) : args_(args) {}

  __device__ void load(uint32_t slot, uint32_t unit, Unit& value) const {
    value = reinterpret_cast<const Unit*>(args_.results.y)[int64_t{slot} * args_.num_units + unit];
  }
  __device__ bool has(uint32_t slot, uint32_t unit, Unit& value) {
    if (slot == slot_) return has_;
    const int* ids = args_.results.ids + int64_t{slot} * args_.top_k;
    bool is_here = false;
    for (uint32_t j = threadIdx.x % kWarp; j < args_.top_k; j += kWarp) {
      is_here |= ids[j] - args_.results.first_expert < args_.results.num_experts;
    }
    slot_ = slot, has_ = __any_sync(0xffffffff, is_here);
    return has_;
  }
  __device__ void own(uint32_t slot, uint32_t unit, Unit& value) const {}

 private:
  const Arguments& args_;
  uint32_t slot_ = ~0u;
  bool has_;
};

// Sums of the rows of experts. A lane keeps the row and the weight of a choice from piece to piece of a slot.
class GiveSums {
 public:
  __device__ explicit GiveSums(const Arguments& args) : args_(args) {}

  __device__ void load(uint32_t slot, uint32_t unit, uint4& value) const {}
  __device__ bool has(uint32_t slot, uint32_t unit, uint4& value) {
    return sum(slot, unit, value, args_.rows.weights + int64_t{slot} * args_.top_k);
  }
  __device__ void own(uint32_t slot, uint32_t unit, uint4& value) {
    const float* weights = args_.rows.weights + int64_t{slot} * args_.top_k;
    if (args_.sums.scores != 0) {
      const uint8_t* memory = args_.ranks.state->memory[args_.ranks.rank];
      const uint32_t token = slot - args_.ranks.rank * args_.max_tokens;
      weights = reinterpret_cast<const float*>(memory + args_.sums.scores) + int64_t{token} * args_.top_k;
    }
    sum(slot, unit, value, weights);
  }

 private:
  // In FP32 and in the order of choices: products and sums are rounded each. Returns whether a choice has a row.
  __device__ bool sum(uint32_t slot, uint32_t unit, uint4& value, const float* weights_of_slot) {
    constexpr int kAtOnce = 4;  // rows that are in flight together
    const Rows& rows = args_.rows;
    const uint32_t lane = threadIdx.x % kWarp, top_k = args_.top_k;
    Columns<uint4> sums = {};
    bool has_row = false;
    for (uint32_t first = 0; first < top_k; first += kWarp) {
      if (slot != slot_ || top_k > kWarp) {
        const uint32_t choice = min(first + lane, top_k - 1);
        row_ = first + lane < top_k ? rows.token_to_row[int64_t{slot} * top_k + choice] : -1;
        weight_ = weights_of_slot[choice];
      }
      uint32_t choices = __ballot_sync(0xffffffff, row_ >= 0);
      has_row |= choices != 0;
      wait_for_previous_kernel();  // plan and weights are older
#pragma unroll 1
      while (choices != 0) {
        Eight<Input::kBFloat16> values[kAtOnce];
        float weights[kAtOnce];
        const int count = __popc(choices);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int choice = __ffs(choices) - 1;  // -1 where there are no more
          choices &= choices - 1;
          const int row = __shfl_sync(0xffffffff, row_, choice & 31);
          weights[i] = __uint_as_float(__shfl_sync(0xffffffff, __float_as_uint(weight_), choice & 31));
          if (i < count) values[i].load_once(rows.y + row * rows.y_row_bytes, unit * 8);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (i >= count) break;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            sums.values[j] = __fadd_rn(sums.values[j], __fmul_rn(weights[i], values[i][j]));
          }
        }
      }
    }
    slot_ = slot;
    value = sums.rounded();
    return has_row;
  }

  const Arguments& args_;
  uint32_t slot_ = ~0u;
  int row_;
  float weight_;
};

// The sums of y[d, slot] over the ranks d with an expert of a token of this rank, and those of of_choices.
// Grid: any; a CTA works at an item at a time, its warps at pieces of rows.
// Shared memory: an address for each rank, two steps, and what the director knows.
// Barriers: those are complete; all threads meet before each step.
// Alignment: that of Unit, for y, its rows and their length.
template <class Unit>
__global__ void __launch_bounds__(kThreads, 3) give_back_kernel(const __grid_constant__ Arguments args) {
  wait_for_previous_kernel();
  push_and_sum<Unit, 2>(args, GiveSlots<Unit>(args));
}

// The same with y[slot] = sum of weights[slot, j] * rows.y[token_to_row[slot, j]] over j, rounded to BF16, as
// `combine_kernel` has it; the weights of this rank's own slots are sums.scores.
// Grid, shared memory and barriers: as above, with units of eight columns.
// Alignment: rows.y and its rows are at multiples of 16 B; H is a multiple of 8.
__global__ void __launch_bounds__(kThreads, 3) combine_and_give_back_kernel(const __grid_constant__ Arguments args) {
  push_and_sum<uint4, 1>(args, GiveSums(args));
}
