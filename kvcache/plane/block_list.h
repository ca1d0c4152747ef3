#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/decode_table.h"
#include "kernels/pack.h"
#include "kernels/row_moves.h"
#include "kvcache/plane/block_memory.h"
#include "kvcache/plane/run_list.h"

namespace kvlm {

/// The packed blocks of a plane, oldest rows first. Slots are counted over live rows.
class BlockList {
 public:
  /// Starts empty. `owner` holds the codes if the layout is shared.
  void place(const PlaneLayout& layout, const PlaneCapacity& capacity, std::byte* memory,
             const BlockList* owner);
  void reset() noexcept;

  const BlockMemory& memory() const noexcept { return memory_; }
  int slots() const noexcept { return slots_; }  ///< live rows
  size_t bytes() const noexcept { return bytes_; }
  std::span<const PackedBlock> all() const noexcept { return blocks_; }
  /// Blocks in another plane's memory, the oldest.
  std::span<const PackedBlock> elsewhere() const noexcept {
    return all().first(static_cast<size_t>(memory_.first_own()));
  }
  /// Blocks follow each other without gaps, and no row of them was evicted.
  bool is_even() const noexcept { return even_; }
  /// The newest block takes the next packed row.
  bool fills_newest() const noexcept;

  /// Room for `rows` more rows, as one job or (kToken) up to the end of the last block: returns a
  /// job without x, of at most `rows` rows.
  PackJob push(int rows) noexcept;
  /// Forgets all rows.
  void clear() noexcept;
  /// A live slot dies. A block that has only dead rows is free again; one that was packed once
  /// stays on the list, without bytes.
  void evict(int slot) noexcept;

  /// What fork() needs, for `more` rows yet to be packed and a ring of `ring_rows`.
  ///   share  packed blocks are never written again: else they are copied
  PlaneCapacity forked_capacity(const PlaneLayout& layout, bool share, int64_t more,
                                int64_t ring_rows) const noexcept;
  /// Plane::fork() of the blocks.
  void fork(BlockList& parent, bool share, std::vector<ByteRange>& copies);

  /// Says where rows and blocks lie, but for how many are packed.
  void describe(GrowingRows& rows) const noexcept;
  /// Becomes the blocks that a GPU has made of those that it was told of.
  void take(const PlacedRows::Side& rows);
  /// Rows whose places, (all_rows(),), have no number have gone.
  void keep(std::span<const int> came);

  /// Appends their run, if there are any; and that of elsewhere() alone.
  void add_to(RunList& runs) const noexcept;
  void add_elsewhere(RunList& runs) const noexcept;
  /// Brings the blocks that push() and add_to() need into the processor's cache.
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
  bool even_ = true;  // blocks lie evenly, at the strides that follow
  size_t bytes_ = 0;
  std::vector<PackedBlock> blocks_;
  std::ptrdiff_t code_stride_ = 0;
  std::ptrdiff_t scale_stride_ = 0;
  BlockMemory memory_;
  const BlockList* owner_ = nullptr;
};

/// Whether blocks lie evenly, as SlotRun says.
bool lie_evenly(std::span<const PackedBlock> blocks) noexcept;

/// Rows of blocks, there or not, and those that are there.
int all_rows(std::span<const PackedBlock> blocks) noexcept;
int live_rows(std::span<const PackedBlock> blocks) noexcept;

}  // namespace kvlm
