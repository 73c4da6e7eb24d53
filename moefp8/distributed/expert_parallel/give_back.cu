// Give back results on Hopper: what the experts here give for a token, to the rank that it came from.
#include "divisor.cuh"
#include "matrix.cuh"
#include "ranks.cuh"
#include "weighted_sum.cuh"

// Rows of slots that are there.
struct Results {
  const uint8_t* y;    // [P M, H], or null: nothing is given back
  uint32_t row_bytes;  // of a row, which is its pitch, too
};

// Rows of experts, of which those of a slot are summed.
struct Rows {
  const uint8_t* y;         // bf16 [R, H]
  int64_t y_row_bytes;      // the pitch of rows
  const int* token_to_row;  // [P M, k]; -1: no row
  const uint8_t* weights;   // [P M, k]
  int64_t weight_token_bytes, weight_choice_bytes;
  uint32_t top_k;
  Divisor units;  // how many units of eight columns a row has
};

struct Arguments {
  Ranks ranks;
  Choices choices;          // of all slots: num_tokens is P M
  Results results;          // what the first kernel gives back
  Rows rows;                // what the second one sums
  const float* of_choices;  // [P M, k], or null
  int64_t to, scores_to;    // where in a memory [P M, H] and [P M, k] lie
  uint32_t hidden_size;
};

// Each rank gets back of_choices of all its slots.
__device__ inline void give_back_scores(const Arguments& args, const Memories& memories) {
  if (args.of_choices == nullptr) return;
  const uint32_t in_rank = args.choices.max_tokens * args.choices.top_k, end = in_rank * args.ranks.num_ranks;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x) {
    const uint32_t source = i / in_rank, at = args.ranks.rank * in_rank + i - source * in_rank;
    reinterpret_cast<float*>(memories.of[source] + args.scores_to)[at] = args.of_choices[i];
  }
}

// to[rank * M + t] = y[s * M + t] in the memory of rank s, for each slot with an expert here; of_choices of all slots.
// Grid: a warp moves a piece of a row at a time.
// Shared memory: an address for each rank, and a word. Barriers: those are complete; the meeting's.
// Alignment: that of Unit, for all rows and their length.
template <class Unit>
__global__ void __launch_bounds__(256) give_back_kernel(const __grid_constant__ Arguments args) {
  const Ranks& ranks = args.ranks;
  const Choices& choices = args.choices;
  const Results& results = args.results;
  const uint32_t num_units = results.row_bytes / sizeof(Unit), num_pieces = ceil_div(num_units, Piece<Unit>::kUnits);
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, num_threads = gridDim.x * blockDim.x;
  const uint32_t end = results.y == nullptr ? 0 : choices.num_tokens * num_pieces;
  __shared__ Memories memories;
  memories.load(ranks);
  wait_for_previous_kernel();
#pragma unroll 1
  for (uint32_t i = thread / kWarp; i < end; i += num_threads / kWarp) {
    const uint32_t slot = i / num_pieces, first = (i - slot * num_pieces) * Piece<Unit>::kUnits;
    if ((choices.ranks_of<kWarp>(slot, ranks.num_ranks) >> ranks.rank & 1) == 0) continue;
    const uint32_t source = slot / choices.max_tokens, token = slot - source * choices.max_tokens;
    Piece<Unit> piece;
    piece.load(results.y + static_cast<int64_t>(slot) * results.row_bytes, first, num_units);
    const int64_t there = ranks.rank * choices.max_tokens + token;
    piece.store(memories.of[source] + args.to + there * results.row_bytes, first, num_units);
  }
  give_back_scores(args, memories);
  meet<Push::kResults>(ranks, memories, ranks.state->signature);
}

// The same with y[slot] = sum of weights[slot, j] * rows.y[token_to_row[slot, j]] over j, rounded to BF16, as
// `combine_kernel` has it.
// Grid: a thread owns eight neighbouring columns of a slot at a time; neighbouring threads the next ones.
// Shared memory and barriers: as above.
// Alignment: rows.y and its rows are at multiples of 16 B; H is a multiple of 8.
template <Input kWeights>
__global__ void __launch_bounds__(256, 3) combine_and_give_back_kernel(const __grid_constant__ Arguments args) {
  const Ranks& ranks = args.ranks;
  const Rows& rows = args.rows;
  const uint32_t max_tokens = args.choices.max_tokens, end = args.choices.num_tokens * rows.units.value;
  __shared__ Memories memories;
  memories.load(ranks);
#pragma unroll 1
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x) {
    const uint32_t slot = rows.units.quotient(i), column = (i - slot * rows.units.value) * 8;
    float sums[8] = {};
    if (!weighted_sum<kWeights>(rows, slot, column, sums)) continue;
    const uint32_t source = slot / max_tokens;
    const int64_t there = ranks.rank * max_tokens + slot - source * max_tokens;
    uint8_t* target = memories.of[source] + args.to + (there * args.hidden_size + column) * 2;
    *reinterpret_cast<uint4*>(target) = {pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]),
                                         pack_bf16(sums[4], sums[5]), pack_bf16(sums[6], sums[7])};
  }
  wait_for_previous_kernel();  // also where a thread has summed nothing
  give_back_scores(args, memories);
  meet<Push::kResults>(ranks, memories, ranks.state->signature);
}
