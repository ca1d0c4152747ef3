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

  /// Queues the copy of `bytes` bytes of the memory of the stream's GPU, which must not record;
  /// waits for the copy before, which is lost. Throws Error{kOutOfMemory} or {kDevice},
  /// Error{kUnsupported} without CUDA.
  void start(const void* from, size_t bytes, Stream& stream);
  /// The bytes of the last start(), once they have been copied. Throws Error{kDevice}.
  const std::byte* wait() const;
  /// For which there is room.
  size_t bytes() const noexcept { return bytes_; }

 private:
  struct State;
  std::unique_ptr<State> state_;
  size_t bytes_ = 0;
};

}  // namespace kvlm
