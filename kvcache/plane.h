#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/decode_table.h"
#include "kernels/pack.h"
#include "kernels/row_moves.h"
#include "kvcache/quantizer.h"

namespace kvlm {

/// Memory that a plane needs at most. A fork's blocks and packed_rows count those that it shares,
/// which take none of its bytes.
struct PlaneCapacity {
  int64_t blocks = 0;       ///< packed blocks of block_rows rows
  int64_t packed_rows = 0;  ///< rows ever packed
  size_t packed_bytes = 0;  ///< of all of them
  int64_t ring_rows = 0;    ///< full-precision rows
  size_t ring_bytes = 0;    ///< of all of them
  size_t bytes() const noexcept { return packed_bytes + ring_bytes; }
};

/// The runs of a KV head, appended to memory that has room for them.
class RunList {
 public:
  explicit RunList(SlotRun* memory) : begin_(memory) {}
  int size() const noexcept { return size_; }
  SlotRun& operator[](int i) noexcept { return begin_[i]; }
  SlotRun& add() noexcept { return *std::construct_at(begin_ + size_++); }
  void insert(int at, const SlotRun& run) noexcept {
    for (int i = size_++; i > at; --i) begin_[i] = begin_[i - 1];
    begin_[at] = run;
  }
  std::span<const SlotRun> from(int first) const noexcept {
    return {begin_ + first, static_cast<size_t>(size_ - first)};
  }

 private:
  SlotRun* begin_;
  int size_ = 0;
};

/// The keys or the values of one kv_head of one layer of one sequence (of one set of slots, if the
/// spec treats visual and text slots apart): packed blocks of its oldest rows, then a ring of its
/// newest rows in full precision. Slots are counted over live rows, oldest first. Everything it
/// stores lies in memory that it is given; bookkeeping is reserved by place(), so that nothing
/// allocates afterwards.
class alignas(64) Plane {
 public:
  /// What rows are and how they are packed; the same for all planes of a layer and side.
  struct Layout {
    const Packing* packing = nullptr;  ///< null: rows are never packed
    int head_dim = 0;
    DType dtype = DType::kF16;  ///< of full rows
    bool once = false;          ///< never grows: packed once, a prompt at a time, in blocks of any
                                ///< size, or full rows of what another store packs once
    bool shared = false;        ///< codes lie in another plane's memory; only scales are stored
    bool writes = true;         ///< codes are made from its rows
    bool evicts = true;         ///< slots may be dropped

    /// Rows of a full block; blocks of once-packed planes have no such size.
    int block_rows() const noexcept;
    size_t row_bytes() const noexcept { return static_cast<size_t>(head_dim) * dtype_bytes(dtype); }
    /// Bytes set aside for a block of `rows` rows.
    size_t block_bytes(int rows) const noexcept;
    /// Bytes in use by `rows` packed rows of one block.
    size_t packed_bytes(int rows) const noexcept;
  };

  /// Enough for `planes` planes that hold `packed_rows` rows ever packed between them, in `spans`
  /// blocks each if packed once, and `full_rows` unpacked at a time.
  static PlaneCapacity capacity(const Layout& layout, int64_t planes, int64_t packed_rows,
                                int64_t spans, int64_t full_rows) noexcept;

  /// Starts empty, in memory of `capacity` for its blocks, `packed`, and its `ring`. `owner` holds
  /// the codes if the layout is shared.
  void place(const Layout& layout, const PlaneCapacity& capacity, std::byte* packed,
             std::byte* ring, const Plane* owner);
  /// Forgets everything; place() may follow.
  void reset() noexcept;

  /// What fork() needs of this plane, for `more` rows yet to be packed and a ring of `ring_rows`.
  ///   share  packed blocks are never written again: else they are copied
  PlaneCapacity forked_capacity(const Layout& layout, bool share, int64_t more,
                                int64_t ring_rows) const noexcept;
  /// Starts as what `parent` holds; place() with its forked_capacity() has been. Blocks that are
  /// shared count in the bytes() of neither from now on, and their memory must outlive both; a
  /// block that is still being filled is copied.
  ///   places  full rows that are copied, at least those that `parent` counts
  ///   copies  returned, appended: what else is to be copied before anybody reads or writes
  void fork(Plane& parent, bool share, int places, std::vector<ByteRange>& copies);
  /// Blocks of its own follow blocks of another plane.
  bool goes_on_elsewhere() const noexcept { return first_own_ > 0; }

  int slots() const noexcept { return packed_ + full_; }
  int packed() const noexcept { return packed_; }  ///< live packed slots
  int full() const noexcept { return full_; }
  size_t bytes() const noexcept { return bytes_; }
  std::span<const PackedBlock> blocks() const noexcept { return blocks_; }
  /// Full rows that lie side by side from full_row(0); the others do so from the ring's begin.
  int full_before_wrap() const noexcept { return std::min(full_, ring_rows_ - ring_first_); }
  const Layout& layout() const noexcept { return layout_; }

  /// Blocks follow each other without gaps, and no row of them was evicted.
  bool is_even() const noexcept { return even_; }
  /// Some packed row was evicted whose block is still on the list.
  bool has_lost_rows() const noexcept {
    return std::any_of(blocks_.begin(), blocks_.end(),
                       [](const PackedBlock& block) { return block.live != nullptr; });
  }
  /// Room for one more full row, the newest; the caller fills it.
  std::byte* push_row() noexcept;
  /// The same for `rows` more, which lie side by side: the ring has not wrapped yet.
  std::byte* push_rows(int rows) noexcept;
  /// The rows it gains, as a GPU counts them, behind those of add_shared(): nothing that lies in
  /// its own memory was evicted.
  GrowingRows growing() const noexcept;
  /// The same of its full rows alone, which a GPU is not to pack.
  GrowingRows full_rows() const noexcept;
  /// Its blocks are its alone, but for codes of a plane that drops the same rows, so that a GPU may
  /// drop their rows and put others in their places.
  bool owns_blocks() const noexcept;
  /// A fork reads some of its blocks, or it reads another's.
  bool shares_blocks() const noexcept;
  /// The same as growing() of a plane that owns its blocks and may have lost rows.
  GrowingRows placed() const;
  /// Places that its rows may have, as WeighedRows says: if packed once, those of the rows of its
  /// blocks, there or not.
  int places() const noexcept;
  /// The same of a plane whose packed rows stay where they are, those of the rows of its blocks,
  /// there or not, in front of those of its ring.
  int packed_places() const noexcept;
  /// Appends which slot lies in each.
  ///   numbers  (slots,) the numbers of the slots; empty: 0, 1, 2, ...
  ///   stays    packed rows stay where they are (packed_places())
  void number_places(std::span<const int> numbers, bool stays, std::vector<int>& came) const;
  /// Becomes what a GPU has made of placed(): its slots are those of `rows` in the order of their
  /// numbers.
  void take_placed(const PlacedRows::Side& rows);
  /// Rows whose places, (packed_places(),), have no number have gone.
  void keep_placed(std::span<const int> came);
  /// The same of a plane whose packed rows stay; `came` is of its ring, too, if it has one.
  void take_ring(const PlacedRows::Side& rows) noexcept;
  /// Counts `rows` more rows, each stored behind the newest, and packed rows of `window` whenever
  /// they filled it; null: none were.
  void gain(int rows, const FlushRule* window) noexcept;
  /// The first place of its ring.
  std::byte* ring() const noexcept { return ring_; }
  /// Full row i, 0 the oldest.
  const std::byte* full_row(int i) const noexcept;
  std::byte* full_row(int i) noexcept;
  /// Forgets the oldest full rows, which were packed.
  void pop_rows(int rows) noexcept;

  /// Room for `rows` more packed rows, the newest packed, as one job or (kToken) up to the end of
  /// the last block: returns a job without x, of at most `rows` rows.
  PackJob push_packed(int rows) noexcept;
  /// Forgets all packed rows.
  void clear_packed() noexcept;

  /// Drops a live slot: a packed row dies, and a block that has only dead rows is free again (one
  /// that was packed once stays on the list, without bytes); a full row leaves a gap, which the
  /// caller closes before anything reads these rows. No gap: ring is null.
  [[nodiscard]] RowGap evict(int slot) noexcept;

  /// Brings what decode reads of this plane into the processor's cache, and then its blocks: what
  /// thousands of KV heads say of themselves lies all over memory.
  void prefetch() const noexcept {
    __builtin_prefetch(this, 1);
    __builtin_prefetch(&blocks_, 1);
  }
  void prefetch_blocks() const noexcept {
    if (!blocks_.empty()) {
      __builtin_prefetch(blocks_.data());
      __builtin_prefetch(&blocks_.back(), 1);
    }
  }
  /// The same of what push_packed() needs.
  void prefetch_newest_block() const noexcept {
    if (!blocks_.empty()) {
      __builtin_prefetch(&blocks_.back(), 1);
      __builtin_prefetch(&places_.back());
    }
  }

  /// Appends the runs of this plane, oldest slots first, to `runs`: of its packed rows (one at
  /// most), then of full rows (two at most).
  void add_packed(RunList& runs) const noexcept;
  void add_full(RunList& runs) const noexcept;
  /// Of its packed rows those in another plane's memory, in front of its own.
  void add_shared(RunList& runs) const noexcept;
  /// Their blocks lie evenly (SlotRun).
  bool shares_evenly() const noexcept;

 private:
  /// Where a block lies.
  struct Place {
    std::byte* codes = nullptr;  ///< the block's memory; its scales follow its codes
    std::byte* scales = nullptr;
    int slot = -1;             ///< in units of a full block; -1 if blocks have any size
    bool shared = false;       ///< other planes may read it: it is neither counted nor freed here
    uint64_t* live = nullptr;  ///< the block's bitmap, once it has dead rows
  };

  size_t ring_offset(int i) const noexcept;
  /// Its blocks in another plane's memory, the oldest.
  std::span<const PackedBlock> blocks_elsewhere() const noexcept {
    return std::span(blocks_).first(static_cast<size_t>(first_own_));
  }
  /// Where its rows and blocks lie, but for how many are packed.
  GrowingRows memory() const noexcept;
  void take_placed_block(int place, int rows, std::span<const int> came);
  void forget_dead_blocks();
  /// The newest block takes the next packed row.
  bool fills_newest() const noexcept;
  /// Blocks that fork() shares, the oldest.
  size_t shared_blocks(bool share) const noexcept {
    return share ? blocks_.size() - (fills_newest() ? 1 : 0) : 0;
  }
  void take_block(Plane& parent, size_t b, bool share, std::vector<ByteRange>& copies);
  void copy_ring(const Plane& parent, int places, std::vector<ByteRange>& copies);
  /// The bitmap of a block of `rows` rows, which has none yet: all zero.
  uint64_t* new_bitmap(const Place& place, int rows) noexcept;
  /// Bytes from a full block's begin to the next one's, where blocks follow each other.
  std::ptrdiff_t block_stride() const noexcept {
    return static_cast<std::ptrdiff_t>(layout_.block_bytes(layout_.block_rows()));
  }
  /// Whether blocks_ still lie evenly (SlotRun), after one was added that gets `rows` rows at
  /// first.
  bool lies_evenly(int rows) noexcept;
  Place new_place(int rows) noexcept;

  // In three lines of the processor's cache: those that most steps need, those about blocks, and
  // the rest.
  Layout layout_;
  std::byte* ring_ = nullptr;
  int ring_rows_ = 0;
  int ring_first_ = 0;
  int full_ = 0;
  int packed_ = 0;
  size_t bytes_ = 0;
  size_t bump_ = 0;     // bytes of packed_memory_ taken, if packed once
  int live_words_ = 0;  // per block
  bool even_ = true;    // blocks lie evenly, at the strides that follow

  std::vector<PackedBlock> blocks_;
  std::vector<Place> places_;  // of each block
  std::ptrdiff_t code_stride_ = 0;
  std::ptrdiff_t scale_stride_ = 0;

  int most_blocks_ = 0;          // for which there is room; a copy's vectors have less
  int next_slot_ = 0;            // those before it have had a block
  int first_own_ = 0;            // slots before it are of shared blocks, whose memory is elsewhere
  std::vector<int> free_slots_;  // stack, of those that were evicted
  std::vector<uint64_t> live_;   // words of all slots, made live on the first eviction
  std::byte* packed_memory_ = nullptr;
  const Plane* owner_ = nullptr;
};

}  // namespace kvlm
