// The epilogue of a tile of gate and up: the activation, then E4M3 with a scale for each token and 128 outputs.
//
// A thread holds gate and up of the same outputs: activated = f(gate) * up, in place of gate. The largest magnitude
// of a token's 128 outputs decides its scale; where it is spread over threads, they meet:
// - tokens are rows: in the 4 lanes of a row; and if the tile has 64 outputs, in two CTAs of a cluster;
// - tokens are columns: in the 8 lanes of a column, then in shared memory, in all warps that have it, the peer's too.
#pragma once
#include "activation.cuh"
#include "fp8.cuh"
#include "epilogue/store.cuh"

__device__ inline uint32_t magnitude(float x) { return __float_as_uint(x) & kMagnitude; }

template <GemmConfig C>
__device__ void store_scale(const Arguments& args, const TileCoord<C>& coord, int token, float scale_inv) {
  const int num_blocks = ceil_div(args.num_weights, kBlock), block = coord.tile * C.outputs / kBlock;
  if (token < coord.begin() || token >= coord.end()) return;
  const int64_t row = static_cast<int64_t>(coord.matrix) * num_blocks + block;
  args.gate_up.scales[row * args.gate_up.pitch + coord.first_token + token] = scale_inv;
}

// Copies the tokens of the group, and no others, from the staging, 16 bytes at a time.
template <GemmConfig C>
__device__ void store_codes(const uint8_t* staging, const Arguments& args, const TileCoord<C>& coord, int first,
                            int size, int thread) {
  store_rows<C, uint8_t, C.outputs>(staging, args, coord, first, size, coord.tile * C.outputs, thread);
}

// The larger of this CTA's magnitudes of a row and those of the CTA with the other 64 outputs. The slot of a tile is
// free again two tiles later: the peer sends for the next one only after it has read this one.
template <GemmConfig C>
__device__ void meet_peer(Shared<C>& shared, uint32_t (&amax)[2], int num_tiles, const Thread<C>& thread) {
  const int slot = num_tiles % 2;
  auto& delivered = shared.magnitudes.delivered[slot][thread.group];
  delivered.arrive_and_expect(thread.index == 0, 64 * sizeof(uint32_t));
  const uint32_t peer = cluster_rank() ^ 1;
  uint32_t* rows = shared.magnitudes.of_peer[slot];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    store_in_cluster(thread.lane % 4 == 0, &rows[thread.row + half * 8], delivered, peer, amax[half]);
  delivered.wait(num_tiles / 2 % 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) amax[half] = max(amax[half], rows[thread.row + half * 8]);
}

// Tokens are rows: a thread has two columns of every eight of two rows.
template <GemmConfig C, int kSize>
__device__ void gate_up_epilogue_rows(const float (&v)[kSize], Shared<C>& shared, const TensorMap& d_map,
                                     const Arguments& args, const TileCoord<C>& coord, int num_tiles,
                                     const Thread<C>& thread) {
  uint32_t amax[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kSize; ++i) amax[i / 2 % 2] = max(amax[i / 2 % 2], magnitude(v[i]));
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      amax[half] = max(amax[half], __shfl_xor_sync(0xffffffff, amax[half], distance));
  }
  if constexpr (C.shares_scale_with_peer) meet_peer(shared, amax, num_tiles, thread);

  constexpr int kPitch = C.outputs, kUnits = kPitch / 16;
  const Staging staging = output_staging(shared, thread);
  named_barrier<kWarpgroup>(1 + thread.group);
  const int odd = thread.lane % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Scale scale(amax[half], false);
    if (thread.lane % 4 == 0 && coord.tile * C.outputs % kBlock == 0)
      store_scale(args, coord, thread.row + half * 8, scale.scale_inv);
    const int y = thread.row % 64 + half * 8;
    uint8_t* row = staging.first + y * kPitch + thread.lane % 4 / 2 * 4 + odd * 8;
#pragma unroll
    for (int j = 0; j < kSize / 4; j += 2) {
      // Two columns of eight and two of the next eight; neighbouring lanes swap, so that each has four of one eight.
      const float *a = v + 4 * j + 2 * half, *b = a + 4;
      const uint32_t mine =
          encode_e4m3(scale.divide(a[0]), scale.divide(a[1]), scale.divide(b[0]), scale.divide(b[1]));
      const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? mine : mine >> 16, 1);
      const uint32_t codes = __byte_perm(mine, other, odd ? 0x3254 : 0x5410);
      *reinterpret_cast<uint32_t*>(row + (j / 2 ^ y * kPitch / 128 % kUnits) * 16) = codes;
    }
  }
  const int first = thread.group * 64;
  fence_for_async();
  named_barrier<kWarpgroup>(1 + thread.group);
  if (coord.begin() > first || first + 64 > coord.end()) {
    store_codes<C>(staging.first, args, coord, first, 64, thread.index);
  } else if (thread.index == 0) {
    tma_store<C.dimensions>(d_map, staging.first,
                              {coord.tile * C.outputs, coord.first_token + first, coord.matrix});
    tma_store_commit();
  }
}

// The shared memory of tokens that are columns, on their way out.
template <GemmConfig C>
__device__ uint8_t* columns_staging(Shared<C>& shared) {
  if constexpr (C.tail > 0) return shared.tail_output.tail[0];
  else return shared.output[0][0];
}

// Tokens are columns, of one warpgroup in each CTA: a thread has two of every eight, for outputs 8 apart.
template <GemmConfig C, int kSize>
__device__ void gate_up_epilogue_columns(const float (&v)[kSize], Shared<C>& shared, const Arguments& args,
                                        const TileCoord<C>& coord, int num_tiles, const Thread<C>& thread) {
  static_assert(C.shares_scale_with_peer);
  using Tokens = Columns<C>;
  constexpr int kMine = Tokens::kSize / 4, kWarps = kWarpgroup / kWarp, kBarrier = 1 + Tokens::kFirstWarpgroup;
  const int rank = cluster_rank(), slot = num_tiles % 2;
  const int group = thread.group - Tokens::kFirstWarpgroup;  // 0: there is one with tokens as columns
  uint32_t amax[kMine];  // for two of every eight tokens
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const float* of_token = v + i / 2 * 4 + i % 2;
    amax[i] = max(magnitude(of_token[0]), magnitude(of_token[2]));
#pragma unroll
    for (int distance = 4; distance < kWarp; distance *= 2)
      amax[i] = max(amax[i], __shfl_xor_sync(0xffffffff, amax[i], distance));
  }
  auto& of_warps = shared.magnitudes.of_warps[slot];
  uint32_t* mine = of_warps[rank * kWarps + group * 4 + thread.warp];
  if (thread.lane < 4) {
#pragma unroll
    for (int i = 0; i < kMine; i += 2)
      *reinterpret_cast<uint2*>(mine + i * 4 + thread.col) = {amax[i], amax[i + 1]};
  }
  auto& delivered = shared.magnitudes.delivered[slot][Tokens::kFirstWarpgroup];
  delivered.arrive_and_expect(thread.index == 0, kWarps * Tokens::kSize * sizeof(uint32_t));
#pragma unroll
  for (int i = 0; i < kMine; ++i)
    store_in_cluster(thread.lane < 4, mine + i / 2 * 8 + thread.col + i % 2, delivered, rank ^ 1, amax[i]);
  delivered.wait(num_tiles / 2 % 2);
  named_barrier<kWarpgroup>(kBarrier);
  uint8_t* staging = columns_staging(shared);
  const int output = thread.row - Tokens::kFirstWarpgroup * 64;  // its index in the tile
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int token = i / 2 * 8 + thread.col + i % 2;
#pragma unroll
    for (int warp = 0; warp < kBlock / 16; ++warp) amax[i] = max(amax[i], of_warps[warp][token]);
    const Scale scale(amax[i], false);
    if (output == 0 && rank == 0)  // the four lanes that have it
      store_scale(args, coord, Tokens::kFirst + token, scale.scale_inv);
    const float* of_token = v + i / 2 * 4 + i % 2;
    const uint32_t codes = encode_e4m3(scale.divide(of_token[0]), scale.divide(of_token[2]), 0, 0);
    const int y = token * C.outputs, unit = output / 16 ^ y / 128 % (C.outputs / 16);
    staging[y + unit * 16 + output % 16] = codes;
    staging[y + unit * 16 + output % 16 + 8] = codes >> 8;
  }
  named_barrier<kWarpgroup>(kBarrier);
  store_codes(staging, args, coord, Tokens::kFirst, Tokens::kSize, group * kWarpgroup + thread.index);
}

// Where the forward saves gate or up of a token of this CTA's tile, for a backward: BF16 [tokens, 2, outputs].
template <GemmConfig C>
__device__ uint8_t* saved_row(const Arguments& args, const TileCoord<C>& coord, int token, bool is_up) {
  return args.gate_up.saved + (2 * static_cast<int64_t>(coord.first_token + token) + is_up) * args.gate_up.saved_row_bytes;
}

// Tokens are rows. Neighbouring lanes swap, so that each stores four of eight columns, and four lanes a whole sector.
template <GemmConfig C, int kSize>
__device__ void save_rows(const float (&v)[kSize], const Arguments& args, const TileCoord<C>& coord, bool is_up,
                          const Thread<C>& thread) {
  const int odd = thread.lane % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = thread.row + half * 8;
    const bool exists = coord.begin() <= token && token < coord.end();
    uint8_t* row = saved_row(args, coord, token, is_up);
#pragma unroll
    for (int j = 0; j < kSize / 4; j += 2) {
      const float *a = v + 4 * j + 2 * half, *b = a + 4;
      const uint32_t first = pack_bf16(a[0], a[1]), second = pack_bf16(b[0], b[1]);
      const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
      const int output = coord.tile * C.outputs + 8 * (j + odd) + thread.lane % 4 / 2 * 4;
      if (exists && output < args.num_weights)
        *reinterpret_cast<uint2*>(row + output * 2) = odd ? uint2{other, second} : uint2{first, other};
    }
  }
}

// Tokens are columns.
template <GemmConfig C, int kSize>
__device__ void save_columns(const float (&v)[kSize], const Arguments& args, const TileCoord<C>& coord, bool is_up,
                             const Thread<C>& thread) {
  using Tokens = Columns<C>;
  const int output = coord.tile * C.outputs + thread.row - Tokens::kFirstWarpgroup * 64;
#pragma unroll
  for (int i = 0; i < Tokens::kSize / 4; ++i) {
    const int token = Tokens::kFirst + i / 2 * 8 + thread.col + i % 2;
    if (token < coord.begin() || token >= coord.end()) continue;
    uint16_t* row = reinterpret_cast<uint16_t*>(saved_row(args, coord, token, is_up));
    const float* of_token = v + i / 2 * 4 + i % 2;
    const uint32_t both = pack_bf16(of_token[0], of_token[2]);
    if (output < args.num_weights) row[output] = both;
    if (output + 8 < args.num_weights) row[output + 8] = both >> 16;
  }
}

template <bool kAsColumns, GemmConfig C, int kSize>
__device__ void save_gate_up(const float (&gate)[kSize], const float (&up)[kSize], const Arguments& args,
                             const TileCoord<C>& coord, const Thread<C>& thread) {
  if constexpr (kAsColumns) {
    save_columns(gate, args, coord, false, thread), save_columns(up, args, coord, true, thread);
  } else {
    save_rows(gate, args, coord, false, thread), save_rows(up, args, coord, true, thread);
  }
}

// The biases of gate and up of a tile.
template <GemmConfig C>
struct GateUpBias {
  TileBias<C, C.stacked, C.outputs> gate, up;

  __device__ void load(const Arguments& args, const TileCoord<C>& coord, const Thread<C>& thread) {
    gate.load(bias_of_group(args, coord), args, coord, 0, thread);
    up.load(bias_of_group(args, coord, true), args, coord, 0, thread);
  }
  template <int kSize>
  __device__ void add_to(float (&gate_sums)[kSize], float (&up_sums)[kSize], const Thread<C>& thread) const {
    gate.add_to(gate_sums, thread), up.add_to(up_sums, thread);
  }
};

template <GemmConfig C>
__device__ void gate_up_epilogue(float (&total)[C.parts][C.part_n / 2], Shared<C>& shared, const TensorMap& d_map,
                                const Arguments& args, const TileCoord<C>& coord, int num_tiles,
                                const GateUpBias<C>& bias, Thread<C> thread) {
  // The compiler must not see formulas in these: it would form addresses ahead of the loop over tiles, which has no
  // registers for them.
  asm volatile("" : "+r"(thread.index), "+r"(thread.lane), "+r"(thread.row), "+r"(thread.warp));
  constexpr int kSize = C.parts * C.part_n / 4;  // the sums of gate, and as many of up
  auto& gate = reinterpret_cast<float(&)[kSize]>(total[0][0]);
  auto& up = reinterpret_cast<float(&)[kSize]>(total[C.parts / 2][C.parts == 1 ? kSize : 0]);
  bias.add_to(gate, up, thread);
  if constexpr (C.saves_gate_up) save_gate_up<C.stacked>(gate, up, args, coord, thread);
  activate<C.activation>(gate, up, args.gate_up.activation);
  if constexpr (C.stacked) gate_up_epilogue_columns(gate, shared, args, coord, num_tiles, thread);
  else gate_up_epilogue_rows(gate, shared, d_map, args, coord, num_tiles, thread);
}
