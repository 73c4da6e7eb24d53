// Give back results on Hopper: what the experts here give for a token, to the rank that it came from.
#include "ranks.cuh"

struct Results {
  const uint8_t* y;         // [P M, H], the rows of slots, or null: none are given back
  uint32_t row_bytes;       // of a row, which is its pitch, too
  const float* of_choices;  // [P M, k], or null
  int64_t rows, of_scores;  // where in a memory [P M, H] and [P M, k] lie
};

struct Arguments {
  Ranks ranks;
  Meeting meeting;
  Choices choices;  // of all slots: num_tokens is P M
  Results results;
};

// rows[rank * M + t] = y[s * M + t] in the memory of rank s, for each slot with an expert here; of_scores of all slots.
// Grid: a warp moves a piece of a row at a time. Shared memory: a word. Barriers: the meeting's.
// Alignment: that of Unit, for all rows and their length.
template <class Unit>
__global__ void __launch_bounds__(256) give_back_kernel(const __grid_constant__ Arguments args) {
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
