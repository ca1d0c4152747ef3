#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "kernels/base/buffer.h"

namespace kvlm {

class Arena;

/// A contiguous range of an arena, of which a growing prefix count of bytes is handed out. Returns
/// itself to the arena when destroyed. Move-only.
class ArenaExtent {
 public:
  ArenaExtent() noexcept = default;
  ~ArenaExtent() { release(); }
  ArenaExtent(ArenaExtent&& other) noexcept { *this = std::move(other); }
  ArenaExtent& operator=(ArenaExtent&& other) noexcept;

  std::byte* data() const noexcept;
  /// Bytes set aside, which bound what can be handed out.
  size_t reserved() const noexcept { return reserved_; }
  /// Bytes handed out.
  size_t used() const noexcept { return used_; }
  /// Sets the bytes handed out, at most reserved(). Allocates nothing.
  void set_used(size_t bytes) noexcept;
  /// Keeps the first `bytes`, at least used(), rounded up to 64; the others are free.
  void shrink(size_t bytes) noexcept;

 private:
  friend class Arena;
  void release() noexcept;

  Arena* arena_ = nullptr;
  size_t offset_ = 0;
  size_t reserved_ = 0;
  size_t used_ = 0;
};

/// One reservation of device memory from which a cache takes everything it stores, so that "how
/// much memory does the cache take" has one exact answer. First fit; freed ranges merge and are
/// reused.
class Arena {
 public:
  Arena(Device device, size_t bytes);

  /// Sets `bytes` aside (rounded up to 64). Throws Error{kOutOfMemory} with both figures and `who`.
  ArenaExtent reserve(size_t bytes, const std::string& who);
  /// Whether a reserve of each of `count` extents of `bytes` would succeed one after the other.
  bool fits(size_t bytes, size_t count) const noexcept;

  size_t capacity() const noexcept { return buffer_.bytes(); }
  /// Sum of what live extents have set aside.
  size_t reserved() const noexcept { return reserved_; }
  /// Sum of what live extents have handed out: the cache's bytes().
  size_t used() const noexcept { return used_; }

  /// What an extent of `bytes` takes from the arena.
  static constexpr size_t rounded(size_t bytes) noexcept { return (bytes + 63) / 64 * 64; }

 private:
  friend class ArenaExtent;

  Buffer buffer_;
  std::map<size_t, size_t> free_;  // offset -> bytes, neighbours always merged
  size_t reserved_ = 0;
  size_t used_ = 0;
};

}  // namespace kvlm
