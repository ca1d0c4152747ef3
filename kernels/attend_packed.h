#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/device.h"
#include "kernels/packed_format.h"

namespace kvlm {

/// Segment: consecutive slots of a KV head of a sequence whose keys, or whose values, are stored
/// alike: unpacked and dense, or in packed blocks of one format. Evicted tokens of blocks have no
/// slot, except in placed KV heads of a DecodeTable, which masks them.
struct SlotSegment {
  int slots = 0;
  // Full precision, if `format` is null.
  const std::byte* rows = nullptr;  ///< (slots, head_dim) dense
  DType dtype = DType::kF16;        ///< f32 | f16 | bf16
  // Packed.
  const PackedFormat* format = nullptr;
  std::span<const PackedBlock> blocks;  ///< live_rows sum to slots
  /// Even strides, in bytes: codes of block i begin i * code_stride after those of block 0, its
  /// scales and zero points i * scale_stride. No token is evicted, and all blocks but the last,
  /// which may be shorter, have as many tokens. Kernels then read the first and last entry of
  /// `blocks` only. Both 0: not known.
  std::ptrdiff_t code_stride = 0;
  std::ptrdiff_t scale_stride = 0;
  /// Packed keys only: (q_per_kv, channels) the queries in the basis in which these keys were
  /// packed; null: the KV head's own.
  const float* q = nullptr;
  /// Values only: the segment holds, in ascending order, those of the next `selected_of` slots
  /// whose bit is `selected_bit` (VidKV stores protected tokens separately). The last segment of a
  /// selection advances past its slots. Null: no selection.
  const uint64_t* selection = nullptr;
  bool selected_bit = false;
  int selected_of = 0;
  bool selection_ends = false;
};

/// A linear remap of the scores of slots [first, first + slots), per query head:
/// g(x) = m (x - lo) + lo - tau_low, m = (hi - lo + tau_low - tau_high) / (hi - lo), with lo and hi
/// the smallest and largest score of the range. If guarded, m is clamped to at least 0. If hi = lo,
/// every score becomes lo - tau_low. Source: CalibQuant eqs. 7-8.
struct ScoreRemap {
  int first = 0;
  int slots = 0;
  float tau_low = 0;
  float tau_high = 0;
  bool guarded = true;
};

/// Decode attention of the q_per_kv query heads of one KV head of one sequence over all its slots.
struct PackedHead {
  const float* q = nullptr;             ///< (q_per_kv, head_dim)
  std::span<const SlotSegment> keys;    ///< in slot order
  std::span<const SlotSegment> values;  ///< the same slots; segments may differ
  std::span<const ScoreRemap> remaps;
  int slots = 0;
  /// (q_per_kv, slots) workspace. On return the softmax weights if wanted, else unspecified.
  float* weights = nullptr;
  bool weights_wanted = true;
  float* out = nullptr;  ///< (q_per_kv, head_dim); overwritten; may not overlap q
  /// Returned: how many (query head, remap) pairs had their slope clamped.
  int guarded_remaps = 0;
};

/// out = softmax(remap(scale * q . K)) . V of every KV head, read directly from packed blocks.
/// Scales are folded into the query and the output (docs/formulas.md, "Attention from codes"), so
/// no token is dequantized to memory. On a CPU, where every packed byte is read once for all
/// q_per_kv queries; on a GPU a DecodeTable does the same. Sums in f32. A result depends neither on
/// the other KV heads nor on the threads. A KV head without slots gives 0. Allocates only the
/// stream's scratch, which later calls reuse.
///
/// Throws Error{kInvalidArgument} for a KV head whose segments do not add up to its slots, and
/// Error{kUnsupported} on a GPU: use a DecodeTable.
void attend_packed(std::span<PackedHead> heads, int q_per_kv, int head_dim, float scale,
                   Stream& stream);

/// Dequantizes the live rows of packed blocks: x = slope * s * c + z (docs/formulas.md, "Range").
///   out  (sum of live_rows, format.channels()) dense
void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream);

}  // namespace kvlm
