#pragma once

#include <cstdint>

// cp.async: copies to shared memory that a thread waits for later.
namespace kvlm::cuda {

__device__ inline uint32_t shared_address(const void* of) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(of));
}

/// Copies 16 bytes.
__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

/// The same if `wanted`, without a branch; the L2 cache reads 128 bytes.
__device__ inline void copy_async(uint32_t to, const void* from, bool wanted) {
  asm volatile(
      "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n"
      "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::"r"(to),
      "l"(from), "r"(static_cast<int>(wanted)));
}

/// Ends a group of copies.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits for all but the last kAhead groups of this thread's copies.
template <int kAhead>
__device__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kAhead) : "memory");
}

}  // namespace kvlm::cuda
