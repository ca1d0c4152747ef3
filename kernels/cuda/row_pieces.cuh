#pragma once

#include "kernels/attention.h"
#include "kernels/cuda/launch.cuh"

// Decode attention over pieces of full rows: what its kernels share.
namespace kvlm::cuda {

/// Rows of a piece that one block serves; the parts of a longer piece are joined afterwards.
constexpr int kMaxPieceRows = 256;

/// The pieces of a call, as the launches of its types need them.
struct PieceLaunch {
  const DecodePiece* pieces;  // on the GPU
  unsigned count, splits;
  int q_per_kv, head_dim;
  float scale;
  float* split_states;  // null: no piece is split
};

/// The state of one of the `splits` parts of a piece, side by side.
__device__ inline SoftmaxState split_state(float* states, unsigned piece, unsigned split,
                                           unsigned splits, int q_per_kv, int head_dim) {
  float* state = states + (static_cast<int64_t>(piece) * splits + split) * q_per_kv *
                              (2 + static_cast<int64_t>(head_dim));
  return {state, state + q_per_kv, state + 2 * q_per_kv};
}

/// Part blockIdx.y of piece blockIdx.x with the place of its state; rows are -1 if there is no such
/// part.
__device__ inline DecodePiece part_of(const PieceLaunch& l, int element_bytes) {
  DecodePiece piece = l.pieces[blockIdx.x];
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kMaxPieceRows;
  if (blockIdx.y > 0 && first_row >= piece.cached.rows) {
    piece.cached.rows = -1;
    return piece;
  }
  piece.cached.keys += first_row * l.head_dim * element_bytes;
  piece.cached.values += first_row * l.head_dim * element_bytes;
  piece.cached.rows = min(piece.cached.rows - first_row, static_cast<int64_t>(kMaxPieceRows));
  if (l.split_states != nullptr) {
    piece.state =
        split_state(l.split_states, blockIdx.x, blockIdx.y, l.splits, l.q_per_kv, l.head_dim);
  }
  return piece;
}

/// Serves the pieces of f16 rows of 128 channels on the tensor cores.
void attend_half_rows(const PieceLaunch& launch, Stream& stream);

}  // namespace kvlm::cuda
