// The GPUs of a host that are the ranks of a group: each writes into the others' memory, and they meet.
//
// T tokens of a rank, at most M of any, k choices each, P ranks, E experts, H hidden. Every rank has a memory of one
// layout, which all others can write. Token t of rank s has slot s * M + t in what a rank receives; what rank d gives
// back for it has slot d * M + t. So each place has one writer, whatever the timing, and nothing has to be counted.
//
// A kernel pushes, tells all ranks that it has, and waits until all have told: then the memory of this rank is complete,
// and the next kernel may read it. Pushes of tokens and of results take turns, and nobody pushes before all have told of
// the push before. So what is read of one kind is no longer written: the others wait for this rank's push of the other.
#pragma once
#include "base.cuh"

constexpr int kMaxRanks = 16;

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

// ---- Moving rows ----

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
