#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/plane/layout.h"

namespace kvlm {

/// Where a packed block lies.
struct BlockPlace {
  std::byte* codes = nullptr;  ///< the block's memory; its scales follow its codes
  std::byte* scales = nullptr;
  int slot = -1;             ///< in units of a full block; -1 if blocks have any size
  bool shared = false;       ///< other planes may read it: it is neither counted nor freed here
  uint64_t* live = nullptr;  ///< the block's bitmap, once it has dead rows
};

/// The memory of a plane's packed blocks, of the bitmaps of those that have dead rows, and where
/// each block of the plane's list lies. Everything is reserved by place(), so that nothing
/// allocates afterwards.
class BlockMemory {
 public:
  void place(const PlaneLayout& layout, const PlaneCapacity& capacity, std::byte* memory);
  void reset() noexcept;

  const PlaneLayout& layout() const noexcept { return layout_; }
  int most() const noexcept { return most_; }    ///< blocks for which there is room
  int taken() const noexcept { return taken_; }  ///< slots from the first on that have had a block
  /// Slots before it are of blocks whose memory is elsewhere.
  int first_own() const noexcept { return first_own_; }
  /// Bytes from a full block's begin to the next one's.
  std::ptrdiff_t stride() const noexcept {
    return static_cast<std::ptrdiff_t>(layout_.block_bytes(layout_.block_rows()));
  }
  /// Of each block on the list.
  std::span<const BlockPlace> places() const noexcept { return places_; }
  BlockPlace& place(size_t b) noexcept { return places_[b]; }
  /// A fork reads some of the blocks, or some are another plane's.
  bool is_shared() const noexcept {
    return first_own_ > 0 ||
           std::any_of(places_.begin(), places_.end(), [](const auto& p) { return p.shared; });
  }
  /// The place of a full block.
  BlockPlace at(int slot) const noexcept;

  /// A place for a block of `rows` rows.
  BlockPlace take(int rows) noexcept;
  /// The same for a block that lies where another plane has it.
  BlockPlace take_elsewhere(BlockPlace place) noexcept;
  /// A block in a place that was taken is on the list, the last.
  void add(const BlockPlace& place) { places_.push_back(place); }
  /// Block `b` no longer is.
  void erase(size_t b) { places_.erase(places_.begin() + static_cast<std::ptrdiff_t>(b)); }
  /// The slot, if it has one, is free for the next block.
  void free(int slot) noexcept {
    if (slot >= 0) free_slots_.push_back(slot);
  }
  bool has_free() const noexcept { return !free_slots_.empty(); }
  /// Forgets all blocks; the first `taken` slots have had one.
  void clear(int taken) noexcept;

  /// The bitmap of a block of `rows` rows, which has none yet, or whose rows are counted anew.
  ///   live  whether its rows are
  uint64_t* bitmap(const BlockPlace& place, int rows, bool live) noexcept;
  /// Bitmaps of blocks that were packed once are made anew: blocks have so many rows.
  void forget_bitmaps(int blocks, int rows);

 private:
  PlaneLayout layout_;
  std::vector<BlockPlace> places_;  // of each block on the list
  std::byte* memory_ = nullptr;
  size_t bump_ = 0;  // bytes of it taken, if packed once
  int most_ = 0;
  int taken_ = 0;
  int first_own_ = 0;
  int live_words_ = 0;           // per block
  std::vector<int> free_slots_;  // stack, of those that were evicted
  std::vector<uint64_t> live_;   // words of all slots, made live on the first eviction
};

}  // namespace kvlm
