#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/least_weight.h"
#include "kernels/pack.h"

namespace kvlm {

/// When the oldest full rows of the keys, or of the values, of a layer's KV heads are packed: as
/// soon as `trigger` rows are full, the oldest `rows` of them.
struct RowWindow {
  const PackedFormat* format = nullptr;  ///< null: the table packs no rows
  std::array<PackRule, 2> rules{};
  int trigger = 0;
  int rows = 0;
};

/// Whether a DecodeTable can pack rows as `format` and `rules` say, `rows` at a time: scales of
/// tokens, or ranges of channels between their least and greatest number in blocks that a flush
/// fills.
bool can_pack_windows(const PackedFormat& format, const std::array<PackRule, 2>& rules,
                      int rows) noexcept;

/// Most places of TableShape::drops_packed, and most blocks that a window of such a table fills.
inline constexpr int kMostPlaces = 1 << 14;
inline constexpr int kMostFlushedBlocks = 16;

/// The rows that a KV head gains, of its keys or of its values: packed rows in blocks that follow
/// each other evenly, then full rows in a ring buffer. Without `scales` none are packed, whatever
/// window the layer has: the host does it.
struct GrowingRows {
  std::byte* ring = nullptr;   ///< (ring_rows, head_dim)
  std::byte* codes = nullptr;  ///< of block 0
  std::byte* scales = nullptr;
  std::byte* zeros = nullptr;  ///< null if the format stores none
  int ring_rows = 0;
  int first = 0;  ///< place of the oldest full row
  int full = 0;
  int packed = 0;
  int block_rows = 0;
  int code_stride = 0;  ///< bytes from a block to the next
  int scale_stride = 0;
  // Where packed rows may go (TableLane.placed), blocks lie in places of their own size
  // from `codes` on, in any order:
  int most_blocks = 0;  ///< places for which there is memory
  int blocks = 0;       ///< places from the first on that have had a block
  int filling = -1;     ///< place of the block that takes the next packed row; -1: a new one does
  int filled = 0;       ///< rows that it has
  /// Another layer makes the codes: only scales and zero points are made.
  bool shares_codes = false;
  bool owns_codes = true;  ///< codes lie in this KV head's memory, and count among its bytes
};

/// The attention weights of a KV head's rows, of which it drops one in every step, or their scores.
/// Or (by_slots) weights of rows that the host drops, if any, in the order of the lane's slots.
///
/// Where they are weighed and all are full rows, the next one takes the place of the one that was
/// dropped, so that none moves: places are those of the ring, from `first` on, and in the order of
/// the tokens until the first row goes. In a lane that is placed, whose packed rows may go, by
/// weight, by score or because the host names them, the places of a side are those of its fixed
/// runs, then of its most_blocks blocks, row by row, and then those of its ring from its begin on;
/// a packed row that goes leaves its place empty, in one of the blocks until its whole block is.
/// `came` and `values_came` are both empty where there are no fixed runs and the packed rows lie in
/// order from the first place on.
struct WeighedRows {
  /// (places,), if placed (rows,) by their numbers, those of fixed runs in front; null: nobody
  /// asks.
  float* weights = nullptr;
  LeastWeight least;  ///< of rows as they are numbered in `came`
  /// (places,) the number of each place's row, kNoRow where none is; empty: 0, 1, 2, ...
  std::span<const int> came;
  std::span<const int> values_came;  ///< the same for the places of values, if placed
  /// If placed: rows of so many places, the first ones, have their weights in front of all others'.
  int first_places = 0;
  /// TableShape.scored: (rows,) of the first rows by their numbers, finite, which stay as they are;
  /// `least` is of these.
  std::span<const float> scores;
  bool by_slots = false;  ///< not of a lane that is placed
  static constexpr int kNoRow = INT32_MAX;
};

/// A block of the fixed runs of a side in a lane that is placed.
struct FixedBlock {
  int rows = 0;   ///< whether they are there or not
  int live = 0;   ///< that are there
  int bytes = 0;  ///< that are free when the last row goes
};

/// The first full rows of a KV head's keys, which turn by a position more whenever a row behind
/// them goes.
struct TurnedRows {
  const float* keys = nullptr;  ///< (rows, head_dim) as they came
  int rows = 0;
  int by = 0;  ///< positions, so far
};

/// A KV head of a sequence: what never changes in decode, then what it gains.
struct TableLane {
  std::span<const SlotRun> keys;       ///< in slot order, in front of keys_gained
  std::span<const SlotRun> values;     ///< the same slots
  std::span<const ScoreRemap> remaps;  ///< of these slots
  GrowingRows keys_gained;
  GrowingRows values_gained;
  WeighedRows weighed;
  bool placed = false;  ///< its packed rows may go (TableShape::drops_packed)
  /// If it is: the packed blocks that its fixed runs of keys are, and those of values.
  std::array<std::span<const FixedBlock>, 2> fixed;
  TurnedRows turned;
};

/// What has become of the rows of a KV head that drops packed rows, by places as WeighedRows says.
struct PlacedRows {
  struct Side {
    std::vector<int> came;
    int first = 0;  ///< GrowingRows, as they are now
    int full = 0;
    int blocks = 0;
    int filling = -1;
    int filled = 0;
  };
  std::array<Side, 2> sides;   ///< keys, values
  std::vector<float> weights;  ///< by places of keys; empty: none are kept
};

/// That of many KV heads, as it was read from the GPU.
struct PlacedCopy {
  /// KV head number `lane` of those that were read.
  PlacedRows rows(size_t lane) const;

  size_t places = 0;                    ///< of `came`, of a KV head
  std::vector<int> came;                ///< (lanes, places) of keys
  std::vector<int16_t> value_at;        ///< of the same rows: places of their values; -1: none
  std::vector<float> weights;           ///< the same shape; empty: none are kept
  std::vector<PlacedRows::Side> sides;  ///< (lanes, 2) but for `came`
  std::vector<int> held;                ///< (lanes, 2) the places that there are
};

/// What a DecodeTable keeps of the attention weights of its rows, as means over query heads.
enum class RowWeights : uint8_t { kNone, kOfStep, kSummed };

/// The sizes of a DecodeTable.
struct TableShape {
  int layers = 0;
  int kv_heads = 0;
  int q_per_kv = 0;
  int head_dim = 0;
  DType rows = DType::kF16;  ///< of rings
  int remaps = 0;            ///< of a lane, at most
  RowWeights weights = RowWeights::kNone;
  bool drops_alike =
      false;  ///< KV heads of a layer drop the same row, by the mean of their weights
  bool drops_packed = false;  ///< of some lanes, rows that are dropped may be packed
  bool scored = false;        ///< evict() may drop rows by score
  /// (layers,) the first of the layers, all next to each other, that drop the same row: by the
  /// weights of all their KV heads, or by the score in the first one's. Empty: each by itself.
  std::span<const int> drops_with;
  /// (layers,) whether a layer's lanes never have fixed runs, whatever TableLoad says; empty: none.
  std::span<const uint8_t> rows_alone;
  std::span<const float> turned_by;  ///< RoPE's frequencies for TurnedRows, radians a position
};

/// What the sequences of a DecodeTable come to, at most.
struct TableLoad {
  int slots = 0;       ///< sequences
  int longest = 0;     ///< rows of one
  int fixed_runs = 0;  ///< of a lane's keys, or values, in front of what it gains: 0 ... 5
  /// Of a lane: fixed runs' blocks that do not lie evenly, and words of their bitmaps.
  int listed_blocks = 0;
  int words = 0;
  int weighed_rows = 0;  ///< places of WeighedRows, of a side
  int blocks = 0;        ///< GrowingRows.most_blocks
  int fixed_blocks = 0;  ///< TableLane.fixed, of a side
  int turns = 0;         ///< TurnedRows.by

  /// Nothing of `other` is more.
  bool holds(const TableLoad& other) const noexcept;
  /// Becomes the more of both.
  void grow(const TableLoad& other) noexcept;
};

/// A sequence of a step of decode, and where among the step's rows its row is.
struct TableRow {
  int slot = 0;
  int row = 0;

  bool operator==(const TableRow&) const = default;
};

/// The state of many sequences in decode, in the memory of the GPU that attends to them: of every
/// KV head of every layer the runs of its slots, and counters of its full and packed rows, which
/// the GPU keeps. A step launches the same kernels whichever sequences it is of, so that the host's
/// part of it does not grow with their number, and its attend() calls can be recorded
/// (kernels/base/recording.h).
///
///   table.reserve(load); for each sequence and layer: table.set(...); each step:
///   table.start(rows); for each layer: table.store(...), table.attend(...); table.pack(side) where
///   windows are full, table.evict(slots) or table.drop_least() where rows go
///
/// Throws Error{kUnsupported} where there is no GPU.
class DecodeTable {
 public:
  /// `windows`: (layers,) of keys, then values; what they point to must stay.
  DecodeTable(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
              Device device);
  ~DecodeTable();

  /// Whether there is room for `load`.
  bool holds(const TableLoad& load) const noexcept;
  /// Makes room for `load`. All that was set is lost if there was none, and if it throws.
  void reserve(const TableLoad& load);
  /// Takes one layer of a sequence as it is now, (kv_heads,). What runs point to must stay.
  /// All layers of a slot are set before the next slot's.
  void set(int slot, int layer, std::span<const TableLane> lanes, Stream& stream);
  /// set() for several threads: each takes the layers of one slot in a draft of its own, of
  /// [0, drafts()), and when all are done the drafts are sent one after the other. Before, the
  /// first `count` drafts are to be awaited: the GPU copies from them.
  int drafts() const noexcept;
  void await_drafts(size_t count) const;
  void lay(int draft, int slot, int layer, std::span<const TableLane> lanes);
  void send(int draft, Stream& stream);
  /// Begins a step: counts a row more for each of `rows`, in every layer.
  void start(std::span<const TableRow> rows, Stream& stream);
  /// Stores the step's rows of a layer, with one kernel.
  ///   k, v    (rows of the step, kv_heads, head_dim) f32
  void store(int layer, const float* k, const float* v, Stream& stream);
  /// Attends, once they are stored. Between the two, queries may be changed (BasisBatch), nothing
  /// else is queued.
  ///   q, out  (rows of the step, q heads, head_dim) f32; out may not overlap q
  void attend(int layer, const float* q, float* out, float scale, Stream& stream);
  /// Packs the oldest rows of every window of this step's sequences that is full, on one side.
  void pack(bool keys, Stream& stream);

  /// Drops a row of keys and values of every lane of a layer's sequence, after pack(): of lanes
  /// that are not placed a full one. Where some are, it is called in every step.
  ///   slots  (rows of the step, layers) which slot of the lane, in the order in which rows came,
  ///          kNoSlot, or kLeastScore: by score or by weight, of WeighedRows.least
  void evict(std::span<const int> slots, Stream& stream);
  /// Drops the row of least weight of every lane of this step's sequences. Where some are not to,
  /// evict() says so: kNoSlot, and kLeastScore for the others.
  void drop_least(Stream& stream);
  /// WeighedRows.came of a slot, (layers, kv_heads, TableLoad.weighed_rows). Waits for the GPU.
  /// Throws Error{kDevice} if it does not answer.
  std::vector<int> came(int slot) const;
  /// The same of a slot whose lanes are placed: (layers, kv_heads) from a layer on.
  /// `to` keeps the memory that it has.
  void read_placed(int slot, int layer, int layers, PlacedCopy& to) const;
  /// And (slots,) how many bytes more than when they were set the sequences hold.
  std::vector<int64_t> gained_bytes() const;
  /// Puts weights of a lane to where they lie by numbers again.
  void put_weights(std::span<const float> weights, float* to) const;

  /// A number of what attend() launches: equal numbers launch the same.
  uint64_t version() const noexcept;
  /// attend() of this layer has read the queries before it writes `out`, which may take their
  /// place: the layer packs nothing, and its rows are read by kernels for full rows.
  bool attends_in_place(int layer) const noexcept;
  /// How many slopes attend() has clamped in a layer so far (PackedLane.guarded_remaps). Throws
  /// Error{kDevice} if the GPU does not answer.
  int64_t guarded_remaps(int layer) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
