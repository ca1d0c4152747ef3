#pragma once

#include <cstddef>
#include <memory>

#include "kernels/base/device.h"

namespace kvlm {

/// A copy of a GPU's memory that is made while the host goes on, in pinned memory of its own.
class Readback {
 public:
  Readback();
  ~Readback();
  Readback(Readback&& other) noexcept;
  Readback& operator=(Readback&& other) noexcept;

  /// Queues the copy; the one before is lost, and waited for. Throws Error{kOutOfMemory} or
  /// {kDevice}, Error{kUnsupported} without CUDA.
  void start(const void* from, size_t bytes, Stream& stream);
  /// The bytes, once they have been copied. Throws Error{kDevice}.
  const std::byte* wait() const;
  /// It has memory.
  bool holds_any() const noexcept { return state_ != nullptr; }

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
