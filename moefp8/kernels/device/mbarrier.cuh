// mbarrier: a counter of arrivals and of bytes in shared memory that threads and TMA meet at.
#pragma once
#include "base.cuh"

struct Barrier {
  uint64_t state;

  __device__ uint32_t address() const { return shared_address(this); }

  __device__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals));
  }

  // One arrival, of the `elected` lane, which also announces `bytes` that will be written asynchronously.
  __device__ void arrive_and_expect(bool elected, uint32_t bytes) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(
            address()),
        "r"(bytes), "r"(static_cast<int>(elected))
        : "memory");
  }

  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  // One arrival at the same barrier of the CTA `rank` of the cluster.
  __device__ void arrive_in_cluster(uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_cluster(address(), rank)) : "memory");
  }

  // Waits for the completion of the phase with this parity; a fresh barrier has completed parity 1.
  __device__ void wait(uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
};

// Stores 16 bytes into the shared memory of the CTA `rank`, and counts them as arrived at its `barrier`.
__device__ inline void store_in_cluster(void* destination, Barrier& barrier, uint32_t rank, const float* v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
                   address_in_cluster(shared_address(destination), rank)),
               "r"(address_in_cluster(barrier.address(), rank)), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

// The same for four bytes, of the lanes that are `elected`.
__device__ inline void store_in_cluster(bool elected, void* destination, Barrier& barrier, uint32_t rank, uint32_t v) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
      "@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %2, [%1];\n}" ::"r"(
          address_in_cluster(shared_address(destination), rank)),
      "r"(address_in_cluster(barrier.address(), rank)), "r"(v), "r"(static_cast<int>(elected))
      : "memory");
}

// Makes initialised barriers visible to TMA (CUTLASS relies on that, too) and, after a barrier of threads,
// to the other CTAs.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
