#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/base/buffer.h"
#include "kernels/base/error.h"
#include "kernels/base/tensor.h"
#include "kernels/elementwise.h"

namespace kvlm {

/// A float workspace on a device that grows and never shrinks; growing discards its contents.
class FloatSpace {
 public:
  explicit FloatSpace(Device device) : device_(device) {}
  /// Makes space for `count` floats, or half more than before if memory allows: the workspace grows
  /// with every new sequence, and a GPU must be idle before memory is freed.
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
  /// Copies floats into the workspace.
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
    memory_ = Buffer();  // first, so that both are never held at once
    size_ = 0;           // in case the allocation throws
    memory_ = Buffer(device_, count * sizeof(float));
    size_ = count;
  }

  Device device_;
  Buffer memory_;
  size_t size_ = 0;
};

}  // namespace kvlm
