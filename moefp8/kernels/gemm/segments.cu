// Which rows that lie side by side are of one group: the list that a grouped GEMM reads as `kSegments`.
//
// `group_of_row` is DeepGEMM's `grouped_layout`: of each block of 128 rows, the first are of one group and the others
// of none. A block belongs to the segment of the block before it if all rows of that one are of the same group. A GEMM
// that reads the rows itself (`kRows`) cannot know this, and takes each block for a segment.
#include "base.cuh"

constexpr int kBlock = 128;  // rows

struct Arguments {
  const int* group_of_row;  // [num_rows]; what is no group, e.g. -1, is none
  int4* list;  // {how many segments, 0 for a tile counter}, then {begin, end, group} of each; then zeros, to all blocks
  int num_rows, num_groups;
};

// The first `count` rows of a block are of `group`.
struct Rows {
  int group, count;

  __device__ bool goes_on_in(const Rows& next) const {
    return count == kBlock && next.count > 0 && next.group == group;
  }
};

// A warp reads so many blocks at once, since memory takes long to answer.
constexpr int kAtOnce = 4;

// One warp reads blocks that lie `step` apart, where they exist; each lane returns all of them.
__device__ inline void read_blocks(const Arguments& args, int64_t first, int step, Rows (&found)[kAtOnce]) {
  constexpr int kLoads = kBlock / kWarp;
  const int lane = threadIdx.x % kWarp;
  int groups[kAtOnce][kLoads];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t row = (first + i * step) * kBlock + j * kWarp + lane;
      groups[i][j] = 0 <= row && row < args.num_rows ? args.group_of_row[row] : -1;
    }
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int group = __shfl_sync(~0u, groups[i][0], 0);
    int count = 0;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const uint32_t same = __ballot_sync(~0u, groups[i][j] == group);
      if (count == j * kWarp) count += __popc(same & ~(same + 1));  // the lanes before the first that differs
    }
    found[i] = {group, uint32_t(group) < uint32_t(args.num_groups) ? count : 0};
  }
}

// Formula   list[1 + i] = {begin, end, group, 0} of the i-th segment, in the order of the rows; list[0].x = how many.
//           The same rows give the same bits, and numbers that break the rules only segments within the tensors.
// Grid      one CTA of kThreads. It takes as many blocks at a time, each of which is then a thread's.
// Shared    8 B for each of these blocks, of the one before them and of the one behind; 4 B for each of 32 warps.
// Barriers  the blocks are complete before threads look at their neighbours, and so are the warps' counts; the blocks
//           are read before the second barrier, so that the next ones may be written behind it.
// Alignment list 16 B, group_of_row any.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) segments_kernel(const __grid_constant__ Arguments args) {
  constexpr int kWarps = kThreads / kWarp;
  extern __shared__ int memory[];
  const auto blocks = reinterpret_cast<Rows*>(memory);  // blocks[i] is the block first + i - 1
  int* const begins_of_warp = memory + 2 * (kThreads + 2);
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int num_blocks = ceil_div(args.num_rows, kBlock);

  // The next kernel starts now, and waits for this one. Only its CTA for this SM starts when this one ends.
  wait_for_previous_kernel();
  let_next_kernel_start();

  int num_segments = 0;
#pragma unroll 1
  for (int first = 0; first < num_blocks; first += kThreads) {
    const int num_here = min(kThreads, num_blocks - first);
#pragma unroll 1
    for (int i = warp; i < num_here + 2; i += kAtOnce * kWarps) {
      Rows found[kAtOnce];
      read_blocks(args, int64_t(first) + i - 1, kWarps, found);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (lane == 0 && i + j * kWarps < num_here + 2) blocks[i + j * kWarps] = found[j];
      }
    }
    __syncthreads();
    bool begins = false, ends = false;
    Rows mine{-1, 0};
    if (thread < num_here && blocks[thread + 1].count > 0) {
      mine = blocks[thread + 1];
      begins = !blocks[thread].goes_on_in(mine);
      ends = !mine.goes_on_in(blocks[thread + 2]);
    }
    const uint32_t beginning = __ballot_sync(~0u, begins);
    if (lane == 0) begins_of_warp[warp] = __popc(beginning);
    __syncthreads();
    int up_to_warp = lane < kWarps ? begins_of_warp[lane] : 0;  // of the warps up to the one with this lane's number
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int before = __shfl_up_sync(~0u, up_to_warp, step);
      if (lane >= step) up_to_warp += before;
    }
    const int of_warps_before = __shfl_sync(~0u, up_to_warp, warp) - __popc(beginning);
    // list[0] is no segment, so this is the place of the last one that begins here or before.
    int4& segment = args.list[num_segments + of_warps_before + __popc(beginning & ((2u << lane) - 1))];
    const int begin = (first + thread) * kBlock;
    if (begins) segment.x = begin, segment.z = mine.group, segment.w = 0;
    if (ends) segment.y = begin + mine.count;
    num_segments += __shfl_sync(~0u, up_to_warp, kWarp - 1);
  }
#pragma unroll 1
  for (int i = num_segments + thread; i < num_blocks; i += kThreads) args.list[1 + i] = {0, 0, 0, 0};
  if (thread == 0) args.list[0] = {num_segments, 0, 0, 0};
}
