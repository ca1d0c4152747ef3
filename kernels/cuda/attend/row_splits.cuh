#pragma once

#include "kernels/attention.h"
#include "kernels/base/host_device.h"
#include "kernels/cuda/attend/log2.h"
#include "kernels/cuda/device/launch.cuh"

// Decode attention over unpacked tokens, declarations of row_splits.cu (f32, bf16, f16) and
// half_rows.cu (f16 at head_dim 128, on the tensor cores). The unpacked tokens of a KV head are one
// segment in a ring buffer (DeviceRowSplit), cut into splits, here called parts: one thread block
// and one softmax state each.
namespace kvlm::cuda {

/// Tokens of a part, by the tokens of the segment alone, so that sums do not depend on the batch.
/// States are written and read again: 3 % of the bytes of 256 tokens with four queries. But short
/// segments of few sequences need the blocks.
constexpr int kMostPartRows = 512;
VLM_HD constexpr int part_rows(int64_t rows) { return rows < 6144 ? 256 : kMostPartRows; }
/// Most parts of a segment of up to `rows` tokens.
constexpr int most_parts(int rows) {
  const int of_short = rows < 6143 ? rows : 6143;
  const int parts = (of_short + part_rows(of_short) - 1) / part_rows(of_short);
  const int of_long = (rows + part_rows(rows) - 1) / part_rows(rows);
  return parts > of_long ? parts : of_long;
}

/// The unpacked tokens of a KV head.
struct DeviceRowSplit {
  int64_t first_query;  ///< DeviceHead::first_query
  KeyValueRows cached;  ///< memory of the ring, and number of tokens
  int first;            ///< index of the oldest token in the ring
  int ring_rows;        ///< capacity of the ring
  int parts;
};

/// Arguments of the launches over the unpacked tokens of a layer.
struct RowSplitLaunch {
  const DeviceRowSplit* row_splits;  // on the GPU
  unsigned count;
  unsigned parts;  // most of a KV head
  int q_per_kv, head_dim;
  float scale;
  const float* q;  // AttendArgs::q
  // (count, q_per_kv, score_stride) scores in units of log2, as in AttendArgs; null: not wanted
  float* scores = nullptr;
  int score_stride = 0;
  // As in FusedArgs, (count, splits, ...): DeviceRowSplit::parts are used of the `splits`.
  float2* ends = nullptr;
  float* outs = nullptr;
  int splits = 0;
};

/// The part that a thread block attends to.
struct SplitPart {
  const float* q = nullptr;
  const std::byte* keys = nullptr;  ///< token 0 of the part
  const std::byte* values = nullptr;
  DType dtype = DType::kF32;
  int rows = -1;       ///< -1: there is no such part
  int before_end = 0;  ///< rows from row 0 to the end of the ring
  int ring_rows = 0;
  float* scores = nullptr;  ///< RowSplitLaunch.scores of row 0, for query 0
  float2* ends = nullptr;   ///< state of query 0
  float* outs = nullptr;

  /// Offset of row `row` from row 0, in rows: negative after the ring wraps.
  __device__ int place(int row) const { return row < before_end ? row : row - ring_rows; }
};

/// Part blockIdx.y of DeviceRowSplit blockIdx.x.
__device__ inline SplitPart part_of(const RowSplitLaunch& l, int element_bytes) {
  const DeviceRowSplit& row_split = l.row_splits[blockIdx.x];
  const auto part = static_cast<int>(blockIdx.y);
  SplitPart made;
  if (part >= row_split.parts) return made;
  made.q = l.q + row_split.first_query;
  made.dtype = row_split.cached.dtype;
  made.ring_rows = row_split.ring_rows;
  const int64_t state = (int64_t{blockIdx.x} * l.splits + part) * l.q_per_kv;
  made.ends = l.ends + state;
  made.outs = l.outs + state * l.head_dim;
  const int most = part_rows(row_split.cached.rows);
  const int skipped = part * most;
  made.rows = min(static_cast<int>(row_split.cached.rows) - skipped, most);
  int first = row_split.first + skipped;
  if (first >= row_split.ring_rows) first -= row_split.ring_rows;
  made.before_end = row_split.ring_rows - first;
  const int64_t bytes = static_cast<int64_t>(first) * l.head_dim * element_bytes;
  made.keys = row_split.cached.keys + bytes;
  made.values = row_split.cached.values + bytes;
  if (l.scores != nullptr) {
    made.scores = l.scores + int64_t{blockIdx.x} * l.q_per_kv * l.score_stride + skipped;
  }
  return made;
}

/// attend_row_splits() for f16 at a head_dim of 128.
void attend_half_rows(const RowSplitLaunch& launch, Stream& stream);
/// Whether kernels read tokens of this shape 16 aligned bytes at a time.
constexpr bool reads_by_16(int head_dim, DType dtype) {
  return head_dim % 8 == 0 && head_dim <= (dtype == DType::kF32 ? 128 : 256);
}
/// Softmax states of the unpacked tokens of `dtype`, of such a shape.
void attend_row_splits(const RowSplitLaunch& launch, DType dtype, Stream& stream);

}  // namespace kvlm::cuda
