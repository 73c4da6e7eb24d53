// WGMMA: products of E4M3 or BF16, summed in FP32 registers. Columns come from shared memory, and so do rows of E4M3.
#pragma once
#include "base.cuh"

// Describes a shared-memory tile of 128-byte rows under the 128 B swizzle; the tile starts at a
// multiple of 1024 B. PTX ISA, "Asynchronous warpgroup level matrix shared memory layout", says: the
// low half holds the address in units of 16 B, so that adding to it moves the tile; the high half
// holds the stride between groups of 8 rows, in the same units, and the swizzle mode.
__device__ inline uint32_t wgmma_descriptor_low(const void* tile) { return shared_address(tile) / 16; }
__device__ inline uint64_t wgmma_descriptor(uint32_t low) {
  constexpr uint64_t kStride = 1024 / 16, kSwizzle128 = 1;
  return (kStride | kSwizzle128 << 30) << 32 | low;
}

constexpr uint32_t kDescriptorStepK = 32 / 16;  // added to the low half, it gives the next 32 of K

// Orders register accesses before the first WGMMA that uses them.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `kPending` committed groups are unfinished.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler may not move accesses to `d` across this.
template <int kSize>
__device__ inline void pin_registers(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d[64, N] = a[64, 32] b[N, 32]^T, + d if `accumulate`. Thread t of the warpgroup holds, for every 8
// columns j, rows 16 (t / 32) + t % 32 / 4 and 8 below it: d[4 j + 2 below + {0, 1}] are columns
// 8 j + 2 (t % 4) + {0, 1}.
template <int kN>
__device__ void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate);

// An instruction names each of its registers, so there is one definition for each N that a tile may
// have: REGISTERS_j and OPERANDS_j are the first 4 j accumulators; after them come a, b and accumulate.
#define REGISTERS_1 "%0, %1, %2, %3"
#define REGISTERS_2 REGISTERS_1 ", %4, %5, %6, %7"
#define REGISTERS_3 REGISTERS_2 ", %8, %9, %10, %11"
#define REGISTERS_4 REGISTERS_3 ", %12, %13, %14, %15"
#define REGISTERS_5 REGISTERS_4 ", %16, %17, %18, %19"
#define REGISTERS_6 REGISTERS_5 ", %20, %21, %22, %23"
#define REGISTERS_7 REGISTERS_6 ", %24, %25, %26, %27"
#define REGISTERS_8 REGISTERS_7 ", %28, %29, %30, %31"
#define REGISTERS_9 REGISTERS_8 ", %32, %33, %34, %35"
#define REGISTERS_10 REGISTERS_9 ", %36, %37, %38, %39"
#define REGISTERS_11 REGISTERS_10 ", %40, %41, %42, %43"
#define REGISTERS_12 REGISTERS_11 ", %44, %45, %46, %47"
#define REGISTERS_13 REGISTERS_12 ", %48, %49, %50, %51"
#define REGISTERS_14 REGISTERS_13 ", %52, %53, %54, %55"
#define REGISTERS_15 REGISTERS_14 ", %56, %57, %58, %59"
#define REGISTERS_16 REGISTERS_15 ", %60, %61, %62, %63"
#define REGISTERS_17 REGISTERS_16 ", %64, %65, %66, %67"
#define REGISTERS_18 REGISTERS_17 ", %68, %69, %70, %71"
#define REGISTERS_19 REGISTERS_18 ", %72, %73, %74, %75"
#define REGISTERS_20 REGISTERS_19 ", %76, %77, %78, %79"
#define REGISTERS_21 REGISTERS_20 ", %80, %81, %82, %83"
#define REGISTERS_22 REGISTERS_21 ", %84, %85, %86, %87"
#define REGISTERS_23 REGISTERS_22 ", %88, %89, %90, %91"
#define REGISTERS_24 REGISTERS_23 ", %92, %93, %94, %95"
#define OPERANDS_1 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define OPERANDS_2 OPERANDS_1, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define OPERANDS_3 OPERANDS_2, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define OPERANDS_4 OPERANDS_3, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define OPERANDS_5 OPERANDS_4, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define OPERANDS_6 OPERANDS_5, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define OPERANDS_7 OPERANDS_6, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define OPERANDS_8 OPERANDS_7, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define OPERANDS_9 OPERANDS_8, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define OPERANDS_10 OPERANDS_9, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define OPERANDS_11 OPERANDS_10, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define OPERANDS_12 OPERANDS_11, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define OPERANDS_13 OPERANDS_12, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define OPERANDS_14 OPERANDS_13, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define OPERANDS_15 OPERANDS_14, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define OPERANDS_16 OPERANDS_15, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define OPERANDS_17 OPERANDS_16, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define OPERANDS_18 OPERANDS_17, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define OPERANDS_19 OPERANDS_18, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define OPERANDS_20 OPERANDS_19, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define OPERANDS_21 OPERANDS_20, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define OPERANDS_22 OPERANDS_21, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define OPERANDS_23 OPERANDS_22, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define OPERANDS_24 OPERANDS_23, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])

#define DEFINE_WGMMA(kN, j, a_operand, b_operand, accumulate_operand)                            \
  template <>                                                                                     \
  __device__ inline void wgmma<kN>(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate_operand ", 0;\n"                \
                 "wgmma.mma_async.sync.aligned.m64n" #kN "k32.f32.e4m3.e4m3 {" REGISTERS_##j "}, " \
                 "%" #a_operand ", %" #b_operand ", p, 1, 1;\n}"                                  \
                 : OPERANDS_##j                                                                   \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                            \
  }
DEFINE_WGMMA(8, 1, 4, 5, 6)
DEFINE_WGMMA(16, 2, 8, 9, 10)
DEFINE_WGMMA(24, 3, 12, 13, 14)
DEFINE_WGMMA(32, 4, 16, 17, 18)
DEFINE_WGMMA(40, 5, 20, 21, 22)
DEFINE_WGMMA(48, 6, 24, 25, 26)
DEFINE_WGMMA(56, 7, 28, 29, 30)
DEFINE_WGMMA(64, 8, 32, 33, 34)
DEFINE_WGMMA(72, 9, 36, 37, 38)
DEFINE_WGMMA(80, 10, 40, 41, 42)
DEFINE_WGMMA(88, 11, 44, 45, 46)
DEFINE_WGMMA(96, 12, 48, 49, 50)
DEFINE_WGMMA(104, 13, 52, 53, 54)
DEFINE_WGMMA(112, 14, 56, 57, 58)
DEFINE_WGMMA(120, 15, 60, 61, 62)
DEFINE_WGMMA(128, 16, 64, 65, 66)
DEFINE_WGMMA(144, 18, 72, 73, 74)
DEFINE_WGMMA(160, 20, 80, 81, 82)
DEFINE_WGMMA(176, 22, 88, 89, 90)
DEFINE_WGMMA(192, 24, 96, 97, 98)
#undef DEFINE_WGMMA

// d[64, N] += a[64, 16] b[N, 16]^T in BF16, with a from registers: thread t holds, of row 16 (t / 32) + t % 32 / 4 and
// of that 8 below, columns 2 (t % 4) + {0, 1} in a[0] and a[1], and those 8 to the right in a[2] and a[3].
template <int kN>
__device__ void wgmma_bf16(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b);

#define DEFINE_WGMMA(kN, j, a0, a1, a2, a3, b_operand)                                                    \
  template <>                                                                                             \
  __device__ inline void wgmma_bf16<kN>(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b) {         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32.bf16.bf16 {" REGISTERS_##j "}, {%" #a0 \
                 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_operand ", 1, 1, 1, 0;"                          \
                 : OPERANDS_##j                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                   \
  }
DEFINE_WGMMA(8, 1, 4, 5, 6, 7, 8)
DEFINE_WGMMA(16, 2, 8, 9, 10, 11, 12)
DEFINE_WGMMA(32, 4, 16, 17, 18, 19, 20)
DEFINE_WGMMA(64, 8, 32, 33, 34, 35, 36)
DEFINE_WGMMA(80, 10, 40, 41, 42, 43, 44)
DEFINE_WGMMA(96, 12, 48, 49, 50, 51, 52)
DEFINE_WGMMA(112, 14, 56, 57, 58, 59, 60)
#undef DEFINE_WGMMA
