// The routing plan as maps in memory, on Hopper.
#include "plan.cuh"

struct Arguments {
  Routing routing;
  int* row_to_token;   // [R]
  int* row_to_expert;  // [R]
  uint32_t num_rows;
};

// All maps of `build_plan`: see plan.py.
// Grid: a CTA of up to 1024 threads owns a chunk of tokens, or none, and shares in the padding.
// Shared memory: 8 B for each slot and 4 B for each place of a row in the chunk.
// Barriers: zeros, counts and experts are each complete before they are read.
// Alignment: any.
template <int kAhead>
__global__ void __launch_bounds__(1024, 1) plan_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ int memory[];
  const Routing& routing = args.routing;
  const Plan<true> plan(routing, blockIdx.x, memory);

  wait_for_previous_kernel();
  let_next_kernel_start();

  plan.clear();
  plan.count<kAhead>();
  if (threadIdx.x < kWarp) plan.find_experts<true>();
  __syncthreads();
  if (threadIdx.x < kWarp) {
    plan.find_rows([&](uint32_t index, uint32_t, uint32_t expert, int row) {
      routing.token_to_row[static_cast<int64_t>(plan.begin) * routing.top_k + index] = row;
      if (row < 0) return;
      args.row_to_token[row] = plan.begin + routing.of_k.quotient(index);
      args.row_to_expert[row] = expert;
    });
  }
  const auto pad = [&](uint32_t row, uint32_t end, uint32_t step) {
#pragma unroll 1
    for (; row < end; row += step) args.row_to_token[row] = args.row_to_expert[row] = -1;
  };
  const auto segment_end = [&](uint32_t expert) {
    return routing.segment_end<true>(expert * routing.max_m, plan.end_row[expert]);
  };
#pragma unroll 1
  for (uint32_t expert = blockIdx.x; expert < routing.num_experts; expert += gridDim.x) {
    pad(plan.end_row[expert] + threadIdx.x, segment_end(expert), blockDim.x);
  }
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  pad(segment_end(routing.num_experts - 1) + thread, args.num_rows, gridDim.x * blockDim.x);
}
