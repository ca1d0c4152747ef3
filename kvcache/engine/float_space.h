#pragma once

#include <cstddef>

#include "kernels/base/buffer.h"

namespace kvlm {

/// Floats on a device that grow and never shrink; growing loses what they held.
class FloatSpace {
 public:
  explicit FloatSpace(Device device) : device_(device) {}
  void grow(size_t count) {
    if (count <= size_) return;
    memory_ = Buffer();  // first, so that not both are held
    size_ = 0;           // should there be no room
    memory_ = Buffer(device_, count * sizeof(float));
    size_ = count;
  }
  float* data() noexcept { return reinterpret_cast<float*>(memory_.data()); }
  size_t size() const noexcept { return size_; }

 private:
  Device device_;
  Buffer memory_;
  size_t size_ = 0;
};

}  // namespace kvlm
