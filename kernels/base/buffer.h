#pragma once

#include <cstddef>
#include <span>

#include "kernels/base/device.h"

namespace kvlm {

/// Owns `bytes` of memory on one device, 64-byte aligned, not initialised. Move-only.
class Buffer {
 public:
  Buffer() noexcept = default;
  /// Throws Error{kOutOfMemory} naming both figures, Error{kUnsupported} for a device that this
  /// build does not have.
  Buffer(Device device, size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  std::byte* data() noexcept { return data_; }
  const std::byte* data() const noexcept { return data_; }
  size_t bytes() const noexcept { return bytes_; }
  Device device() const noexcept { return device_; }

 private:
  void free() noexcept;

  Device device_{};
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace kvlm
