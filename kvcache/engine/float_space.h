#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/base/buffer.h"
#include "kernels/base/error.h"
#include "kernels/base/tensor.h"
#include "kernels/elementwise.h"

namespace kvlm {

/// Floats on a device that grow and never shrink; growing loses what they held.
class FloatSpace {
 public:
  explicit FloatSpace(Device device) : device_(device) {}
  /// Room for `count` floats; for more where there is memory, since sequences come one by one and
  /// a GPU waits for what it does before memory is freed.
  void grow(size_t count) {
    if (count <= size_) return;
    const size_t more = size_ + size_ / 2;
    try {
      take(std::max(count, more));
    } catch (const Error&) {
      if (more <= count) throw;
      take(count);
    }
  }
  /// A copy of floats, for which there is room.
  ConstTensorView copy_of(ConstTensorView from, Stream& stream) {
    grow(static_cast<size_t>(from.elements()));
    const TensorView copied(memory_.data(), DType::kF32, from.shape(), from.device());
    copy(copied, from, stream);
    return copied;
  }
  float* data() noexcept { return reinterpret_cast<float*>(memory_.data()); }
  size_t size() const noexcept { return size_; }

 private:
  void take(size_t count) {
    memory_ = Buffer();  // first, so that not both are held
    size_ = 0;           // should there be no room
    memory_ = Buffer(device_, count * sizeof(float));
    size_ = count;
  }

  Device device_;
  Buffer memory_;
  size_t size_ = 0;
};

}  // namespace kvlm
