#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/device.h"

namespace kvlm {

/// What memory is taken for.
enum class MemoryUse : uint8_t { kWorkspace, kWeights, kCache };

/// Bytes of all live buffers of this process on one device.
struct MemoryHeld {
  size_t workspace = 0;
  size_t weights = 0;
  size_t cache = 0;
  /// What a GPU takes beside: a buffer of a page (2 MiB) or more has its last page to itself.
  /// Smaller ones share pages, of which nothing is known.
  size_t rounding = 0;
};

/// A device's memory is the whole process's, and so is this account of it.
MemoryHeld memory_held(Device device);

/// Owns `bytes` of memory on one device, 64-byte aligned, not initialised. Move-only.
class Buffer {
 public:
  Buffer() noexcept = default;
  /// Throws Error{kOutOfMemory} naming both figures, Error{kUnsupported} for a device that this
  /// build does not have.
  Buffer(Device device, size_t bytes, MemoryUse use = MemoryUse::kWorkspace);
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
  MemoryUse use_ = MemoryUse::kWorkspace;
};

}  // namespace kvlm
