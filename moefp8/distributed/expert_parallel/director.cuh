// Which CTA gives back what, and when.
//
// The tokens of a rank are cut into chunks, and all ranks cut alike. An item is a part of a chunk's push or of its sum.
// CTAs that come first take pushes; the others take sums at once, and those that push when no push is left. They wait
// for a sum until all ranks have pushed the chunk: so sums are computed while later chunks travel. Items are taken by
// CTAs that run, and CTAs that push do not wait: all that is waited for comes, however few CTAs run at once.
//
// Eight warps of a CTA, its workers, move data. A ninth directs them: while they are at an item, it takes the next one,
// waits for its chunk, and tells of pushes before.
#pragma once
#include "ranks.cuh"

constexpr int kWorkers = 8;  // warps
constexpr int kThreads = (kWorkers + 1) * kWarp;

struct Order {
  uint32_t num_chunks, num_tokens;  // of a chunk, of each rank
  uint32_t num_pushes, num_sums;    // items of a chunk
  uint32_t pieces_of_warp;          // in an item
  uint32_t num_pushing;             // CTAs; those that come first
};

// A part of a chunk.
struct Item {
  uint32_t chunk, part;
};

// What the workers of a CTA do until all meet again.
struct Step {
  enum Kind { kPush, kSum, kNothing, kEnd } kind;
  uint32_t item;
};

// The warp that says what they do. Its lane r waits for rank r, and the lane of this rank takes items. What it knows
// lies in shared memory, since registers are the workers'.
class Director {
 public:
  static constexpr uint32_t kTogether = 2;  // pushes that are counted behind one fence, which takes some us

  struct Plan {
    uint64_t value;           // what all ranks tell
    bool pushes;              // whether this CTA takes pushes
    uint32_t sum;             // taken, and not yet begun
    uint32_t num_held;        // pushes that are not yet counted
    uint32_t held[kTogether];
  };

  // Sets the first step, at which nothing is done.
  __device__ void begin(Step& first) {
    State& state = *ranks.state;
    const bool all_push = order.num_pushing >= gridDim.x;
    const bool pushes = all_push || take(state.num_begun) < order.num_pushing;
    if (!is_leader()) return;
    check_turn(ranks, turn, newest_turn(state));
    plan = {next_value(state, Push::kResults, turn), pushes, kNone, 0};
    first = {Step::kNothing, 0};
  }

  // Called while the workers are at a step, when the one before has ended: counts pushes, and sets what comes next. It
  // waits for nobody while a push of this CTA is not counted, for which others may wait.
  __device__ void direct(const Step& now, Step& next) {
    uint32_t num_held = plan.num_held, sum = plan.sum;
    bool pushes = plan.pushes;
    Step found = {Step::kPush, 0};
    if (pushes) found.item = take(ranks.state->num_pushes);
    pushes = pushes && found.item < order.num_chunks * order.num_pushes;
    if (!pushes && sum == kNone) sum = take(ranks.state->num_sums);
    if (num_held == kTogether || now.kind != Step::kPush) {
      if (lane() < num_held) count(plan.held[lane()]);
      __syncwarp();
      num_held = 0;
    }
    if (now.kind == Step::kPush) {
      if (is_leader()) plan.held[num_held] = now.item;
      ++num_held;
    }
    if (!pushes && num_held > 0) {
      found.kind = Step::kNothing;
    } else if (!pushes) {
      found = {sum < order.num_chunks * order.num_sums ? Step::kSum : Step::kEnd, sum};
      if (found.kind == Step::kSum) wait_for(1 + sum / order.num_sums);
      sum = kNone;
    }
    __syncwarp();  // all have read the plan
    if (!is_leader()) return;
    next = found;
    plan.pushes = pushes, plan.num_held = num_held, plan.sum = sum;
  }

  // Behind the last step.
  __device__ void end() {
    State& state = *ranks.state;
    if (!is_leader()) return;
    const uint64_t newest = newest_turn(state);
    const uint32_t num_left = atomicAdd(&state.num_left, 1u);
    check_turn(ranks, turn, newest);
    if (num_left != gridDim.x - 1) return;
    state.num_begun = state.num_pushes = state.num_sums = state.num_left = 0;
    ++state.counts[static_cast<int>(Push::kResults)];
  }

  const Ranks& ranks;
  const uint64_t turn;  // that it ends
  const Order& order;
  const Memories& memories;
  Plan& plan;

 private:
  static constexpr uint32_t kNone = ~0u;

  __device__ static uint32_t lane() { return threadIdx.x % kWarp; }
  __device__ bool is_leader() const { return lane() == ranks.rank; }
  __device__ uint32_t take(uint32_t& num_taken) const {
    uint32_t taken = 0;
    if (is_leader()) taken = atomicAdd(&num_taken, 1u);
    return __shfl_sync(0xffffffff, taken, ranks.rank);
  }
  // Counts a push that has ended, and tells the others of a chunk with its last one.
  __device__ void count(uint32_t push) const {
    const uint32_t word = 1 + push / order.num_pushes;
    if (!is_last(*ranks.state, word, order.num_pushes)) return;
#pragma unroll 1
    for (uint32_t rank = 0; rank < ranks.num_ranks; ++rank) {
      if (rank != ranks.rank) tell(words(memories.of[rank], word) + ranks.rank, plan.value);
    }
  }
  __device__ void wait_for(uint32_t word) const {
    if (lane() < ranks.num_ranks && !is_leader()) {
      wait_for_rank(ranks, memories, word, lane(), plan.value);
    }
    __syncwarp();
  }
};
