#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/decode_table.h"
#include "kernels/pack.h"
#include "kernels/row_moves.h"
#include "kvcache/buffer/block_memory.h"
#include "kvcache/buffer/segment_list.h"

namespace kvlm {

/// The block table of a K or V buffer: its packed blocks, oldest first. Slots count only tokens
/// that were not evicted (live).
class BlockList {
 public:
  /// Starts empty. `owner` has the codes if the layout is shared.
  void place(const BufferLayout& layout, const BufferCapacity& capacity, std::byte* memory,
             const BlockList* owner);
  void reset() noexcept;

  const BlockMemory& memory() const noexcept { return memory_; }
  int slots() const noexcept { return slots_; }  ///< live tokens
  size_t bytes() const noexcept { return bytes_; }
  std::span<const PackedBlock> all() const noexcept { return blocks_; }
  /// Blocks in another buffer's memory. They come first.
  std::span<const PackedBlock> elsewhere() const noexcept {
    return all().first(static_cast<size_t>(memory_.first_own()));
  }
  /// Blocks have one stride, and no token of them was evicted.
  bool is_even() const noexcept { return even_; }
  /// The newest block has space for the next packed token.
  bool fills_newest() const noexcept;

  /// Adds up to `rows` tokens in one block; a block of kToken may be filled in several calls.
  /// Returns the job, without x, that packs them.
  PackJob push(int rows) noexcept;
  /// Removes all blocks.
  void clear() noexcept;
  /// Evicts a live slot. A block without live tokens is freed; if packed once, it stays on the list
  /// and counts no bytes.
  void evict(int slot) noexcept;

  /// Capacity for fork(), if `more` tokens will be packed and the ring has `ring_rows`.
  ///   share  packed blocks never change, so they are shared instead of copied
  BufferCapacity forked_capacity(const BufferLayout& layout, bool share, int64_t more,
                                 int64_t ring_rows) const noexcept;
  /// The block part of KvBuffer::fork().
  void fork(BlockList& parent, bool share, std::vector<ByteRange>& copies);

  /// Fills in addresses and strides of blocks, but not the number of packed tokens.
  void describe(GrowingRows& rows) const noexcept;
  /// Replaces the blocks by the GPU's state of them.
  void take(const PlacedRows::Side& rows);
  /// Evicts tokens without an arrival number in `came`, (all_rows(),).
  void keep(std::span<const int> came);

  /// Appends the segment of all blocks, or of elsewhere(), unless it is empty.
  void add_to(SegmentList& segments) const noexcept;
  void add_elsewhere(SegmentList& segments) const noexcept;
  /// Prefetches what push() and add_to() read and write.
  void prefetch() const noexcept {
    if (blocks_.empty()) return;
    __builtin_prefetch(blocks_.data());
    __builtin_prefetch(&blocks_.back(), 1);
    __builtin_prefetch(&memory_.places().back());
  }

 private:
  bool lies_evenly(int rows) noexcept;
  void add(const BlockPlace& place, const std::byte* codes, int rows);
  void add_copy(BlockList& parent, size_t b, bool share, std::vector<ByteRange>& copies);
  void keep_rows(size_t b, std::span<const int> came);
  void erase(size_t b);

  int slots_ = 0;
  bool even_ = true;  // blocks have one stride and no evicted tokens
  size_t bytes_ = 0;
  std::vector<PackedBlock> blocks_;
  std::ptrdiff_t code_stride_ = 0;
  std::ptrdiff_t scale_stride_ = 0;
  BlockMemory memory_;
  const BlockList* owner_ = nullptr;
};

/// Blocks have one stride, as SlotSegment requires.
bool lie_evenly(std::span<const PackedBlock> blocks) noexcept;

/// Tokens of blocks with and without evicted ones.
int all_rows(std::span<const PackedBlock> blocks) noexcept;
int live_rows(std::span<const PackedBlock> blocks) noexcept;

}  // namespace kvlm
