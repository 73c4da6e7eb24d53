// Zeroes the counter that the clusters of the grouped GEMM behind it take tiles from: see `GroupedScheduler`.
#include "base.cuh"

struct Arguments {
  int* counter;
};

// Formula   *counter = 0.
// Grid      one CTA of kThreads, of which one thread writes.
// Alignment that of an int.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) tile_counter_kernel(const __grid_constant__ Arguments args) {
  // The memory may be what the kernel before has just given back. The next kernel starts now, and waits for this one.
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x == 0) *args.counter = 0;
}
