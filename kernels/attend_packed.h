#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/device.h"
#include "kernels/packed_format.h"

namespace kvlm {

/// Consecutive slots of a lane (the KV head of a sequence) whose keys, or whose values, are stored
/// alike: full rows side by side, or packed blocks of one format. Dead rows of blocks are no slots.
struct SlotRun {
  int slots = 0;
  // Full precision, if `format` is null.
  const std::byte* rows = nullptr;  ///< (slots, head_dim) dense
  DType dtype = DType::kF16;        ///< f32 | f16 | bf16
  // Packed.
  const PackedFormat* format = nullptr;
  std::span<const PackedBlock> blocks;  ///< live_rows sum to slots
  /// Blocks that lie evenly: the codes of block i are i * code_stride bytes after those of block 0,
  /// its scales and zero points i * scale_stride; all rows are live, and all blocks
  /// have as many, the last at most. Both 0: nothing is said. A kernel may then look at the first
  /// and last block only.
  std::ptrdiff_t code_stride = 0;
  std::ptrdiff_t scale_stride = 0;
  /// Packed keys only: (q_per_kv, channels) the queries in the basis in which these keys were
  /// packed; null: the lane's own.
  const float* q = nullptr;
  /// Values only: this run holds, in ascending order, those of the next `selected_of` slots whose
  /// bit is `selected_bit` (VidKV's protected tokens lie apart); the last run of a selection
  /// advances past them. Null for a plain run.
  const uint64_t* selection = nullptr;
  bool selected_bit = false;
  int selected_of = 0;
  bool selection_ends = false;
};

/// A linear remap of the scores of slots [first, first + slots), per query head:
/// g(x) = m (x - lo) + lo - tau_low, m = (hi - lo + tau_low - tau_high) / (hi - lo), with lo and hi
/// the smallest and largest score of the range. m is at least 0 if guarded; if hi = lo every score
/// becomes lo - tau_low. Source: CalibQuant eqs. 7-8.
struct ScoreRemap {
  int first = 0;
  int slots = 0;
  float tau_low = 0;
  float tau_high = 0;
  bool guarded = true;
};

/// Decode attention of the q_per_kv query heads of one kv_head of one sequence over all its slots.
struct PackedLane {
  const float* q = nullptr;         ///< (q_per_kv, head_dim)
  std::span<const SlotRun> keys;    ///< in slot order
  std::span<const SlotRun> values;  ///< the same slots in the same order, however partitioned
  std::span<const ScoreRemap> remaps;
  int slots = 0;
  /// (q_per_kv, slots) workspace. On return the softmax weights, each row summing to 1, if they are
  /// wanted; else anything.
  float* weights = nullptr;
  bool weights_wanted = true;
  float* out = nullptr;  ///< (q_per_kv, head_dim); overwritten; may not overlap q
  /// Returned: how many (query head, remap) had their slope clamped.
  int guarded_remaps = 0;
};

/// out = softmax(remap(scale * q . K)) . V of every lane, read straight from packed blocks: scales
/// are folded into the query and the output (docs/formulas.md, "Attention from codes"), no row is
/// dequantized to memory, every packed byte is read once for all q_per_kv queries. Sums in f32.
/// Lanes are independent, so a result depends neither on the other lanes nor on the threads. A lane
/// without slots gives 0. Takes memory for the stream's scratch only, which later calls use again.
///
/// Throws Error{kInvalidArgument} for a lane whose runs do not add up to its slots, and
/// Error{kUnsupported} on a GPU, where a DecodeTable attends.
void attend_packed(std::span<PackedLane> lanes, int q_per_kv, int head_dim, float scale,
                   Stream& stream);

/// Writes the live rows of packed blocks as floats: x = slope * s * c + z (docs/formulas.md,
/// "Range").
///   out  (sum of live_rows, format.channels()) dense
void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream);

}  // namespace kvlm
