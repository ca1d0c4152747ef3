#include "kvcache/buffer/kv_buffer.h"

#include <cassert>

namespace kvlm {

void KvBuffer::place(const BufferLayout& layout, const BufferCapacity& capacity, std::byte* packed,
                     std::byte* full, const KvBuffer* owner) {
  blocks.place(layout, capacity, packed, owner == nullptr ? nullptr : &owner->blocks);
  ring.place(full, capacity.ring_rows, layout.row_bytes());
}

void KvBuffer::reset() noexcept {
  blocks.reset();
  ring = {};
}

void KvBuffer::fork(KvBuffer& parent, bool share, int places, std::vector<ByteRange>& copies) {
  blocks.fork(parent.blocks, share, copies);
  if (places > 0) ring.copy(parent.ring, places, copies);
}

void KvBuffer::gain(int rows, const FlushRule* window) noexcept {
  for (int row = 0; row < rows; ++row) {
    ring.push();
    if (window == nullptr || full() < window->trigger) continue;
    for (int left = window->rows; left > 0;) left -= blocks.push(left).rows;
    ring.pop(window->rows);
  }
}

RowGap KvBuffer::evict(int slot) noexcept {
  assert(layout().evicts && slot >= 0 && slot < slots());
  if (slot >= packed()) return ring.evict(slot - packed());
  blocks.evict(slot);
  return {};
}

GrowingRows KvBuffer::full_rows() const noexcept {
  GrowingRows rows;
  rows.ring = ring.begin();
  rows.ring_rows = ring.places();
  rows.first = ring.first();
  rows.full = full();
  return rows;
}

GrowingRows KvBuffer::growing() const noexcept {
  assert(blocks.is_even() || !blocks.elsewhere().empty());
  GrowingRows rows = full_rows();
  blocks.describe(rows);
  rows.packed = packed() - live_rows(blocks.elsewhere());
  return rows;
}

GrowingRows KvBuffer::placed() const {
  assert(owns_blocks());
  GrowingRows rows = full_rows();
  if (layout().packing == nullptr) return rows;
  blocks.describe(rows);
  rows.most_blocks = blocks.memory().most();
  rows.blocks = blocks.memory().taken();
  rows.packed = rows.blocks * rows.block_rows;
  if (blocks.fills_newest()) {
    rows.filling = blocks.memory().places().back().slot;
    rows.filled = blocks.all().back().rows;
  }
  return rows;
}

int KvBuffer::places() const noexcept {
  if (layout().once) return all_rows(blocks.all());
  return blocks.memory().most() * layout().block_rows() + ring.places();
}

void KvBuffer::number_places(std::span<const int> numbers, bool stays,
                             std::vector<int>& came) const {
  const bool listed = layout().once || stays;
  const int block_rows = layout().block_rows();
  const int before_ring = listed ? all_rows(blocks.all()) : blocks.memory().most() * block_rows;
  const size_t before = came.size();
  const int all = before_ring + (layout().once ? 0 : ring.places());
  came.resize(before + static_cast<size_t>(all), WeighedRows::kNoRow);
  const std::span<int> of_places = std::span(came).subspan(before);
  int slot = 0;
  const auto number = [&](int place) {
    const int of_slot = numbers.empty() ? slot : numbers[static_cast<size_t>(slot)];
    of_places[static_cast<size_t>(place)] = of_slot;
    ++slot;
  };
  int begin = 0;  // of the block, if blocks have any size
  for (size_t b = 0; b < blocks.all().size(); ++b) {
    const PackedBlock& block = blocks.all()[b];
    const int first = listed ? begin : blocks.memory().places()[b].slot * block_rows;
    for (int row = 0; row < block.rows; ++row) {
      if (block.live == nullptr || (block.live[row / 64] >> (row % 64) & 1) != 0) {
        number(first + row);
      }
    }
    begin += block.rows;
  }
  for (int i = 0; i < full(); ++i) number(before_ring + ring.place_of(i));
}

void KvBuffer::take_placed(const PlacedRows::Side& rows) {
  blocks.take(rows);
  ring.take(rows.first, rows.full);
}

}  // namespace kvlm
