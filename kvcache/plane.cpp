#include "kvcache/plane.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <numeric>
#include <utility>

namespace kvlm {

namespace {

// Values packed token by token have no natural block; this many rows share a bitmap and are freed
// together.
constexpr int kTokenBlockRows = 32;
constexpr size_t kAlignment = 16;

constexpr size_t aligned(size_t bytes) noexcept {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

size_t codes_bytes(const Plane::Layout& layout, int rows) noexcept {
  return layout.shared ? 0 : static_cast<size_t>(rows) * layout.packing->format.row_bytes();
}

int live_rows(std::span<const PackedBlock> blocks) noexcept {
  return std::accumulate(blocks.begin(), blocks.end(), 0,
                         [](int rows, const PackedBlock& block) { return rows + block.live_rows; });
}

}  // namespace

int Plane::Layout::block_rows() const noexcept {
  if (packing == nullptr) return 0;
  if (packing->format.axis == ScaleAxis::kToken) return kTokenBlockRows;
  return packing->format.block_rows;
}

size_t Plane::Layout::block_bytes(int rows) const noexcept {
  return aligned(aligned(codes_bytes(*this, rows)) + packing->format.meta_bytes(rows));
}

size_t Plane::Layout::packed_bytes(int rows) const noexcept {
  return codes_bytes(*this, rows) + packing->format.meta_bytes(rows);
}

PlaneCapacity Plane::capacity(const Layout& layout, int64_t planes, int64_t packed_rows,
                              int64_t spans, int64_t full_rows) noexcept {
  PlaneCapacity capacity;
  capacity.ring_rows = full_rows;
  capacity.ring_bytes = static_cast<size_t>(full_rows) * layout.row_bytes();
  if (layout.packing == nullptr || packed_rows == 0) return capacity;
  capacity.packed_rows = packed_rows;
  if (layout.once) {
    // Blocks of any size: the codes of all rows, and scales, ends and rounding of each block.
    capacity.blocks = planes * spans;
    const int one = layout.packing->format.axis == ScaleAxis::kToken ? 0 : 1;
    const auto rows = static_cast<size_t>(packed_rows);
    const size_t of_rows = (layout.shared ? 0 : rows * layout.packing->format.row_bytes()) +
                           (one ? 0 : rows * layout.packing->format.meta_bytes(1));
    capacity.packed_bytes = of_rows + static_cast<size_t>(capacity.blocks) *
                                          (layout.packing->format.meta_bytes(one) + 2 * kAlignment);
    return capacity;
  }
  const int rows = layout.block_rows();
  // Every plane may have a first block that a ragged prompt left short, and a last one.
  capacity.blocks = packed_rows / rows + 2 * planes;
  capacity.packed_bytes = static_cast<size_t>(capacity.blocks) * layout.block_bytes(rows);
  return capacity;
}

void Plane::place(const Layout& layout, const PlaneCapacity& capacity, std::byte* packed,
                  std::byte* ring, const Plane* owner) {
  assert(layout.shared == (owner != nullptr));
  reset();
  layout_ = layout;
  owner_ = owner;
  packed_memory_ = packed;
  ring_ = ring;
  ring_rows_ = static_cast<int>(capacity.ring_rows);
  const auto blocks = static_cast<size_t>(capacity.blocks);
  most_blocks_ = static_cast<int>(capacity.blocks);
  blocks_.reserve(blocks);
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

void Plane::reset() noexcept {
  layout_ = {};
  owner_ = nullptr;
  ring_rows_ = ring_first_ = full_ = packed_ = 0;
  next_slot_ = first_own_ = 0;
  even_ = true;
  bytes_ = bump_ = 0;
  blocks_.clear();
  places_.clear();
  free_slots_.clear();
  live_.clear();
  live_words_ = 0;
}

bool Plane::fills_newest() const noexcept {
  return layout_.packing != nullptr && layout_.packing->format.axis == ScaleAxis::kToken &&
         !layout_.once && !blocks_.empty() && blocks_.back().rows < layout_.block_rows();
}

PlaneCapacity Plane::forked_capacity(const Layout& layout, bool share, int64_t more,
                                     int64_t ring_rows) const noexcept {
  const auto copied = static_cast<int64_t>(blocks_.size() - shared_blocks(share));
  const int64_t rows = layout.once ? 0 : copied * layout.block_rows() + more;
  PlaneCapacity capacity = Plane::capacity(layout, 1, rows, 1, ring_rows);
  capacity.blocks += static_cast<int64_t>(blocks_.size());
  for (const PackedBlock& block : blocks_) capacity.packed_rows += block.rows;
  return capacity;
}

void Plane::fork(Plane& parent, bool share, int places, std::vector<ByteRange>& copies) {
  even_ = parent.even_;
  const size_t shared = parent.shared_blocks(share);
  for (size_t b = 0; b < parent.blocks_.size(); ++b) {
    take_block(parent, b, /*share=*/b < shared, copies);
  }
  packed_ = parent.packed_;
  if (places > 0) copy_ring(parent, places, copies);
}

/// Block `b` of another plane becomes this one's newest.
void Plane::take_block(Plane& parent, size_t b, bool share, std::vector<ByteRange>& copies) {
  PackedBlock block = parent.blocks_[b];
  Place& theirs = parent.places_[b];
  Place place = theirs;
  if (share) {
    if (!theirs.shared && block.live_rows > 0) {
      parent.bytes_ -= layout_.packed_bytes(block.rows);
    }
    place.shared = theirs.shared = true;
    if (!layout_.once) place.slot = next_slot_++;
    first_own_ = next_slot_;
  } else {
    place = new_place(layout_.block_rows());
    copies.push_back({theirs.codes, place.codes, layout_.block_bytes(layout_.block_rows())});
    block.codes = place.codes;
    if (block.zeros != nullptr) block.zeros = place.scales + (block.zeros - block.scales);
    block.scales = place.scales;
    if (block.live_rows > 0) bytes_ += layout_.packed_bytes(block.rows);
  }
  if (layout_.shared) block.codes = owner_->blocks_[b].codes;
  if (theirs.live != nullptr) {
    place.live = new_bitmap(place, block.rows);
    std::copy_n(theirs.live, static_cast<size_t>(block.rows + 63) / 64, place.live);
    block.live = place.live;
  }
  blocks_.push_back(block);
  places_.push_back(place);
  even_ = even_ && lies_evenly(block.rows);
}

/// Copies the first `places` places of another ring from its oldest row on. Rows lie as they do
/// there if the rings are alike.
void Plane::copy_ring(const Plane& parent, int places, std::vector<ByteRange>& copies) {
  full_ = parent.full_;
  bytes_ += static_cast<size_t>(full_) * layout_.row_bytes();
  if (ring_rows_ == parent.ring_rows_) ring_first_ = parent.ring_first_;
  for (int row = 0; row < places;) {
    const int before_ends =
        std::min(ring_rows_ - (ring_first_ + row) % ring_rows_,
                 parent.ring_rows_ - (parent.ring_first_ + row) % parent.ring_rows_);
    const int rows = std::min(places - row, before_ends);
    copies.push_back({parent.ring_ + parent.ring_offset(row), ring_ + ring_offset(row),
                      static_cast<size_t>(rows) * layout_.row_bytes()});
    row += rows;
  }
}

std::byte* Plane::push_row() noexcept {
  assert(full_ < ring_rows_);
  bytes_ += layout_.row_bytes();
  return ring_ + ring_offset(full_++);
}

std::byte* Plane::push_rows(int rows) noexcept {
  assert(ring_first_ + full_ + rows <= ring_rows_);
  std::byte* first = ring_ + ring_offset(full_);
  full_ += rows;
  bytes_ += static_cast<size_t>(rows) * layout_.row_bytes();
  return first;
}

GrowingRows Plane::full_rows() const noexcept {
  GrowingRows rows;
  rows.ring = ring_;
  rows.ring_rows = ring_rows_;
  rows.first = ring_first_;
  rows.full = full_;
  return rows;
}

GrowingRows Plane::memory() const noexcept {
  GrowingRows rows = full_rows();
  if (layout_.packing == nullptr) return rows;
  const PackedFormat& format = layout_.packing->format;
  rows.block_rows = layout_.block_rows();
  rows.codes = layout_.shared ? owner_->packed_memory_ : packed_memory_;
  rows.code_stride = layout_.shared ? owner_->block_stride() : block_stride();
  rows.scales = packed_memory_ + aligned(codes_bytes(layout_, rows.block_rows));
  rows.scale_stride = block_stride();
  if (format.zeros(rows.block_rows) > 0) {
    rows.zeros = rows.scales + format.scales(rows.block_rows) * dtype_bytes(format.meta);
  }
  rows.shares_codes = !layout_.writes;
  rows.owns_codes = !layout_.shared;
  return rows;
}

GrowingRows Plane::growing() const noexcept {
  assert(even_ || first_own_ > 0);
  GrowingRows rows = memory();
  rows.packed = packed_ - live_rows(blocks_elsewhere());
  return rows;
}

bool Plane::shares_blocks() const noexcept {
  return first_own_ > 0 ||
         std::any_of(places_.begin(), places_.end(), [](const Place& p) { return p.shared; });
}

bool Plane::owns_blocks() const noexcept { return !layout_.once && !shares_blocks(); }

int Plane::packed_places() const noexcept {
  return std::accumulate(blocks_.begin(), blocks_.end(), 0,
                         [](int rows, const PackedBlock& block) { return rows + block.rows; });
}

int Plane::places() const noexcept {
  if (layout_.once) return packed_places();
  return most_blocks_ * layout_.block_rows() + ring_rows_;
}

GrowingRows Plane::placed() const {
  assert(owns_blocks());
  GrowingRows rows = memory();
  rows.most_blocks = layout_.packing == nullptr ? 0 : most_blocks_;
  rows.blocks = next_slot_;
  rows.packed = next_slot_ * rows.block_rows;
  if (fills_newest()) {
    rows.filling = places_.back().slot;
    rows.filled = blocks_.back().rows;
  }
  return rows;
}

void Plane::number_places(std::span<const int> numbers, bool stays, std::vector<int>& came) const {
  const bool listed = layout_.once || stays;
  const int block_rows = layout_.block_rows();
  const int ring = listed ? packed_places() : most_blocks_ * block_rows;
  const size_t before = came.size();
  const int all = ring + (layout_.once ? 0 : ring_rows_);
  came.resize(before + static_cast<size_t>(all), WeighedRows::kNoRow);
  const std::span<int> of_places = std::span(came).subspan(before);
  int slot = 0;
  const auto number = [&](int place) {
    const int of_slot = numbers.empty() ? slot : numbers[static_cast<size_t>(slot)];
    of_places[static_cast<size_t>(place)] = of_slot;
    ++slot;
  };
  int begin = 0;  // of a block that may have any size
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const uint64_t* live = blocks_[b].live;
    const int first = listed ? begin : places_[b].slot * block_rows;
    for (int row = 0; row < blocks_[b].rows; ++row) {
      if (live == nullptr || (live[row / 64] >> (row % 64) & 1) != 0) number(first + row);
    }
    begin += blocks_[b].rows;
  }
  for (int i = 0; i < full_; ++i) number(ring + (ring_first_ + i) % ring_rows_);
}

void Plane::take_placed(const PlacedRows::Side& rows) {
  const int block_rows = std::max(layout_.block_rows(), 1);
  const std::span<const int> came(rows.came);
  std::vector<std::pair<int, int>> order;  // numbers and blocks
  clear_packed();
  for (int block = 0; block < rows.blocks; ++block) {
    const auto of_block =
        came.subspan(static_cast<size_t>(block * block_rows), static_cast<size_t>(block_rows));
    const int first = *std::min_element(of_block.begin(), of_block.end());
    if (first == WeighedRows::kNoRow) {
      free_slots_.push_back(block);
    } else {
      order.emplace_back(first, block);
    }
  }
  std::sort(order.begin(), order.end());
  next_slot_ = rows.blocks;
  for (const auto& [first, block] : order) {
    const int held = block == rows.filling ? rows.filled : block_rows;
    take_placed_block(
        block, held,
        came.subspan(static_cast<size_t>(block * block_rows), static_cast<size_t>(held)));
  }
  even_ = even_ && free_slots_.empty();  // else what comes next is not behind the others
  take_ring(rows);
}

void Plane::take_ring(const PlacedRows::Side& rows) noexcept {
  bytes_ += static_cast<size_t>(rows.full) * layout_.row_bytes();
  bytes_ -= static_cast<size_t>(full_) * layout_.row_bytes();
  ring_first_ = rows.first;
  full_ = rows.full;
}

void Plane::keep_placed(std::span<const int> came) {
  assert(came.size() == static_cast<size_t>(packed_places()));
  const auto is_there = [](int number) { return number != WeighedRows::kNoRow; };
  if (layout_.once) {  // all bitmaps anew: those of a copy are not its own
    live_.clear();
    live_.reserve(came.size() / 64 + blocks_.size());
  }
  auto rows = came.begin();
  for (size_t b = 0; b < blocks_.size(); ++b) {
    PackedBlock& block = blocks_[b];
    const auto live = static_cast<int>(std::count_if(rows, rows + block.rows, is_there));
    even_ = even_ && live == block.rows;
    packed_ -= block.live_rows - live;
    if (live == 0 && block.live_rows > 0) bytes_ -= layout_.packed_bytes(block.rows);
    block.live_rows = live;
    block.live = places_[b].live = nullptr;
    if (live < block.rows) {
      uint64_t* bitmap = new_bitmap(places_[b], block.rows);
      for (int row = 0; row < block.rows; ++row) {
        bitmap[row / 64] |= uint64_t{is_there(rows[row])} << (row % 64);
      }
      block.live = places_[b].live = bitmap;
    }
    rows += block.rows;
  }
  if (!layout_.once) forget_dead_blocks();
}

/// Blocks that have only dead rows are free again.
void Plane::forget_dead_blocks() {
  for (size_t b = blocks_.size(); b-- > 0;) {
    if (blocks_[b].live_rows > 0) continue;
    free_slots_.push_back(places_[b].slot);
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(b));
    places_.erase(places_.begin() + static_cast<std::ptrdiff_t>(b));
  }
}

/// The block in a place becomes the newest: `came` says which of its rows are there.
void Plane::take_placed_block(int place, int rows, std::span<const int> came) {
  const PackedFormat& format = layout_.packing->format;
  Place of;
  of.slot = place;
  of.codes =
      packed_memory_ + static_cast<size_t>(place) * layout_.block_bytes(layout_.block_rows());
  of.scales = of.codes + aligned(codes_bytes(layout_, layout_.block_rows()));
  PackedBlock block;
  block.codes = layout_.shared ? owner_->packed_memory_ +
                                     static_cast<std::ptrdiff_t>(place) * owner_->block_stride()
                               : of.codes;
  block.scales = of.scales;
  if (format.zeros(layout_.block_rows()) > 0) {
    block.zeros = of.scales + format.scales(layout_.block_rows()) * dtype_bytes(format.meta);
  }
  block.rows = rows;
  block.live_rows = static_cast<int>(
      std::count_if(came.begin(), came.end(), [](int n) { return n != WeighedRows::kNoRow; }));
  if (block.live_rows < rows) {
    of.live = new_bitmap(of, rows);
    for (int row = 0; row < rows; ++row) {
      if (came[static_cast<size_t>(row)] == WeighedRows::kNoRow) continue;
      of.live[row / 64] |= uint64_t{1} << (row % 64);
    }
    block.live = of.live;
  }
  blocks_.push_back(block);
  places_.push_back(of);
  packed_ += block.live_rows;
  bytes_ += layout_.packed_bytes(rows);
  even_ = even_ && block.live == nullptr && place == static_cast<int>(blocks_.size()) - 1 &&
          lies_evenly(rows);
}

void Plane::gain(int rows, const FlushRule* window) noexcept {
  for (int row = 0; row < rows; ++row) {
    push_row();
    if (window == nullptr || full_ < window->trigger) continue;
    for (int left = window->rows; left > 0;) left -= push_packed(left).rows;
    pop_rows(window->rows);
  }
}

size_t Plane::ring_offset(int i) const noexcept {
  const int place = ring_first_ + i;  // no division: this is done for every KV head of a step
  return static_cast<size_t>(place < ring_rows_ ? place : place - ring_rows_) * layout_.row_bytes();
}

const std::byte* Plane::full_row(int i) const noexcept {
  assert(i >= 0 && i < full_);
  return ring_ + ring_offset(i);
}

std::byte* Plane::full_row(int i) noexcept {
  assert(i >= 0 && i < full_);
  return ring_ + ring_offset(i);
}

void Plane::pop_rows(int rows) noexcept {
  assert(rows <= full_);
  if (rows == 0) return;
  ring_first_ = full_ == rows ? 0 : ring_first_ + rows;
  if (ring_first_ >= ring_rows_) ring_first_ -= ring_rows_;
  full_ -= rows;
  bytes_ -= static_cast<size_t>(rows) * layout_.row_bytes();
}

Plane::Place Plane::new_place(int rows) noexcept {
  Place place;
  if (layout_.once) {
    place.codes = packed_memory_ + bump_;
    bump_ += layout_.block_bytes(rows);
  } else {
    if (free_slots_.empty()) {
      place.slot = next_slot_++;
      assert(place.slot < most_blocks_);
    } else {
      place.slot = free_slots_.back();
      free_slots_.pop_back();
    }
    place.codes =
        packed_memory_ + static_cast<size_t>(place.slot - first_own_) * layout_.block_bytes(rows);
  }
  place.scales = place.codes + aligned(codes_bytes(layout_, rows));
  return place;
}

PackJob Plane::push_packed(int rows) noexcept {
  assert(layout_.packing != nullptr && rows > 0);
  const PackedFormat& format = layout_.packing->format;
  const int full_block = layout_.once ? rows : layout_.block_rows();
  const bool by_token = format.axis == ScaleAxis::kToken;
  const size_t zeros_offset = format.scales(full_block) * dtype_bytes(format.meta);
  const bool has_zeros = format.zeros(full_block) > 0;
  if (!fills_newest()) {
    const Place place = new_place(full_block);
    PackedBlock block;
    block.codes = layout_.shared ? owner_->blocks_[blocks_.size()].codes : place.codes;
    block.scales = place.scales;
    if (has_zeros) block.zeros = place.scales + zeros_offset;
    blocks_.push_back(block);
    places_.push_back(place);
    even_ = even_ && !layout_.once && lies_evenly(std::min(rows, full_block));
  }
  PackedBlock& block = blocks_.back();
  const Place& place = places_.back();
  const auto before = static_cast<size_t>(block.rows);
  const int added = std::min(rows, full_block - block.rows);
  const size_t scales_before =
      by_token ? before * static_cast<size_t>(format.groups()) * dtype_bytes(format.meta) : 0;
  PackJob job;
  job.rows = added;
  // A plane that writes into another's block does so over nothing: that one makes no codes.
  if (layout_.writes) {
    job.codes = const_cast<std::byte*>(block.codes) + before * format.row_bytes();
  }
  job.scales = place.scales + scales_before;
  if (has_zeros) job.zeros = place.scales + zeros_offset + scales_before;
  if (place.live != nullptr) {  // the new rows of a block that has dead ones
    for (int r = block.rows; r < block.rows + added; ++r) {
      place.live[r / 64] |= uint64_t{1} << (r % 64);
    }
  }
  const size_t old_bytes = block.rows == 0 ? 0 : layout_.packed_bytes(block.rows);
  block.rows += added;
  block.live_rows += added;
  packed_ += added;
  bytes_ += layout_.packed_bytes(block.rows) - old_bytes;
  return job;
}

void Plane::clear_packed() noexcept {
  assert(first_own_ == 0 && !layout_.once);
  for (const PackedBlock& block : blocks_) bytes_ -= layout_.packed_bytes(block.rows);
  free_slots_.clear();
  next_slot_ = 0;
  blocks_.clear();
  places_.clear();
  bump_ = 0;
  packed_ = 0;
  even_ = true;
}

bool Plane::lies_evenly(int rows) noexcept {
  const size_t n = blocks_.size();
  if (n < 2) return true;
  if (rows > blocks_[0].rows) return false;
  const std::ptrdiff_t codes = blocks_[n - 1].codes - blocks_[n - 2].codes;
  const std::ptrdiff_t scales = blocks_[n - 1].scales - blocks_[n - 2].scales;
  if (n == 2) {
    // Behind a block that a fork shares, the next may be anywhere: its distance is no stride.
    const Plane& holder = layout_.shared ? *owner_ : *this;
    if (first_own_ > 0 && (scales != block_stride() || codes != holder.block_stride())) {
      return false;
    }
    code_stride_ = codes;
    scale_stride_ = scales;
  }
  return blocks_[n - 2].rows == blocks_[0].rows && codes == code_stride_ && scales == scale_stride_;
}

RowGap Plane::evict(int slot) noexcept {
  assert(layout_.evicts && slot >= 0 && slot < slots());
  if (slot >= packed_) {
    const int row = slot - packed_;
    // The fewer rows move.
    const RowGap gap{ring_,
                     layout_.row_bytes(),
                     ring_rows_,
                     ring_first_,
                     full_,
                     row,
                     /*from_front=*/2 * row < full_};
    if (gap.from_front) ring_first_ = (ring_first_ + 1) % ring_rows_;
    --full_;
    bytes_ -= layout_.row_bytes();
    return gap;
  }
  even_ = false;
  size_t b = 0;
  for (; slot >= blocks_[b].live_rows; ++b) slot -= blocks_[b].live_rows;
  PackedBlock& block = blocks_[b];
  --packed_;
  --block.live_rows;
  if (block.live_rows == 0) {
    if (!places_[b].shared) {
      bytes_ -= layout_.packed_bytes(block.rows);
      if (places_[b].slot >= 0) free_slots_.push_back(places_[b].slot);
    }
    if (!layout_.once) {
      blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(b));
      places_.erase(places_.begin() + static_cast<std::ptrdiff_t>(b));
      return {};
    }
    // One that is packed once keeps its place among the others.
  }
  uint64_t*& live = places_[b].live;
  if (live == nullptr) {
    live = new_bitmap(places_[b], block.rows);
    for (int r = 0; r < block.rows; ++r) live[r / 64] |= uint64_t{1} << (r % 64);
    block.live = live;
  }
  for (int word = 0;; ++word) {
    const int here = std::popcount(live[word]);
    if (slot < here) {
      uint64_t bits = live[word];
      for (; slot > 0; --slot) bits &= bits - 1;
      live[word] &= ~(bits & (~bits + 1));
      return {};
    }
    slot -= here;
  }
}

uint64_t* Plane::new_bitmap(const Place& place, int rows) noexcept {
  const auto words = static_cast<size_t>(rows + 63) / 64;
  uint64_t* bitmap = nullptr;
  if (place.slot >= 0) {
    bitmap = live_.data() + static_cast<size_t>(place.slot * live_words_);
  } else {
    // A block packed once has as many rows as it likes; it gets its bitmap once in its life.
    assert(live_.capacity() >= live_.size() + words);
    live_.resize(live_.size() + words);
    bitmap = live_.data() + live_.size() - words;
  }
  std::fill_n(bitmap, words, 0);
  return bitmap;
}

void Plane::add_packed(RunList& runs) const noexcept {
  if (packed_ == 0) return;
  SlotRun& run = runs.add();
  run.slots = packed_;
  run.format = &layout_.packing->format;
  run.blocks = blocks_;
  if (even_ && blocks_.size() > 1) {
    run.code_stride = code_stride_;
    run.scale_stride = scale_stride_;
  }
}

void Plane::add_shared(RunList& runs) const noexcept {
  const std::span<const PackedBlock> shared = blocks_elsewhere();
  if (shared.empty()) return;
  SlotRun& run = runs.add();
  run.slots = live_rows(shared);
  run.format = &layout_.packing->format;
  run.blocks = shared;
  if (shared.size() < 2 || !shares_evenly()) return;
  run.code_stride = shared[1].codes - shared[0].codes;
  run.scale_stride = shared[1].scales - shared[0].scales;
}

bool Plane::shares_evenly() const noexcept {
  const std::span<const PackedBlock> shared = blocks_elsewhere();
  if (shared.size() < 2) return true;
  for (size_t b = 1; b < shared.size(); ++b) {
    const bool follows =
        shared[b].codes - shared[b - 1].codes == shared[1].codes - shared[0].codes &&
        shared[b].scales - shared[b - 1].scales == shared[1].scales - shared[0].scales;
    if (!follows || shared[b - 1].rows != shared[0].rows || shared[b].live != nullptr) return false;
  }
  return shared[0].live == nullptr && shared.back().rows <= shared[0].rows;
}

void Plane::add_full(RunList& runs) const noexcept {
  const int first = full_before_wrap();
  for (const auto& [begin, count] : {std::pair(0, first), std::pair(first, full_ - first)}) {
    if (count == 0) continue;
    SlotRun& run = runs.add();
    run.slots = count;
    run.rows = full_row(begin);
    run.dtype = layout_.dtype;
  }
}

}  // namespace kvlm
