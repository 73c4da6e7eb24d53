// The routing plan on the device, which says what row each choice has: T tokens, k choices each, E experts.
//
// A CTA owns a chunk of neighbouring tokens and finds their rows alone: it counts the choices of all tokens, so that no
// CTA waits for another. Where tokens are many, an earlier kernel has counted the choices of each chunk. Within an
// expert, rows keep the order of the tokens.
#pragma once
#include "divisor.cuh"

struct Routing {
  const uint8_t* ids;                 // int32 or int64 [T, k]; an id of no expert here has no row
  int64_t token_bytes, choice_bytes;  // the distances from one to the next in ids
  uint64_t first_expert;              // the id of the first expert here
  int* tokens_per_expert;             // [E]
  int* expert_offsets;                // [E + 1]
  int* token_to_row;                  // [T, k]
  uint32_t num_tokens, top_k, num_experts;
  uint32_t is_wide;            // whether ids are int64
  uint32_t chunk;              // tokens of a CTA
  uint32_t max_m;              // rows of each expert; 0: as many as it has tokens
  Divisor alignment;           // without max_m, the rows of an expert are a multiple of this
  uint32_t num_slots;          // more than E, a multiple of 128
  Divisor of_k;                // k
  uint32_t rows_of_token;      // places for its rows in shared memory: at least k, a multiple of 4
  uint32_t tokens_at_once;     // a warp holds the choices of so many: as many as fit, at least one
  uint32_t reciprocal_of_k;    // lane / k == lane * reciprocal_of_k >> 16
  uint32_t num_rankers;        // warps of a CTA that rank choices: see `Plan`

  // The expert of a choice, as it is counted here; E if it is none. The choice is counted over all tokens or within its
  // token.
  __device__ uint32_t expert(uint32_t index) const {
    const uint32_t token = of_k.quotient(index);
    return expert(token, index - token * top_k);
  }
  __device__ uint32_t expert(uint32_t token, uint32_t choice) const {
    const uint8_t* id = ids + token * token_bytes + choice * choice_bytes;
    const int64_t expert = is_wide ? *reinterpret_cast<const int64_t*>(id) : *reinterpret_cast<const int*>(id);
    return min(static_cast<uint64_t>(expert) - first_expert, static_cast<uint64_t>(num_experts));
  }

  // Where a segment ends that begins at `first_row`, and whose last used row ends at `end`.
  template <bool kAligned>
  __device__ uint32_t segment_end(uint32_t first_row, uint32_t end) const {
    if (max_m) return first_row + max_m;
    return kAligned ? alignment.quotient(end + alignment.value - 1) * alignment.value : end;
  }
};

// The choice of a lane: a warp holds those of `tokens_at_once` tokens, or 32 of one token.
struct Choice {
  uint32_t token, choice;
  uint32_t held_token;  // its index among those that the warp holds
  bool exists;

  __device__ Choice(const Routing& routing, uint32_t first_token, uint32_t first_choice, uint32_t end) {
    const uint32_t lane = threadIdx.x % kWarp;
    held_token = lane * routing.reciprocal_of_k >> 16;
    token = first_token + held_token;
    choice = first_choice + lane - held_token * routing.top_k;
    exists = held_token < routing.tokens_at_once && token < end && choice < routing.top_k;
  }

  // The first lane whose choice is the same expert for the same token. The whole warp calls it.
  __device__ uint32_t first_lane(uint32_t expert) const {
    return __ffs(__match_any_sync(0xffffffff, expert * kWarp + held_token)) - 1;
  }

  // Whether the token named this expert before the choices that the warp holds: never if k <= 32.
  __device__ bool is_named_before(const Routing& routing, uint32_t first_choice, uint32_t expert) const {
    bool found = false;
#pragma unroll 1
    for (uint32_t i = 0; i < first_choice; ++i) found |= routing.expert(token, i) == expert;
    return found;
  }
};

// The part of the plan that a CTA knows, in shared memory. Its steps follow each other. If kMerges, the choices of one
// expert by one token share a row, which costs more; else each has its own.
template <bool kMerges>
struct Plan {
  const Routing& routing;
  const uint32_t begin, end;  // the tokens of this CTA
  int* const next_row;     // [slots]: how many tokens before `begin` an expert has; then, where its next goes
  int* const end_row;      // [slots]: how many others it has; then, the end of its rows
  int* const rows;         // [end - begin, rows_of_token]: experts and ranks; then rows, -1 if there is none
  uint16_t* const ranked;  // [num_rankers, slots]: how many choices the warps before have ranked

  __device__ Plan(const Routing& routing, uint32_t chunk, int* memory)
      : routing(routing),
        begin(min(chunk * routing.chunk, routing.num_tokens)),
        end(min(begin + routing.chunk, routing.num_tokens)),
        next_row(memory),
        end_row(memory + routing.num_slots),
        rows(memory + 2 * routing.num_slots),
        ranked(reinterpret_cast<uint16_t*>(rows + routing.chunk * routing.rows_of_token)) {}

  // 1. All threads: there are no counts and no rows yet.
  __device__ void clear() const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < 2 * routing.num_slots; i += blockDim.x) next_row[i] = 0;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < (end - begin) * routing.rows_of_token; i += blockDim.x) rows[i] = -1;
    __syncthreads();
  }

  // 2. All threads, where choices are many and unless kMerges: how many choices of the chunk named the same expert
  // before each of them. This asks no other CTA, so it can be done before the counts of others are there.
  __device__ void rank() const {
    const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    if (warp < routing.num_rankers) {
      uint16_t* const mine = ranked + warp * routing.num_slots;
#pragma unroll 1
      for (uint32_t i = lane; i < routing.num_slots / 2; i += kWarp) reinterpret_cast<uint32_t*>(mine)[i] = 0;
      __syncwarp();
      const uint32_t limit = min((warp + 1) * share(), choices_of_chunk());
#pragma unroll 1
      for (uint32_t index = warp * share() + lane; index - lane < limit; index += kWarp) {
        const bool exists = index < limit;
        const uint32_t expert = exists ? routing.expert(begin * routing.top_k + index) : routing.num_experts;
        const uint32_t same = __match_any_sync(0xffffffff, expert), before = same & ((1u << lane) - 1);
        const uint32_t rank = mine[expert] + __popc(before);
        __syncwarp();
        if (before == 0) mine[expert] += __popc(same);
        __syncwarp();
        if (exists) rows[place(index)] = expert << 16 | rank;  // shared memory holds fewer of both than 2^16
      }
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t expert = threadIdx.x; expert < routing.num_experts; expert += blockDim.x) {
      uint32_t before = 0;
#pragma unroll 4
      for (uint32_t i = expert; i < routing.num_rankers * routing.num_slots; i += routing.num_slots) {
        const uint32_t count = ranked[i];
        ranked[i] = before, before += count;
      }
    }
  }

  // 3. All threads: count the choices of each expert, kAhead at once. Shared memory takes one a cycle.
  template <int kAhead>
  __device__ void count() const {
    count<kAhead>(0, routing.num_tokens);
    __syncthreads();
  }
  // Or in two kernels: the first counts those of each chunk, and writes the counts of two experts into a word.
  __device__ void count_chunk(uint32_t* counts, uint32_t chunk) const {
    count<1>(begin, end);
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < routing.num_slots / 2; i += blockDim.x)
      counts[chunk * (routing.num_slots / 2) + i] = end_row[2 * i] | end_row[2 * i + 1] << 16;
  }
  // The second sums them up: a thread adds those of some chunks for two experts.
  __device__ void add_chunks(const uint32_t* counts, uint32_t chunk, uint32_t num_chunks) const {
    constexpr int kAtOnce = 8;
    const uint32_t columns = routing.num_slots / 2, step = blockDim.x / columns;  // the host sees to it: step > 0
    const uint32_t column = threadIdx.x % columns, first = threadIdx.x / columns;
    uint32_t before[2] = {}, after[2] = {};
#pragma unroll 1
    for (uint32_t i = first; first < step && i < num_chunks; i += kAtOnce * step) {
      uint32_t words[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) words[j] = i + j * step < num_chunks ? counts[(i + j * step) * columns + column] : 0;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32_t low = words[j] & 0xffff, high = words[j] >> 16;
        if (i + j * step < chunk) before[0] += low, before[1] += high;
        else after[0] += low, after[1] += high;
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      atomicAdd(next_row + 2 * column + j, before[j]);
      atomicAdd(end_row + 2 * column + j, after[j]);
    }
    __syncthreads();
  }

  // 4. One warp: the first row of each expert. The first CTA writes what belongs to no token.
  template <bool kAligned>
  __device__ void find_experts() const {
    constexpr int kAtOnce = 4;
    const uint32_t lane = threadIdx.x % kWarp, share = routing.num_slots / kWarp;
    const uint32_t first = lane * share, last = first + share;
    uint32_t size = 0;  // rows of this lane's segments
#pragma unroll 1
    for (uint32_t i = first; i < last; i += kAtOnce) {
#pragma unroll
      for (uint32_t j = i; j < i + kAtOnce; ++j) {
        size += routing.segment_end<kAligned>(0, next_row[j] + end_row[j]);
      }
    }
    uint32_t row = size;
#pragma unroll 1
    for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
      const uint32_t before = __shfl_up_sync(0xffffffff, row, distance);
      if (lane >= distance) row += before;
    }
    row -= size;
#pragma unroll 1
    for (uint32_t i = first; i < last; i += kAtOnce) {
      uint32_t before[kAtOnce], count[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) before[j] = next_row[i + j], count[j] = before[j] + end_row[i + j];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (blockIdx.x == 0 && i + j <= routing.num_experts) routing.expert_offsets[i + j] = row;
        if (blockIdx.x == 0 && i + j < routing.num_experts) routing.tokens_per_expert[i + j] = count[j];
        next_row[i + j] = row + before[j];
        end_row[i + j] = row + count[j];
        row = routing.segment_end<kAligned>(row, row + count[j]);
      }
    }
    __syncwarp();
  }

  // 5. The same warp: the rows of the chunk, and visit(index, place, expert, row) for each choice: index counts the
  // choices of the chunk, place is that of its row in `rows`; expert E and row -1 are none.
  template <class Visit>
  __device__ void find_rows(const Visit& visit) const {
    if constexpr (kMerges) find_merged_rows(visit);
    else find_rows_of_each(visit);
  }
  // Or, where choices are ranked, all threads do so after a barrier.
  template <class Visit>
  __device__ void find_ranked_rows(const Visit& visit) const {
#pragma unroll 1
    for (uint32_t index = threadIdx.x; index < choices_of_chunk(); index += blockDim.x) {
      const uint32_t at = place(index), expert = uint32_t(rows[at]) >> 16, rank = rows[at] & 0xffff;
      int row = -1;
      if (expert < routing.num_experts) {
        row = next_row[expert] + ranked[index / share() * routing.num_slots + expert] + rank;
      }
      rows[at] = row;
      visit(index, at, expert, row);
    }
  }

  // 6. Any thread, after a barrier: whether a token of the chunk has a row.
  __device__ bool has_row(uint32_t token) const {
    int largest = -1;
#pragma unroll 1
    for (uint32_t i = 0; i < routing.rows_of_token; i += 4) {
      const int4 v = *reinterpret_cast<const int4*>(rows + token * routing.rows_of_token + i);
      largest = max(largest, max(max(v.x, v.y), max(v.z, v.w)));
    }
    return largest >= 0;
  }

 private:
  __device__ uint32_t place(uint32_t index) const {
    return index + routing.of_k.quotient(index) * (routing.rows_of_token - routing.top_k);
  }
  __device__ uint32_t choices_of_chunk() const { return (end - begin) * routing.top_k; }
  // How many of these a warp ranks.
  __device__ uint32_t share() const { return ceil_div(choices_of_chunk(), kWarp * routing.num_rankers) * kWarp; }
  template <int kAhead>
  __device__ void count(uint32_t from, uint32_t to) const {
    if constexpr (kMerges) count_merged<kAhead>(from, to);
    else count_each<kAhead>(from, to);
  }
  template <int kAhead>
  __device__ void count_each(uint32_t from, uint32_t to) const {
    const uint32_t num_choices = to * routing.top_k;
#pragma unroll 1
    for (uint32_t first = from * routing.top_k + threadIdx.x; first < num_choices; first += kAhead * blockDim.x) {
      uint32_t experts[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const uint32_t index = first + i * blockDim.x;
        experts[i] = index < num_choices ? routing.expert(index) : routing.num_experts;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const uint32_t index = first + i * blockDim.x;
        if (experts[i] < routing.num_experts)
          atomicAdd((index < begin * routing.top_k ? next_row : end_row) + experts[i], 1);
      }
    }
  }
  template <class Visit>
  __device__ void find_rows_of_each(const Visit& visit) const {
    const uint32_t lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (uint32_t index = lane; index - lane < choices_of_chunk(); index += kWarp) {
      const bool exists = index < choices_of_chunk();
      const uint32_t expert = exists ? routing.expert(begin * routing.top_k + index) : routing.num_experts;
      const uint32_t same = __match_any_sync(0xffffffff, expert), before = same & ((1u << lane) - 1);
      int row = -1;
      if (expert < routing.num_experts) row = next_row[expert] + __popc(before);
      __syncwarp();
      if (expert < routing.num_experts && before == 0) next_row[expert] += __popc(same);
      __syncwarp();
      if (exists) {
        rows[place(index)] = row;
        visit(index, place(index), expert, row);
      }
    }
  }

  // A warp reads the choices of kAhead times `tokens_at_once` tokens at once.
  template <int kAhead>
  __device__ void count_merged(uint32_t from, uint32_t to) const {
    const uint32_t step = blockDim.x / kWarp * routing.tokens_at_once;
    uint32_t token = from + threadIdx.x / kWarp * routing.tokens_at_once;
#pragma unroll 1
    for (; token < to; token += kAhead * step) {
#pragma unroll 1
      for (uint32_t first_choice = 0; first_choice < routing.top_k; first_choice += kWarp) {
        uint32_t experts[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const Choice choice(routing, token + i * step, first_choice, to);
          experts[i] = choice.exists ? routing.expert(choice.token, choice.choice) : routing.num_experts;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          count_merged(Choice(routing, token + i * step, first_choice, to), first_choice, experts[i]);
        }
      }
    }
  }
  __device__ void count_merged(const Choice& choice, uint32_t first_choice, uint32_t expert) const {
    const bool is_first = choice.first_lane(expert) == threadIdx.x % kWarp;
    if (expert < routing.num_experts && is_first && !choice.is_named_before(routing, first_choice, expert)) {
      atomicAdd((choice.token < begin ? next_row : end_row) + expert, 1);
    }
  }
  template <class Visit>
  __device__ void find_merged_rows(const Visit& visit) const {
    const uint32_t lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (uint32_t token = begin; token < end; token += routing.tokens_at_once) {
#pragma unroll 1
      for (uint32_t first_choice = 0; first_choice < routing.top_k; first_choice += kWarp) {
        const Choice choice(routing, token, first_choice, end);
        const uint32_t expert = choice.exists ? routing.expert(choice.token, choice.choice) : routing.num_experts;
        const uint32_t first = choice.first_lane(expert), same = __match_any_sync(0xffffffff, expert);
        const bool is_named_before = choice.is_named_before(routing, first_choice, expert);
        // The lanes with this expert whose choice has a row of its own.
        const uint32_t own = __ballot_sync(0xffffffff, lane == first && !is_named_before) & same;
        int row = -1;
        if (expert < routing.num_experts) {
          row = next_row[expert] + (is_named_before ? -1 : __popc(own & ((1u << first) - 1)));
        }
        __syncwarp();
        if (expert < routing.num_experts && lane == __ffs(own) - 1) next_row[expert] += __popc(own);
        __syncwarp();
        if (choice.exists) {
          const uint32_t at = (choice.token - begin) * routing.rows_of_token + choice.choice;
          rows[at] = row;
          visit((choice.token - begin) * routing.top_k + choice.choice, at, expert, row);
        }
      }
    }
  }
};
