#pragma once

#include <cstddef>

#include "kernels/base/device.h"

namespace kvlm::cuda {

/// Host memory that a GPU copies from (Queue::send), or to, while the host goes on.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  /// Makes room for `bytes`; what was there is lost. Throws Error{kOutOfMemory} or {kDevice}.
  void reserve(size_t bytes);
  std::byte* data() const noexcept { return data_; }

  /// What `stream` was given so far may still use it.
  void lend(Stream& stream);
  /// Waits until nothing does.
  void wait() const;

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  void* used_ = nullptr;  // cudaEvent_t; null: nothing was ever queued
};

}  // namespace kvlm::cuda
