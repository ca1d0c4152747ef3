#pragma once

#include "kernels/attention.h"
#include "kernels/base/host_device.h"
#include "kernels/cuda/attend/log2.h"
#include "kernels/cuda/device/launch.cuh"

// Decode attention over pieces of full rows: what its kernels share.
namespace kvlm::cuda {

/// Rows of a part of a piece of so many, which one block of threads serves and which has a softmax
/// state. States are written and read again, 3 % of the bytes of 256 rows with four queries; short
/// pieces of few sequences want the blocks. It depends on nothing else, so that sums do not.
constexpr int kMostPartRows = 512;
VLM_HD constexpr int part_rows(int64_t rows) { return rows < 6144 ? 256 : kMostPartRows; }
/// Parts of a piece of up to so many rows, at most.
constexpr int most_parts(int rows) {
  const int of_short = rows < 6143 ? rows : 6143;
  const int parts = (of_short + part_rows(of_short) - 1) / part_rows(of_short);
  const int of_long = (rows + part_rows(rows) - 1) / part_rows(rows);
  return parts > of_long ? parts : of_long;
}

/// A run of a lane, with the lane's query, cut into parts.
struct DevicePiece {
  int64_t first_query;  ///< DeviceLane::first_query
  KeyValueRows cached;  ///< where the ring of its rows begins, and how many they are
  int first;            ///< the place of the first of them
  int ring_rows;        ///< behind so many places it goes on at the begin
  int parts;
};

/// The pieces of a call, as the launches of its types need them.
struct PieceLaunch {
  const DevicePiece* pieces;  // on the GPU
  unsigned count;
  unsigned parts;  // most of a piece
  int q_per_kv, head_dim;
  float scale;
  const float* q;  // AttendArgs::q
  // As in AttendArgs, in units of log2; null: not wanted. (pieces, q_per_kv, score_stride)
  float* scores = nullptr;
  int score_stride = 0;
  // As in FusedArgs, (pieces, splits, ...): the first `parts` of each piece are its.
  float2* ends = nullptr;
  float* outs = nullptr;
  int splits = 0;
};

/// What a block of threads attends to: a part of a piece.
struct PiecePart {
  const float* q = nullptr;
  const std::byte* keys = nullptr;  ///< row 0
  const std::byte* values = nullptr;
  DType dtype = DType::kF32;
  int rows = -1;       ///< -1: there is no such part
  int before_end = 0;  ///< so many rows lie in front of the end of the ring
  int ring_rows = 0;
  float* scores = nullptr;  ///< PieceLaunch.scores of row 0, for query 0
  float2* ends = nullptr;   ///< of its state, for query 0
  float* outs = nullptr;

  /// Where row `row` lies, in rows from row 0.
  __device__ int place(int row) const { return row < before_end ? row : row - ring_rows; }
};

/// Part blockIdx.y of piece blockIdx.x.
__device__ inline PiecePart part_of(const PieceLaunch& l, int element_bytes) {
  const DevicePiece& piece = l.pieces[blockIdx.x];
  const auto part = static_cast<int>(blockIdx.y);
  PiecePart made;
  if (part >= piece.parts) return made;
  made.q = l.q + piece.first_query;
  made.dtype = piece.cached.dtype;
  made.ring_rows = piece.ring_rows;
  const int64_t state = (int64_t{blockIdx.x} * l.splits + part) * l.q_per_kv;
  made.ends = l.ends + state;
  made.outs = l.outs + state * l.head_dim;
  const int most = part_rows(piece.cached.rows);
  const int skipped = part * most;
  made.rows = min(static_cast<int>(piece.cached.rows) - skipped, most);
  int first = piece.first + skipped;
  if (first >= piece.ring_rows) first -= piece.ring_rows;
  made.before_end = piece.ring_rows - first;
  const int64_t bytes = static_cast<int64_t>(first) * l.head_dim * element_bytes;
  made.keys = piece.cached.keys + bytes;
  made.values = piece.cached.values + bytes;
  if (l.scores != nullptr) {
    made.scores = l.scores + int64_t{blockIdx.x} * l.q_per_kv * l.score_stride + skipped;
  }
  return made;
}

/// Serves the pieces of f16 rows of 128 channels on the tensor cores.
void attend_half_rows(const PieceLaunch& launch, Stream& stream);
/// Whether rows of a shape have kernels that read 16 bytes at a time, from where 16 divides the
/// address.
constexpr bool reads_by_16(int head_dim, DType dtype) {
  return head_dim % 8 == 0 && head_dim <= (dtype == DType::kF32 ? 128 : 256);
}
/// Serves the pieces of `dtype` of such a shape.
void attend_pieces(const PieceLaunch& launch, DType dtype, Stream& stream);

}  // namespace kvlm::cuda
