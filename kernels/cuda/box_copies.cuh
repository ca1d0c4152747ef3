#pragma once

#include <cuda.h>

#include <cstdint>

// Copies of boxes to shared memory that one thread queues and a barrier counts, so that no other
// thread works for them (the tensor memory accelerator). Code for compute capability 9.0 and newer.
//
// Source: PTX ISA, "mbarrier" and "cp.async.bulk.tensor".
namespace kvlm::cuda {

/// A barrier in shared memory. It has phases 0, 1, ...; each ends when as many threads have arrived
/// as it was made for and the bytes that were expected in it are there.
class PhaseBarrier {
 public:
  explicit __device__ PhaseBarrier(uint32_t shared_address) : at_(shared_address) {}

  /// By one thread, and then shown to the others by show_barriers() and a __syncthreads().
  __device__ void make(int arrivals) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at_), "r"(arrivals) : "memory");
  }
  __device__ void arrive() const {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at_) : "memory");
  }
  /// Arrives, and has the phase wait for `bytes` of copies, too.
  __device__ void arrive_and_expect(uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at_), "r"(bytes)
                 : "memory");
  }
  /// Until phase `phase` has ended; not to be called when the one after it may have, too.
  __device__ void wait(int phase) const {
    asm volatile(
        "{\n.reg .pred ended;\nagain:\n"
        "mbarrier.try_wait.parity.shared.b64 ended, [%0], %1;\n"
        "@ended bra done;\nbra again;\ndone:\n}" ::"r"(at_),
        "r"(phase & 1)
        : "memory");
  }
  /// Queues the copy of a box of `map` (tensor_map.h) that begins at this channel, row and head,
  /// and that the phase at hand counts.
  __device__ void copy_box(uint32_t to, const CUtensorMap& map, int channel, int row,
                           int head) const {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&map), "r"(at_), "r"(channel), "r"(row), "r"(head)
        : "memory");
  }

 private:
  uint32_t at_;
};

/// What this thread made barriers of is seen by copies.
__device__ inline void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace kvlm::cuda
