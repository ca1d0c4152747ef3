#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/decode_table.h"
#include "kernels/row_moves.h"
#include "kvcache/plane/block_list.h"
#include "kvcache/plane/layout.h"
#include "kvcache/plane/row_ring.h"

namespace kvlm {

/// The keys or the values of one kv_head of one layer of one sequence (of one set of slots, if the
/// spec treats visual and text slots apart): packed blocks of its oldest rows, then a ring of its
/// newest rows in full precision. Slots are counted over live rows, oldest first. Everything it
/// stores lies in memory that it is given; bookkeeping is reserved by place(), so that nothing
/// allocates afterwards.
struct alignas(64) Plane {
  // Two lines of the processor's cache have what most steps need: the ring, the list of blocks, how
  // they lie.
  RowRing ring;
  BlockList blocks;

  /// Starts empty, in memory of `capacity` for its blocks, `packed`, and its ring, `full`. `owner`
  /// holds the codes if the layout is shared.
  void place(const PlaneLayout& layout, const PlaneCapacity& capacity, std::byte* packed,
             std::byte* full, const Plane* owner);
  /// Forgets everything; place() may follow.
  void reset() noexcept;

  const PlaneLayout& layout() const noexcept { return blocks.memory().layout(); }
  int packed() const noexcept { return blocks.slots(); }  ///< live packed slots
  int full() const noexcept { return ring.size(); }
  int slots() const noexcept { return packed() + full(); }
  size_t bytes() const noexcept { return blocks.bytes() + ring.bytes(); }

  /// Starts as what `parent` holds; place() with BlockList::forked_capacity() has been. Blocks that
  /// are shared count in the bytes() of neither from now on, and their memory must outlive both; a
  /// block that is still being filled is copied.
  ///   share   packed blocks are never written again: else they are copied
  ///   places  full rows that are copied, at least those that `parent` counts
  ///   copies  returned, appended: what else is to be copied before anybody reads or writes
  void fork(Plane& parent, bool share, int places, std::vector<ByteRange>& copies);

  /// Counts `rows` more rows, each stored behind the newest, and packed rows of `window` whenever
  /// they filled it; null: none were.
  void gain(int rows, const FlushRule* window) noexcept;
  /// Drops a live slot: a packed row dies, a full row leaves a gap, which the caller closes before
  /// anything reads these rows. No gap: ring is null.
  [[nodiscard]] RowGap evict(int slot) noexcept;

  /// Brings what decode reads of it into the processor's cache, and then blocks.prefetch() what it
  /// points to: what thousands of KV heads say of themselves lies all over memory.
  void prefetch() const noexcept {
    __builtin_prefetch(this, 1);
    __builtin_prefetch(reinterpret_cast<const std::byte*>(this) + 64, 1);
  }

  /// Its full rows, as a GPU that is not to pack them counts them.
  GrowingRows full_rows() const noexcept;
  /// The same of all rows behind BlockList::elsewhere(): nothing that lies in its own memory was
  /// evicted.
  GrowingRows growing() const noexcept;
  /// Its blocks are its alone, but for codes of a plane that drops the same rows, so that a GPU may
  /// drop their rows and put others in their places.
  bool owns_blocks() const noexcept { return !layout().once && !blocks.memory().is_shared(); }
  /// The same as growing() of a plane that owns its blocks and may have lost rows.
  GrowingRows placed() const;
  /// Places that its rows may have, as WeighedRows says: if packed once, those of the rows of its
  /// blocks, there or not.
  int places() const noexcept;
  /// Appends which slot lies in each.
  ///   numbers  (slots,) the numbers of the slots; empty: 0, 1, 2, ...
  ///   stays    packed rows stay where they are, and have the places of the rows of their blocks
  void number_places(std::span<const int> numbers, bool stays, std::vector<int>& came) const;
  /// Becomes what a GPU has made of placed(): its slots are those of `rows` in the order of their
  /// numbers.
  void take_placed(const PlacedRows::Side& rows);
};

}  // namespace kvlm
