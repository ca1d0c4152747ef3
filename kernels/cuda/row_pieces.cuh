#pragma once

#include "kernels/attention.h"
#include "kernels/base/host_device.h"
#include "kernels/cuda/launch.cuh"

// Decode attention over pieces of full rows: what its kernels share.
namespace kvlm::cuda {

/// Rows of a piece that one block serves: a part.
constexpr int kMaxPieceRows = 256;

/// A run of a lane, with the lane's query, cut into parts.
struct DevicePiece {
  const float* q;
  KeyValueRows cached;
  int first_part;
  int parts;
  /// The rows of a ring that follow at its begin, which have parts of their own behind those of
  /// `cached`.
  KeyValueRows wrapped;

  /// Parts of `cached`.
  __device__ int parts_before_wrap() const {
    return wrapped.rows == 0 ? parts : static_cast<int>(ceil_div(cached.rows, kMaxPieceRows));
  }
};

/// A lane, whose parts follow each other.
struct DeviceRowLane {
  float* out;
  int first_part, parts;
};

/// The pieces of a call, as the launches of its types need them.
struct PieceLaunch {
  const DevicePiece* pieces;  // on the GPU
  unsigned count;
  unsigned parts;  // most of a piece
  int q_per_kv, head_dim;
  float scale;
  float* states;    // of all parts, each out (q_per_kv, head_dim), max, sum (q_per_kv), padding
  int64_t q_moved;  // floats from where pieces say that queries are

  /// Floats of a part's state: it starts where vectors do.
  VLM_HD int64_t state_floats() const { return (int64_t{q_per_kv} * (2 + head_dim) + 3) / 4 * 4; }
};

__device__ inline SoftmaxState state_of(const PieceLaunch& l, int part) {
  float* out = l.states + part * l.state_floats();
  float* max = out + l.q_per_kv * l.head_dim;
  return {max, max + l.q_per_kv, out};
}

/// Part blockIdx.y of piece blockIdx.x; rows are -1 if there is no such part.
__device__ inline DecodePiece part_of(const PieceLaunch& l, int element_bytes) {
  const DevicePiece& piece = l.pieces[blockIdx.x];
  const auto part = static_cast<int>(blockIdx.y);
  DecodePiece made{piece.q + l.q_moved, piece.cached, state_of(l, piece.first_part + part)};
  if (part >= piece.parts) {
    made.cached.rows = -1;
    return made;
  }
  const int before_wrap = piece.parts_before_wrap();
  const bool wrapped = part >= before_wrap;
  if (wrapped) made.cached = piece.wrapped;
  const int64_t rows = made.cached.rows;
  const int64_t first_row =
      static_cast<int64_t>(wrapped ? part - before_wrap : part) * kMaxPieceRows;
  const int64_t skipped = first_row * l.head_dim * element_bytes;
  made.cached.keys += skipped;
  made.cached.values += skipped;
  made.cached.rows = max(int64_t{0}, min(rows - first_row, int64_t{kMaxPieceRows}));
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
/// Merges the states of each lane's parts.
void join_parts(const PieceLaunch& launch, const DeviceRowLane* lanes, unsigned count,
                int64_t out_moved, Stream& stream);
/// Memory for the states of so many parts.
float* place_states(const PieceLaunch& launch, int64_t parts, Stream& stream);

}  // namespace kvlm::cuda
