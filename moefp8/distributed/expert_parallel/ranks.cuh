// The GPUs of a host that are the ranks of a group: each writes into the others' memory, and they meet.
//
// T tokens of a rank, at most M of any, k choices each, P ranks, E experts, H hidden. Every rank has a memory of one
// layout, which all others can write. Token t of rank s has slot s * M + t in what a rank receives; what rank d gives
// back for it has slot d * M + t. So each place has one writer, whatever the timing, and nothing has to be counted.
//
// A kernel pushes, tells all ranks that it has, and waits until all have told: then what this rank received is complete.
// Pushes of tokens and of results take turns, and nobody pushes before all have told of the push before. So what is
// read of one kind is no longer written, if it is read before this rank tells of its next push of the other kind.
// A turn is a push of tokens and the push of results that answers it. Where none answers, the next push of tokens first
// ends the turn: all ranks tell that they have read, and wait for each other.
#pragma once
#include "base.cuh"

constexpr int kMaxRanks = 16;
constexpr int kMaxChunks = 128;           // in which results are pushed
constexpr int kNumWords = 1 + kMaxChunks;  // that each rank tells: of tokens, and of each chunk of results

// What a rank knows of the others, in the memory of its GPU.
struct State {
  uint64_t counts[2];             // how often they have met behind a push of tokens, and of results
  uint64_t turn;                  // the last that has begun: its signature, plus 2^32 times a number of this rank's own
  uint32_t* error;                // [4] in the host's memory: kind, rank, what it told
  uint8_t* memory[kMaxRanks];     // that of each rank
  uint32_t num_ended[kNumWords];  // parts of what a word tells of; 0 between kernels
  uint32_t num_pushes, num_sums;  // items of results that are taken; 0 between kernels
  uint32_t num_begun;             // CTAs, if not all of them push first; 0 between kernels
  uint32_t num_left;              // CTAs that have given results back, and ended; 0 between kernels
  uint32_t num_failed;            // threads that have found something wrong
};

struct Ranks {
  State* state;
  uint64_t deadline_ns;      // how long to wait for the others
  uint32_t rank, num_ranks;  // this one, P
};

enum class Push { kTokens, kResults };

// What stands in place of a signature where a turn ends without results. No signature has this value.
constexpr uint64_t kNoResults = 0xffffffff;

// What `fail` writes: a rank did not come, or is at something else; or two turns of this rank overlap.
enum Failure : uint32_t { kDidNotCome = 1, kIsElsewhere = 2, kOverlaps = 3 };

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
// The same, while one waits: nothing that was pushed before is visible yet, and the SM keeps its cache.
__device__ inline uint64_t glance(const uint64_t* word) {
  uint64_t value;
  asm volatile("nanosleep.u32 20;" ::: "memory");
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Writes down what is wrong, and ends all work of this process on the GPU, so that no result is taken for right.
__device__ inline void fail(const Ranks& ranks, Failure kind, uint32_t rank, uint64_t told) {
  uint32_t* error = ranks.state->error;
  if (atomicAdd(&ranks.state->num_failed, 1u) > 0) {  // another thread writes
    while (*reinterpret_cast<volatile uint32_t*>(error) == 0) continue;
    asm volatile("trap;");
  }
  error[1] = rank, error[2] = static_cast<uint32_t>(told >> 32), error[3] = static_cast<uint32_t>(told);
  fence_system();
  error[0] = kind;
  fence_system();
  asm volatile("trap;");
}

// The memory of each rank, where all threads of the CTA find it at once.
struct Memories {
  uint8_t* of[kMaxRanks];

  // All threads of the CTA call it.
  __device__ void load(const Ranks& ranks) {
    if (threadIdx.x < kMaxRanks) of[threadIdx.x] = ranks.state->memory[threadIdx.x];
    __syncthreads();
  }
};

// The words of a memory, with which it begins: [kNumWords, kMaxRanks], of each rank.
__device__ inline uint64_t* words(uint8_t* memory, uint32_t word) {
  return reinterpret_cast<uint64_t*>(memory) + word * kMaxRanks;
}

// What all ranks tell of the next push of a kind, in a turn.
__device__ inline uint64_t next_value(const State& state, Push push, uint64_t turn) {
  return state.counts[static_cast<int>(push)] + 1 << 32 | (turn & 0xffffffff);
}

// Whether this ends the last of the `count` parts of what a word tells of. A thread calls it behind a barrier of those
// that have pushed a part. What has been pushed of all parts comes before what it tells then.
__device__ inline bool is_last(State& state, uint32_t word, uint32_t count) {
  fence_system();
  if (atomicAdd(&state.num_ended[word], 1u) != count - 1) return false;
  fence_system();
  state.num_ended[word] = 0;
  return true;
}

// Waits until another rank has told `value`.
__device__ inline void wait_for_rank(const Ranks& ranks, const Memories& memories, uint32_t word, uint32_t rank,
                                     uint64_t value) {
  const uint64_t* own = words(memories.of[ranks.rank], word) + rank;
  const uint64_t begin = now_ns();
  while (heard(own) != value) {
    uint64_t told = glance(own);
    while (told != value) {
      if (told >> 32 == value >> 32) fail(ranks, kIsElsewhere, rank, told);
      if (now_ns() - begin > ranks.deadline_ns) fail(ranks, kDidNotCome, rank, told);
      told = glance(own);
    }
  }
}

// ---- Turns ----

// Read past the cache of the SM, since a kernel of another stream may write it.
__device__ inline uint64_t newest_turn(const State& state) {
  return *reinterpret_cast<const volatile uint64_t*>(&state.turn);
}

// Fails if another turn has begun than that of this kernel: one of another stream, which overwrites what this one reads.
__device__ inline void check_turn(const Ranks& ranks, uint64_t turn, uint64_t newest) {
  if (newest != turn) fail(ranks, kOverlaps, ranks.rank, newest);
}

// Whether no results have answered the last push of tokens.
__device__ inline bool is_open(const State& state) {
  return state.counts[static_cast<int>(Push::kTokens)] != state.counts[static_cast<int>(Push::kResults)];
}

// Ends a turn that is open: waits until all ranks have read what they received. All threads of each CTA call it, before
// any of them pushes; the last CTA of the kernel counts it.
__device__ inline void end_turn(const Ranks& ranks, const Memories& memories) {
  const uint64_t value = next_value(*ranks.state, Push::kResults, kNoResults);
  if (threadIdx.x < ranks.num_ranks && threadIdx.x != ranks.rank) {
    tell(words(memories.of[threadIdx.x], 1) + ranks.rank, value);  // each CTA tells the same
    wait_for_rank(ranks, memories, 1, threadIdx.x, value);
  }
  __syncthreads();
}
