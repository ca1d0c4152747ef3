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

/// Residual window of the keys, or of the values, of a layer's KV heads: once `trigger` tokens are
/// unpacked, the oldest `rows` of them are packed.
struct RowWindow {
  const PackedFormat* format = nullptr;  ///< null: the table packs nothing
  std::array<PackRule, 2> rules{};
  int trigger = 0;
  int rows = 0;
};

/// Whether a DecodeTable can pack `rows` tokens at a time by `format` and `rules`: with scales per
/// token, or with min-max ranges per channel over blocks that one flush fills.
bool can_pack_windows(const PackedFormat& format, const std::array<PackRule, 2>& rules,
                      int rows) noexcept;

/// Limits with TableShape::drops_packed: places of a KV head, and blocks that a window fills.
inline constexpr int kMostPlaces = 1 << 14;
inline constexpr int kMostFlushedBlocks = 16;

/// The part of a KV head's keys, or of its values, that grows in decode, tokens of the prompt
/// included: packed blocks at even strides, then the unpacked newest tokens in a ring buffer. If
/// `scales` is null, the host packs and the layer's window is ignored.
struct GrowingRows {
  std::byte* ring = nullptr;   ///< (ring_rows, head_dim)
  std::byte* codes = nullptr;  ///< of block 0
  std::byte* scales = nullptr;
  std::byte* zeros = nullptr;  ///< null if the format stores none
  int ring_rows = 0;
  int first = 0;  ///< ring index of the oldest unpacked token
  int full = 0;   ///< unpacked tokens
  int packed = 0;
  int block_rows = 0;
  int code_stride = 0;  ///< bytes from a block to the next
  int scale_stride = 0;
  // With in-place eviction (TableHead.placed) the blocks from `codes` on are in any order:
  int most_blocks = 0;        ///< capacity in blocks
  int blocks = 0;             ///< blocks in use so far, emptied ones included
  int filling = -1;           ///< block that takes the next packed token; -1: a new one
  int filled = 0;             ///< tokens packed into it
  bool shares_codes = false;  ///< another layer writes the codes: make scales and zero points only
  bool owns_codes = true;     ///< codes are in this KV head's memory, and count among its bytes
};

/// What eviction compares: attention weights of a KV head's tokens, or their scores. A place is an
/// index into the storage of one side; `came` has the arrival number of each place's token.
///
/// - Unpacked tokens only: the next token takes the place of the evicted one, so none moves. Places
///   count from the ring's `first`, in token order until the first eviction.
/// - In-place eviction (TableHead.placed), by weight, by score or of slots that the host names:
///   places are those of the fixed segments, then of most_blocks blocks, then of the ring from its
///   begin. An evicted packed token leaves its place empty. A block is reused once all its places
///   are empty. `came` and `values_came` are empty if there are no fixed segments and packed
///   tokens are in order from the first place on.
/// - by_slots: the host evicts, if anything, and weights are in slot order.
struct WeighedRows {
  /// (places,). If placed: (tokens,) by arrival number, fixed segments first. Null: not wanted.
  float* weights = nullptr;
  LeastWeight least;  ///< candidates, by arrival number
  /// (places,) arrival number of each place's token, kNoRow if empty; empty span: 0, 1, 2, ...
  std::span<const int> came;
  std::span<const int> values_came;  ///< the same for the places of values, if placed
  /// If placed: weights of the tokens in the first `first_places` places precede all others.
  int first_places = 0;
  /// TableShape.scored: (tokens,) finite, constant scores of the first tokens by arrival number, to
  /// which `least` applies.
  std::span<const float> scores;
  bool by_slots = false;  ///< never if placed
  static constexpr int kNoRow = INT32_MAX;
};

/// A block of the fixed segments of a side, with in-place eviction.
struct FixedBlock {
  int rows = 0;   ///< tokens, evicted ones included
  int live = 0;   ///< tokens not evicted
  int bytes = 0;  ///< freed with the last token
};

/// First keys of the ring (the sinks) that are rotated by one more position whenever a token after
/// them is evicted.
struct TurnedRows {
  const float* keys = nullptr;  ///< (rows, head_dim) as first stored
  int rows = 0;
  int by = 0;  ///< positions rotated so far
};

/// A KV head of a sequence: fixed segments, which decode does not extend, then the part that
/// grows.
struct TableHead {
  std::span<const SlotSegment> keys;    ///< in slot order, before keys_gained
  std::span<const SlotSegment> values;  ///< the same slots
  std::span<const ScoreRemap> remaps;   ///< of these slots
  GrowingRows keys_gained;
  GrowingRows values_gained;
  WeighedRows weighed;
  bool placed = false;  ///< packed tokens are evicted in place (TableShape::drops_packed)
  /// If placed: the packed blocks of its fixed segments, of keys and of values.
  std::array<std::span<const FixedBlock>, 2> fixed;
  TurnedRows turned;
};

/// State of a KV head with in-place eviction, by the places of WeighedRows.
struct PlacedRows {
  struct Side {
    std::vector<int> came;
    int first = 0;  // the counters of GrowingRows
    int full = 0;
    int blocks = 0;
    int filling = -1;
    int filled = 0;
  };
  std::array<Side, 2> sides;   ///< keys, values
  std::vector<float> weights;  ///< by places of keys; empty: not kept
};

/// PlacedRows of many KV heads, as read from the GPU.
struct PlacedCopy {
  /// KV head number `head` of those read.
  PlacedRows rows(size_t head) const;

  size_t places = 0;                    ///< of a KV head, in `came`
  std::vector<int> came;                ///< (KV heads, places) of keys
  std::vector<int16_t> value_at;        ///< the same shape: place of each key's value; -1: none
  std::vector<float> weights;           ///< the same shape; empty: not kept
  std::vector<PlacedRows::Side> sides;  ///< (KV heads, 2) without `came`
  std::vector<int> held;                ///< (KV heads, 2) number of places
};

/// Attention weights that a DecodeTable keeps per token, as means over query heads.
enum class RowWeights : uint8_t { kNone, kOfStep, kSummed };

/// The sizes of a DecodeTable.
struct TableShape {
  int layers = 0;
  int kv_heads = 0;
  int q_per_kv = 0;
  int head_dim = 0;
  DType rows = DType::kF16;  ///< of rings
  int remaps = 0;            ///< per KV head, at most
  RowWeights weights = RowWeights::kNone;
  bool drops_alike = false;   ///< KV heads of a layer evict the same token, by mean weight
  bool drops_packed = false;  ///< some KV heads evict packed tokens in place
  bool scored = false;        ///< evict() may choose by score
  /// (layers,) the first of the adjacent layers that evict the same token: by the weights of all
  /// their KV heads, or by the scores of the first one. Empty: each layer by itself.
  std::span<const int> drops_with;
  /// (layers,) whether a layer's KV heads never have fixed segments, whatever TableLoad allows;
  /// empty: no such layer.
  std::span<const uint8_t> rows_alone;
  std::span<const float> turned_by;  ///< RoPE's frequencies for TurnedRows, radians per position
};

/// Upper bounds of what the sequences of a DecodeTable hold.
struct TableLoad {
  int slots = 0;           ///< sequences
  int longest = 0;         ///< tokens of one
  int fixed_segments = 0;  ///< of a KV head's keys, or values: 0 ... 5
  /// Per KV head: blocks of fixed segments that are not at even strides, and words of bitmaps.
  int listed_blocks = 0;
  int words = 0;
  int weighed_rows = 0;  ///< places of WeighedRows, per side
  int blocks = 0;        ///< GrowingRows.most_blocks
  int fixed_blocks = 0;  ///< TableHead.fixed, per side
  int turns = 0;         ///< TurnedRows.by

  /// Whether no field of `other` is larger.
  bool holds(const TableLoad& other) const noexcept;
  /// Takes the larger of both, field by field.
  void grow(const TableLoad& other) noexcept;
};

/// A sequence of a decode step (its slot in the table), and its row in the step's batch.
struct TableRow {
  int slot = 0;
  int row = 0;

  bool operator==(const TableRow&) const = default;
};

/// State of many sequences in decode, in GPU memory: for every KV head of every layer the segments
/// of its slots, and counters of unpacked and packed tokens, which the GPU advances. attend()
/// launches the same kernels whatever the sequences, so that the host's cost does not grow with
/// their number and the calls can be recorded (kernels/base/recording.h).
///
///   table.reserve(load); for each sequence and layer: table.set(...); each step:
///   table.start(rows); for each layer: table.store(...), table.attend(...); table.pack(side) if
///   windows are full, table.evict(slots) or table.drop_least() if tokens are evicted
///
/// Throws Error{kUnsupported} without a GPU.
class DecodeTable {
 public:
  /// `windows`: (layers,) of keys, then values; their formats must outlive the table.
  DecodeTable(const TableShape& shape, std::span<const std::array<RowWindow, 2>> windows,
              Device device);
  ~DecodeTable();

  /// Whether `load` fits the reserved memory.
  bool holds(const TableLoad& load) const noexcept;
  /// Reserves memory for `load`. If memory must grow, or on a throw, everything set is lost.
  void reserve(const TableLoad& load);
  /// Sets one layer of a sequence as it is now, (kv_heads,). What its segments point to must stay
  /// valid. All layers of a slot come before the next slot's.
  void set(int slot, int layer, std::span<const TableHead> heads, Stream& stream);
  /// set() for several threads. First await the last copies from the first `count` drafts. Then
  /// each thread builds all layers of one slot in a draft of its own, of [0, drafts()). When all
  /// are done, the drafts are sent one after the other.
  int drafts() const noexcept;
  void await_drafts(size_t count) const;
  void lay(int draft, int slot, int layer, std::span<const TableHead> heads);
  void send(int draft, Stream& stream);
  /// Begins a step: counts one more token for each of `rows`, in every layer.
  void start(std::span<const TableRow> rows, Stream& stream);
  /// Stores the step's keys and values of a layer, with one kernel.
  ///   k, v    (rows of the step, kv_heads, head_dim) f32
  void store(int layer, const float* k, const float* v, Stream& stream);
  /// Attends, after store(). Between the two, queries may be changed (BasisBatch); nothing else is
  /// queued.
  ///   q, out  (rows of the step, q heads, head_dim) f32; out may not overlap q
  void attend(int layer, const float* q, float* out, float scale, Stream& stream);
  /// Packs the oldest tokens of every full window of this step's sequences, on one side.
  void pack(bool keys, Stream& stream);

  /// Evicts a token of every KV head of this step's sequences, after pack(): an unpacked one,
  /// unless the KV head is placed. If some are placed, call this or drop_least() in every step: it
  /// also counts the packed windows.
  ///   slots  (rows of the step, layers) slot of the token, in arrival order; kNoSlot: none;
  ///          kLeastScore: by score or weight, of WeighedRows.least
  void evict(std::span<const int> slots, Stream& stream);
  /// Evicts the token of least weight of every KV head of this step's sequences. If some evict
  /// none, use evict() with kNoSlot for them and kLeastScore for the others.
  void drop_least(Stream& stream);
  /// WeighedRows.came of a slot, (layers, kv_heads, TableLoad.weighed_rows). Waits for the GPU.
  /// Throws Error{kDevice} if it does not answer.
  std::vector<int> came(int slot) const;
  /// The same for a slot whose KV heads are placed: (layers, kv_heads) from `layer` on. Reuses the
  /// memory of `to`.
  void read_placed(int slot, int layer, int layers, PlacedCopy& to) const;
  /// (slots,) bytes that each sequence has gained since it was set.
  std::vector<int64_t> gained_bytes() const;
  /// Copies weights of a KV head back to `to`, where they are kept by arrival number.
  void put_weights(std::span<const float> weights, float* to) const;

  /// Identifies what attend() launches: equal numbers, equal launches.
  uint64_t version() const noexcept;
  /// Whether `out` may alias q in attend() of this layer: it packs nothing and uses the kernels of
  /// unpacked tokens, which read the queries before they write.
  bool attends_in_place(int layer) const noexcept;
  /// How many slopes attend() has clamped in a layer so far (PackedHead.guarded_remaps). Throws
  /// Error{kDevice} if the GPU does not answer.
  int64_t guarded_remaps(int layer) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
