#pragma once

#include "kernels/base/buffer.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/store_row.cuh"

// What the descriptions of a batch that stay on the GPU for several steps have in common: those of
// attend_packed.cu and of row_batch.cu.
namespace kvlm::cuda {

/// How many rows a lane may gain before the batch has to be described again.
constexpr int kLaneRoom = 128;

/// The bytes of such a description.
class KeptBytes {
 public:
  explicit KeptBytes(Device device) : device_(device) {}
  /// Copies bytes that were uploaded to where they stay. Memory is taken with a margin, so that a
  /// batch that grows by a sequence at a time seldom takes any.
  const std::byte* place(const std::byte* uploaded, size_t bytes, Stream& stream) {
    if (memory_.bytes() < bytes) {
      memory_ = Buffer();
      memory_ = Buffer(device_, bytes + bytes / 2);
    }
    stream.queue().copy(memory_.data(), true, uploaded, true, bytes);
    return memory_.data();
  }

 private:
  Device device_;
  Buffer memory_;
};

/// The rows that every lane of a batch has gained since it was described, counted on the GPU, so
/// that launches of a step serve the next one unchanged.
struct Growth {
  int rows;
  unsigned int readers;  // blocks that have read `rows` and are done

  /// A row more: every block of a launch calls this once it has read `rows`, and the last one
  /// counts.
  __device__ void count_row() {
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0 || atomicAdd(&readers, 1u) != gridDim.x - 1) return;
    readers = 0;
    ++rows;
  }
};

}  // namespace kvlm::cuda
