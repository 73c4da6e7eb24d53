// The activation of gate and up in BF16 memory, for experts whose adapters add to gate and up.
#include "activation.cuh"
#include "fp8.cuh"
#include "input.cuh"
#include "matrix.cuh"

constexpr int kColumns = 8;  // of a thread, side by side

struct Arguments {
  const uint8_t* gate_up;  // bf16 [R, 2, I]
  uint8_t* activated;      // bf16 [R, I]
  int64_t row_bytes;       // the pitch of rows of I, in both; a multiple of 16
  uint32_t size;
  ActivationArguments activation;
};

// activated = f(gate) * up in FP32, rounded to BF16.
// Grid: a CTA of up to 256 threads owns a row.
// Shared memory: none.
// Barriers: none.
// Alignment: all rows begin at multiples of 16 B, and may end anywhere; their padding is read and written, too.
template <Activation kKind>
__global__ void __launch_bounds__(256) activation_rows_kernel(const __grid_constant__ Arguments args) {
  const int64_t row = blockIdx.x;
  const uint8_t* gate_row = args.gate_up + 2 * row * args.row_bytes;
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (uint32_t column = threadIdx.x * kColumns; column < args.size; column += blockDim.x * kColumns) {
    Eight<Input::kBFloat16> gate, up;
    gate.load_once(gate_row, column), up.load_once(gate_row + args.row_bytes, column);
    float activated[kColumns], factors[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) activated[i] = gate[i], factors[i] = up[i];
    activate<kKind>(activated, factors, args.activation);
    uint32_t words[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) words[i / 2] = pack_bf16(activated[i], activated[i + 1]);
    uint8_t* target = args.activated + row * args.row_bytes + column * sizeof(uint16_t);
    *reinterpret_cast<uint4*>(target) = {words[0], words[1], words[2], words[3]};
  }
}
