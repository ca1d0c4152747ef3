#pragma once

#include "kernels/base/buffer.h"
#include "kernels/cuda/device/launch.cuh"

namespace kvlm::cuda {

/// Launch arguments that stay on the GPU for several steps.
class KeptBytes {
 public:
  explicit KeptBytes(Device device) : device_(device) {}
  /// Copies uploaded bytes to memory of its own, allocated with a margin, so that a growing batch
  /// seldom reallocates.
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

}  // namespace kvlm::cuda
