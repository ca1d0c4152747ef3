#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/decode_table.h"
#include "kernels/row_moves.h"
#include "kvcache/buffer/block_list.h"
#include "kvcache/buffer/layout.h"
#include "kvcache/buffer/row_ring.h"

namespace kvlm {

/// The K or V cache of one KV head, layer and sequence (visual and other tokens may have one each):
/// packed blocks of the oldest tokens, then a ring of unpacked ones. Slots count only tokens that
/// were not evicted, oldest first. Data is in memory passed to place(), which also reserves the
/// bookkeeping, so later calls allocate nothing.
struct alignas(64) KvBuffer {
  // Two cache lines have what most steps read: ring, block list, strides.
  RowRing ring;
  BlockList blocks;

  /// Starts empty. `packed` is memory for blocks and `full` for the ring, both of `capacity`.
  /// `owner` has the codes if the layout is shared.
  void place(const BufferLayout& layout, const BufferCapacity& capacity, std::byte* packed,
             std::byte* full, const KvBuffer* owner);
  /// Resets the buffer; place() may follow.
  void reset() noexcept;

  const BufferLayout& layout() const noexcept { return blocks.memory().layout(); }
  int packed() const noexcept { return blocks.slots(); }  ///< packed tokens that were not evicted
  int full() const noexcept { return ring.size(); }
  int slots() const noexcept { return packed() + full(); }
  size_t bytes() const noexcept { return blocks.bytes() + ring.bytes(); }

  /// Starts as a copy of `parent`, after place() with BlockList::forked_capacity(). Shared blocks
  /// no longer count in the bytes() of either, and their memory must outlive both. A block that is
  /// still being filled is copied.
  ///   share   packed blocks never change, so they are shared instead of copied
  ///   places  ring entries to copy, at least parent.full()
  ///   copies  output, appended: copies that the caller must make before any access
  void fork(KvBuffer& parent, bool share, int places, std::vector<ByteRange>& copies);

  /// Counts `rows` new tokens, and the packing by `window` whenever they filled it; null: no
  /// packing.
  void gain(int rows, const FlushRule* window) noexcept;
  /// Evicts a slot. A packed token is marked in a bitmap. An unpacked one leaves a gap, which the
  /// caller closes before any access; without a gap, `ring` is null.
  [[nodiscard]] RowGap evict(int slot) noexcept;

  /// Prefetches this buffer. blocks.prefetch() then prefetches what it points to, since thousands
  /// of KV heads are scattered over memory.
  void prefetch() const noexcept {
    __builtin_prefetch(this, 1);
    __builtin_prefetch(reinterpret_cast<const std::byte*>(this) + 64, 1);
  }

  /// State of the ring, for a GPU that does not pack it.
  GrowingRows full_rows() const noexcept;
  /// State of all tokens after BlockList::elsewhere(). No packed token in own memory was evicted.
  GrowingRows growing() const noexcept;
  /// Blocks are not shared, except for codes of a layer that evicts the same tokens. So a GPU may
  /// evict from them and reuse their memory.
  bool owns_blocks() const noexcept { return !layout().once && !blocks.memory().is_shared(); }
  /// As growing(), for a buffer that owns its blocks and may have lost tokens.
  GrowingRows placed() const;
  /// Places (WeighedRows) for its tokens, occupied or empty. If packed once: the tokens of its
  /// blocks, evicted ones included.
  int places() const noexcept;
  /// Appends the arrival number of each place.
  ///   numbers  (slots,) arrival numbers of the slots; empty: 0, 1, 2, ...
  ///   stays    blocks are fixed segments: a place for each of their tokens, by list order
  void number_places(std::span<const int> numbers, bool stays, std::vector<int>& came) const;
  /// Replaces the state by the GPU's state of placed(). Slots are ordered by arrival number.
  void take_placed(const PlacedRows::Side& rows);
};

}  // namespace kvlm
