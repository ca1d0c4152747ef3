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
  /// The same to this place in the shared memory of every block of a cluster of two; each block's
  /// own barrier at this address counts what arrives there.
  __device__ void copy_box_to_both(uint32_t to, const CUtensorMap& map, int channel, int row,
                                   int head) const {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(&map), "r"(at_), "r"(channel), "r"(row), "r"(head), "h"(static_cast<uint16_t>(3))
        : "memory");
  }
  /// Queues the copy of `bytes` bytes, a multiple of 16 as both addresses are.
  __device__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(at_)
        : "memory");
  }
  /// Arrives at the barrier that block `block` of the cluster has at this address. Without a scope
  /// of the cluster, whose fence would wait for all that this thread has under way in memory: what
  /// is told is that products are done, and they are.
  __device__ void arrive_at(uint32_t block) const {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(at_),
        "r"(block)
        : "memory");
  }

 private:
  uint32_t at_;
};

/// Queues the copy of a box in shared memory to where `map` has it, without what lies outside of
/// the map; close_stores() closes it into a group.
__device__ inline void store_box(const CUtensorMap& map, uint32_t from, int channel, int row,
                                 int head) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(from), "r"(channel), "r"(row), "r"(head)
      : "memory");
}
/// Closes the stored boxes since the last one into a group.
__device__ inline void close_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until the boxes of this thread's groups may be overwritten.
__device__ inline void wait_for_stored_boxes() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// By every thread of every block of the cluster: waits for all of them.
__device__ inline void meet_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// What this thread made barriers of is seen by copies.
__device__ inline void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace kvlm::cuda
