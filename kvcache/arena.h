#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "kernels/base/buffer.h"

namespace kvlm {

class Arena;

/// A contiguous range of an arena, with a count of the bytes in use. Its destructor frees it.
/// Move-only.
class ArenaExtent {
 public:
  ArenaExtent() noexcept = default;
  ~ArenaExtent() { release(); }
  ArenaExtent(ArenaExtent&& other) noexcept { *this = std::move(other); }
  ArenaExtent& operator=(ArenaExtent&& other) noexcept;

  std::byte* data() const noexcept;
  /// Bytes reserved, the upper bound of used().
  size_t reserved() const noexcept { return reserved_; }
  /// Bytes in use.
  size_t used() const noexcept { return used_; }
  /// Sets the bytes in use, at most reserved(). Allocates nothing.
  void set_used(size_t bytes) noexcept;
  /// Keeps the first `bytes`, at least used(), rounded up to 64, and frees the rest.
  void shrink(size_t bytes) noexcept;

 private:
  friend class Arena;
  void release() noexcept;

  Arena* arena_ = nullptr;
  size_t* used_by_owner_ = nullptr;
  size_t offset_ = 0;
  size_t reserved_ = 0;
  size_t used_ = 0;
};

/// One allocation of device memory for all that caches store, so that its size is known exactly.
/// First fit; adjacent free ranges merge. Several caches may share one, from one thread at a time.
class Arena {
 public:
  Arena(Device device, size_t bytes);

  /// Reserves `bytes`, rounded up to 64. What the extent uses is added to `used_by_owner`, which
  /// may be null and must outlive it. Throws Error{kOutOfMemory} with both figures and `who`.
  ArenaExtent reserve(size_t bytes, const std::string& who, size_t* used_by_owner = nullptr);
  /// `count` extents of `bytes` each can be reserved.
  bool fits(size_t bytes, size_t count) const noexcept;

  Device device() const noexcept { return buffer_.device(); }
  size_t capacity() const noexcept { return buffer_.bytes(); }
  /// Sum of the extents' reserved().
  size_t reserved() const noexcept { return reserved_; }
  /// Sum of the extents' used(): of bytes() of all caches.
  size_t used() const noexcept { return used_; }

  /// Bytes that an extent of `bytes` takes.
  static constexpr size_t rounded(size_t bytes) noexcept { return (bytes + 63) / 64 * 64; }

 private:
  friend class ArenaExtent;

  Buffer buffer_;
  std::map<size_t, size_t> free_;  // offset -> bytes; neighbours are merged
  size_t reserved_ = 0;
  size_t used_ = 0;
};

}  // namespace kvlm
