// Changes of a buffer's packed blocks: packing, eviction, forks, and updates from a GPU that
// changed them.
#include "kvcache/buffer/block_list.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <numeric>
#include <utility>

namespace kvlm {

namespace {

bool is_there(int number) noexcept { return number != WeighedRows::kNoRow; }

/// Clears the bit of the `slot`-th remaining token.
void kill(uint64_t* live, int slot) noexcept {
  for (;; ++live) {
    const int here = std::popcount(*live);
    if (slot < here) break;
    slot -= here;
  }
  uint64_t bits = *live;
  for (; slot > 0; --slot) bits &= bits - 1;
  *live &= ~(bits & (~bits + 1));
}

/// The job that packs up to `rows` tokens after those of a block of `full_block` tokens. Sets their
/// bits if the block has a bitmap.
PackJob job_behind(const PackedBlock& block, const BlockPlace& place, const BufferLayout& layout,
                   int full_block, int rows) noexcept {
  const PackedFormat& format = layout.packing->format;
  const auto before = static_cast<size_t>(block.rows);
  const size_t scales_before =
      layout.by_token() ? before * static_cast<size_t>(format.groups()) * dtype_bytes(format.meta)
                        : 0;
  PackJob job;
  job.rows = std::min(rows, full_block - block.rows);
  // If another layer writes the shared codes, this buffer must not overwrite them.
  if (layout.writes) job.codes = const_cast<std::byte*>(block.codes) + before * format.row_bytes();
  job.scales = place.scales + scales_before;
  std::byte* zeros = layout.zeros_behind(place.scales, full_block);
  if (zeros != nullptr) job.zeros = zeros + scales_before;
  for (int row = block.rows; place.live != nullptr && row < block.rows + job.rows; ++row) {
    place.live[row / 64] |= uint64_t{1} << (row % 64);
  }
  return job;
}

}  // namespace

void BlockList::place(const BufferLayout& layout, const BufferCapacity& capacity, std::byte* memory,
                      const BlockList* owner) {
  assert(layout.shared == (owner != nullptr));
  reset();
  owner_ = owner;
  memory_.place(layout, capacity, memory);
  blocks_.reserve(static_cast<size_t>(capacity.blocks));
}

void BlockList::reset() noexcept {
  owner_ = nullptr;
  slots_ = 0;
  bytes_ = 0;
  even_ = true;
  blocks_.clear();
  memory_.reset();
}

bool BlockList::fills_newest() const noexcept {
  const BufferLayout& layout = memory_.layout();
  return layout.packing != nullptr && layout.by_token() && !layout.once && !blocks_.empty() &&
         blocks_.back().rows < layout.block_rows();
}

/// The blocks still have one stride (SlotSegment), after a block with `rows` tokens was added.
bool BlockList::lies_evenly(int rows) noexcept {
  const size_t n = blocks_.size();
  if (n < 2) return true;
  if (rows > blocks_[0].rows) return false;
  const std::ptrdiff_t codes = blocks_[n - 1].codes - blocks_[n - 2].codes;
  const std::ptrdiff_t scales = blocks_[n - 1].scales - blocks_[n - 2].scales;
  if (n == 2) {
    // The first own block after a shared one may be at any distance, which is not a stride.
    const BlockList& holder = memory_.layout().shared ? *owner_ : *this;
    if (memory_.first_own() > 0 &&
        (scales != memory_.stride() || codes != holder.memory_.stride())) {
      return false;
    }
    code_stride_ = codes;
    scale_stride_ = scales;
  }
  return blocks_[n - 2].rows == blocks_[0].rows && codes == code_stride_ && scales == scale_stride_;
}

/// Appends an empty block for `rows` tokens.
void BlockList::add(const BlockPlace& place, const std::byte* codes, int rows) {
  PackedBlock block;
  block.codes = codes;
  block.scales = place.scales;
  block.zeros = memory_.layout().zeros_behind(place.scales, rows);
  blocks_.push_back(block);
  memory_.add(place);
}

PackJob BlockList::push(int rows) noexcept {
  const BufferLayout& layout = memory_.layout();
  assert(layout.packing != nullptr && rows > 0);
  const int full_block = layout.once ? rows : layout.block_rows();
  if (!fills_newest()) {
    const BlockPlace place = memory_.take(full_block);
    add(place, layout.shared ? owner_->blocks_[blocks_.size()].codes : place.codes, full_block);
    even_ = even_ && !layout.once && lies_evenly(std::min(rows, full_block));
  }
  PackedBlock& block = blocks_.back();
  const PackJob job =
      job_behind(block, memory_.place(blocks_.size() - 1), layout, full_block, rows);
  if (block.rows > 0) bytes_ -= layout.packed_bytes(block.rows);
  block.rows += job.rows;
  block.live_rows += job.rows;
  slots_ += job.rows;
  bytes_ += layout.packed_bytes(block.rows);
  return job;
}

void BlockList::clear() noexcept {
  assert(memory_.first_own() == 0 && !memory_.layout().once);
  memory_.clear(0);
  blocks_.clear();
  slots_ = 0;
  bytes_ = 0;
  even_ = true;
}

void BlockList::evict(int slot) noexcept {
  even_ = false;
  size_t b = 0;
  for (; slot >= blocks_[b].live_rows; ++b) slot -= blocks_[b].live_rows;
  PackedBlock& block = blocks_[b];
  BlockPlace& place = memory_.place(b);
  --slots_;
  if (--block.live_rows == 0) {
    if (!place.shared) {
      bytes_ -= memory_.layout().packed_bytes(block.rows);
      memory_.free(place.slot);
    }
    if (!memory_.layout().once) return erase(b);
  }
  if (place.live == nullptr) {
    block.live = place.live = memory_.bitmap(place, block.rows, /*live=*/true);
  }
  kill(place.live, slot);
}

void BlockList::erase(size_t b) {
  blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(b));
  memory_.erase(b);
}

BufferCapacity BlockList::forked_capacity(const BufferLayout& layout, bool share, int64_t more,
                                          int64_t ring_rows) const noexcept {
  const auto copied = share ? int64_t{fills_newest()} : static_cast<int64_t>(blocks_.size());
  const int64_t packed = layout.once ? 0 : copied * layout.block_rows() + more;
  BufferCapacity capacity = layout.capacity(1, packed, 1, ring_rows);
  capacity.blocks += static_cast<int64_t>(blocks_.size());
  capacity.packed_rows += all_rows(blocks_);
  return capacity;
}

void BlockList::fork(BlockList& parent, bool share, std::vector<ByteRange>& copies) {
  even_ = parent.even_;
  const size_t shared = share ? parent.blocks_.size() - (parent.fills_newest() ? 1 : 0) : 0;
  for (size_t b = 0; b < parent.blocks_.size(); ++b) add_copy(parent, b, b < shared, copies);
  slots_ = parent.slots_;
}

/// Appends block `b` of another list.
void BlockList::add_copy(BlockList& parent, size_t b, bool share, std::vector<ByteRange>& copies) {
  const int full_block = memory_.layout().block_rows();
  const PackedBlock& theirs = parent.blocks_[b];
  BlockPlace& from = parent.memory_.place(b);
  const size_t bytes = theirs.live_rows == 0 ? 0 : memory_.layout().packed_bytes(theirs.rows);
  if (share) {
    if (!from.shared) parent.bytes_ -= bytes;
    from.shared = true;
    blocks_.push_back(theirs);
    memory_.add(memory_.take_elsewhere(from));
  } else {
    const BlockPlace place = memory_.take(full_block);
    copies.push_back({from.codes, place.codes, memory_.layout().block_bytes(full_block)});
    add(place, place.codes, full_block);
    blocks_.back().rows = theirs.rows;
    blocks_.back().live_rows = theirs.live_rows;
    bytes_ += bytes;
  }
  PackedBlock& block = blocks_.back();
  if (memory_.layout().shared) block.codes = owner_->blocks_[b].codes;
  if (from.live != nullptr) {
    uint64_t* live = memory_.bitmap(memory_.place(b), block.rows, /*live=*/false);
    std::copy_n(from.live, static_cast<size_t>(block.rows + 63) / 64, live);
    block.live = memory_.place(b).live = live;
  }
  even_ = even_ && lies_evenly(block.rows);
}

void BlockList::describe(GrowingRows& rows) const noexcept {
  const BufferLayout& layout = memory_.layout();
  if (layout.packing == nullptr) return;
  const BlockMemory& codes = layout.shared ? owner_->memory_ : memory_;
  const BlockPlace first = memory_.at(memory_.first_own());
  rows.block_rows = layout.block_rows();
  rows.codes = codes.at(codes.first_own()).codes;
  rows.code_stride = static_cast<int>(codes.stride());
  rows.scales = first.scales;
  rows.scale_stride = static_cast<int>(memory_.stride());
  rows.zeros = layout.zeros_behind(first.scales, rows.block_rows);
  rows.shares_codes = !layout.writes;
  rows.owns_codes = !layout.shared;
}

void BlockList::take(const PlacedRows::Side& rows) {
  const int block_rows = std::max(memory_.layout().block_rows(), 1);
  const auto of_block = [&](int block, int held) {
    return std::span(rows.came).subspan(static_cast<size_t>(block * block_rows),
                                        static_cast<size_t>(held));
  };
  std::vector<std::pair<int, int>> order;  // (arrival number, block)
  clear();
  memory_.clear(rows.blocks);
  for (int block = 0; block < rows.blocks; ++block) {
    const auto came = of_block(block, block_rows);
    const int first = *std::min_element(came.begin(), came.end());
    if (is_there(first)) {
      order.emplace_back(first, block);
    } else {
      memory_.free(block);
    }
  }
  std::sort(order.begin(), order.end());
  for (const auto& [first, block] : order) {
    const int held = block == rows.filling ? rows.filled : block_rows;
    const BlockPlace place = memory_.at(block);
    add(place, memory_.layout().shared ? owner_->memory_.at(block).codes : place.codes, block_rows);
    blocks_.back().rows = blocks_.back().live_rows = held;
    slots_ += held;
    bytes_ += memory_.layout().packed_bytes(held);
    keep_rows(blocks_.size() - 1, of_block(block, held));
    even_ = even_ && block == static_cast<int>(blocks_.size()) - 1 && lies_evenly(held);
  }
  even_ = even_ && !memory_.has_free();  // otherwise the next block fills a gap
}

void BlockList::keep(std::span<const int> came) {
  assert(came.size() == static_cast<size_t>(all_rows(blocks_)));
  // new bitmaps: a copied list still refers to those of the original
  if (memory_.layout().once) {
    memory_.forget_bitmaps(static_cast<int>(blocks_.size()), static_cast<int>(came.size()));
  }
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const auto rows = static_cast<size_t>(blocks_[b].rows);
    keep_rows(b, came.first(rows));
    came = came.subspan(rows);
  }
  for (size_t b = blocks_.size(); b-- > 0 && !memory_.layout().once;) {
    if (blocks_[b].live_rows > 0) continue;
    memory_.free(memory_.place(b).slot);
    erase(b);
  }
}

/// Evicts the tokens of block `b` that have no arrival number in `came`, (rows of the block,).
void BlockList::keep_rows(size_t b, std::span<const int> came) {
  PackedBlock& block = blocks_[b];
  const auto live = static_cast<int>(std::count_if(came.begin(), came.end(), is_there));
  slots_ -= block.live_rows - live;
  if (live == 0 && block.live_rows > 0) bytes_ -= memory_.layout().packed_bytes(block.rows);
  block.live_rows = live;
  BlockPlace& place = memory_.place(b);
  block.live = place.live = nullptr;
  if (live == block.rows) return;
  even_ = false;
  uint64_t* bitmap = memory_.bitmap(place, block.rows, /*live=*/false);
  for (size_t row = 0; row < came.size(); ++row) {
    bitmap[row / 64] |= uint64_t{is_there(came[row])} << (row % 64);
  }
  block.live = place.live = bitmap;
}

void BlockList::add_to(SegmentList& segments) const noexcept {
  if (slots_ == 0) return;
  SlotSegment& segment = segments.add();
  segment.slots = slots_;
  segment.format = &memory_.layout().packing->format;
  segment.blocks = blocks_;
  if (even_ && blocks_.size() > 1) {
    segment.code_stride = code_stride_;
    segment.scale_stride = scale_stride_;
  }
}

void BlockList::add_elsewhere(SegmentList& segments) const noexcept {
  const std::span<const PackedBlock> blocks = elsewhere();
  if (blocks.empty()) return;
  SlotSegment& segment = segments.add();
  segment.slots = live_rows(blocks);
  segment.format = &memory_.layout().packing->format;
  segment.blocks = blocks;
  if (blocks.size() < 2 || !lie_evenly(blocks)) return;
  segment.code_stride = blocks[1].codes - blocks[0].codes;
  segment.scale_stride = blocks[1].scales - blocks[0].scales;
}

bool lie_evenly(std::span<const PackedBlock> blocks) noexcept {
  if (blocks.size() < 2) return true;
  for (size_t b = 1; b < blocks.size(); ++b) {
    const bool follows =
        blocks[b].codes - blocks[b - 1].codes == blocks[1].codes - blocks[0].codes &&
        blocks[b].scales - blocks[b - 1].scales == blocks[1].scales - blocks[0].scales;
    if (!follows || blocks[b - 1].rows != blocks[0].rows || blocks[b].live != nullptr) return false;
  }
  return blocks[0].live == nullptr && blocks.back().rows <= blocks[0].rows;
}

int all_rows(std::span<const PackedBlock> blocks) noexcept {
  return std::accumulate(blocks.begin(), blocks.end(), 0,
                         [](int rows, const PackedBlock& block) { return rows + block.rows; });
}

int live_rows(std::span<const PackedBlock> blocks) noexcept {
  return std::accumulate(blocks.begin(), blocks.end(), 0,
                         [](int rows, const PackedBlock& block) { return rows + block.live_rows; });
}

}  // namespace kvlm
