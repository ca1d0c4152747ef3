#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/buffer/layout.h"

namespace kvlm {

/// Addresses of a packed block.
struct BlockPlace {
  std::byte* codes = nullptr;  ///< the block's memory; scales follow the codes
  std::byte* scales = nullptr;
  int slot = -1;             ///< index in units of a full block; -1 if blocks have any size
  bool shared = false;       ///< other buffers may read it, so it is neither counted nor freed here
  uint64_t* live = nullptr;  ///< bitmap of live tokens; null until one is evicted
};

/// Memory of a buffer's packed blocks and of their bitmaps, and the addresses of the blocks on its
/// list. place() reserves all of it; later calls allocate nothing.
class BlockMemory {
 public:
  void place(const BufferLayout& layout, const BufferCapacity& capacity, std::byte* memory);
  void reset() noexcept;

  const BufferLayout& layout() const noexcept { return layout_; }
  int most() const noexcept { return most_; }    ///< blocks that fit
  int taken() const noexcept { return taken_; }  ///< slots used at least once, from the first on
  /// Smaller slots are of blocks in another buffer's memory.
  int first_own() const noexcept { return first_own_; }
  /// Bytes from one full block to the next.
  std::ptrdiff_t stride() const noexcept {
    return static_cast<std::ptrdiff_t>(layout_.block_bytes(layout_.block_rows()));
  }
  /// By index on the list.
  std::span<const BlockPlace> places() const noexcept { return places_; }
  BlockPlace& place(size_t b) noexcept { return places_[b]; }
  /// A fork reads some of the blocks, or some belong to another buffer.
  bool is_shared() const noexcept {
    return first_own_ > 0 ||
           std::any_of(places_.begin(), places_.end(), [](const auto& p) { return p.shared; });
  }
  /// The addresses of a full block.
  BlockPlace at(int slot) const noexcept;

  /// Allocates a block for `rows` tokens.
  BlockPlace take(int rows) noexcept;
  /// Adopts a block in another buffer's memory.
  BlockPlace take_elsewhere(BlockPlace place) noexcept;
  /// Appends an allocated block to the list.
  void add(const BlockPlace& place) { places_.push_back(place); }
  /// Removes block `b` from the list.
  void erase(size_t b) { places_.erase(places_.begin() + static_cast<std::ptrdiff_t>(b)); }
  /// Makes a slot free for the next block; -1 is ignored.
  void free(int slot) noexcept {
    if (slot >= 0) free_slots_.push_back(slot);
  }
  bool has_free() const noexcept { return !free_slots_.empty(); }
  /// Removes all blocks; the first `taken` slots count as used.
  void clear(int taken) noexcept;

  /// The bitmap of a block of `rows` tokens, initialised.
  ///   live  initial value of all bits
  uint64_t* bitmap(const BlockPlace& place, int rows, bool live) noexcept;
  /// Discards the bitmaps of blocks packed once, and allocates for new ones.
  void forget_bitmaps(int blocks, int rows);

 private:
  BufferLayout layout_;
  std::vector<BlockPlace> places_;  // by index on the list
  std::byte* memory_ = nullptr;
  size_t bump_ = 0;  // bytes allocated so far, if packed once
  int most_ = 0;
  int taken_ = 0;
  int first_own_ = 0;
  int live_words_ = 0;           // bitmap words per block
  std::vector<int> free_slots_;  // stack of freed slots
  std::vector<uint64_t> live_;   // bitmaps of all blocks
};

}  // namespace kvlm
