#include "kvcache/buffer/block_memory.h"

#include <algorithm>
#include <cassert>

namespace kvlm {

void BlockMemory::place(const BufferLayout& layout, const BufferCapacity& capacity,
                        std::byte* memory) {
  reset();
  layout_ = layout;
  memory_ = memory;
  most_ = static_cast<int>(capacity.blocks);
  const auto blocks = static_cast<size_t>(capacity.blocks);
  places_.reserve(blocks);
  if (!layout.evicts) return;
  if (layout.once) {
    live_.reserve(static_cast<size_t>(capacity.packed_rows) / 64 + blocks);
  } else {
    free_slots_.reserve(blocks);
    live_words_ = (std::max(layout.block_rows(), 1) + 63) / 64;
    live_.resize(blocks * static_cast<size_t>(live_words_));
  }
}

void BlockMemory::reset() noexcept {
  clear(0);
  layout_ = {};
  most_ = first_own_ = live_words_ = 0;
  live_.clear();
}

void BlockMemory::clear(int taken) noexcept {
  places_.clear();
  free_slots_.clear();
  taken_ = taken;
  bump_ = 0;
}

BlockPlace BlockMemory::at(int slot) const noexcept {
  BlockPlace place;
  place.slot = slot;
  place.codes = memory_ + (slot - first_own_) * stride();
  place.scales = place.codes + layout_.scales_offset(layout_.block_rows());
  return place;
}

BlockPlace BlockMemory::take(int rows) noexcept {
  if (layout_.once) {
    BlockPlace place;
    place.codes = memory_ + bump_;
    place.scales = place.codes + layout_.scales_offset(rows);
    bump_ += layout_.block_bytes(rows);
    return place;
  }
  if (free_slots_.empty()) {
    assert(taken_ < most_);
    return at(taken_++);
  }
  const int slot = free_slots_.back();
  free_slots_.pop_back();
  return at(slot);
}

BlockPlace BlockMemory::take_elsewhere(BlockPlace place) noexcept {
  place.shared = true;
  if (!layout_.once) place.slot = taken_++;
  first_own_ = taken_;
  return place;
}

uint64_t* BlockMemory::bitmap(const BlockPlace& place, int rows, bool live) noexcept {
  const auto words = static_cast<size_t>(rows + 63) / 64;
  auto at = static_cast<size_t>(place.slot * live_words_);
  if (place.slot < 0) {
    // A block packed once has any number of tokens. Its bitmap is allocated at its first eviction.
    assert(live_.capacity() >= live_.size() + words);
    at = live_.size();
    live_.resize(at + words);
  }
  uint64_t* bitmap = live_.data() + at;
  std::fill_n(bitmap, words, 0);
  for (int row = 0; row < rows && live; ++row) bitmap[row / 64] |= uint64_t{1} << (row % 64);
  return bitmap;
}

void BlockMemory::forget_bitmaps(int blocks, int rows) {
  live_.clear();
  live_.reserve(static_cast<size_t>(rows / 64 + blocks));
}

}  // namespace kvlm
