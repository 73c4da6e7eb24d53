// SwiGLU of gate and up in BF16 memory, for experts whose adapters add to gate and up.
#include "fp8.cuh"
#include "input.cuh"
#include "matrix.cuh"

constexpr int kColumns = 8;  // of a thread, side by side

struct Arguments {
  const uint8_t* gate_up;  // bf16 [R, 2, I]
  uint8_t* activated;      // bf16 [R, I]
  int64_t row_bytes;       // the pitch of rows of I, in both; a multiple of 16
  uint32_t size;
  float limit;  // bounds gate from above and up on both sides; may be infinite
};

__device__ inline float activate(float gate, float up, float limit) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float g = gate > limit ? limit : gate, u = fabsf(up) > limit ? copysignf(limit, up) : up;  // NaN stays
  float exponential, sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(__fmul_rn(g, -kLog2E)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(__fadd_rn(exponential, 1)));
  return __fmul_rn(__fmul_rn(g, sigmoid), u);
}

// activated = silu(gate) * up in FP32, rounded to BF16.
// Grid: a CTA of up to 256 threads owns a row.
// Shared memory: none.
// Barriers: none.
// Alignment: all rows begin at multiples of 16 B, and may end anywhere; their padding is read and written, too.
__global__ void __launch_bounds__(256) activation_rows_kernel(const __grid_constant__ Arguments args) {
  const int64_t row = blockIdx.x;
  const uint8_t* gate_row = args.gate_up + 2 * row * args.row_bytes;
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (uint32_t column = threadIdx.x * kColumns; column < args.size; column += blockDim.x * kColumns) {
    Eight<Input::kBFloat16> gate, up;
    gate.load_once(gate_row, column), up.load_once(gate_row + args.row_bytes, column);
    uint32_t words[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      words[i / 2] = pack_bf16(activate(gate[i], up[i], args.limit), activate(gate[i + 1], up[i + 1], args.limit));
    }
    uint8_t* target = args.activated + row * args.row_bytes + column * sizeof(uint16_t);
    *reinterpret_cast<uint4*>(target) = {words[0], words[1], words[2], words[3]};
  }
}
