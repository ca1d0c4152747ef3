#pragma once

#include <array>
#include <span>
#include <vector>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

namespace kvlm {

/// Key and value rows of one kv_head that lie side by side in memory.
struct KeyValueRows {
  const std::byte* keys = nullptr;    // (rows, head_dim) dense
  const std::byte* values = nullptr;  // (rows, head_dim) dense
  DType dtype = DType::kF32;          // f32 | f16 | bf16, of both
  int64_t rows = 0;
};

/// out[i,hq,:] = softmax(q[i,hq,:] . K[:,h,:] * scale) . V[:,h,:] with h = hq / q_per_kv, tile by
/// tile with an online softmax (never an n x n matrix) and sums in f32.
///
///   q, out    (n, q_heads, head_dim)   f32, n >= 1; out may be q, and may overlap no operand
///             otherwise
///   k, v      (n, kv_heads, head_dim)  f32, the rows that belong to the queries
///   past      kv_heads * runs entries, the runs of kv_head 0 first: rows that come before k and v
///             and that every query sees; empty for none
///   causal    query i sees rows 0..i of k and v (and all of past), else all n
///   multiply  f32 | f16 | bf16: the type in which q * scale, k, v and the weights are multiplied
///             where the device has matrix units for it (CUDA); f16 takes what exceeds it as the
///             largest finite half. The CPU always multiplies in f32
///
/// The result does not depend on the number of threads. Asynchronous on CUDA.
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch.
/// Source: Dao et al. 2022, "FlashAttention", alg. 1; Milakov & Gimelshein 2018 for the softmax.
void attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
               std::span<const KeyValueRows> past, bool causal, float scale, DType multiply,
               Stream& stream);

/// Rows that see the rows of their own segment and no others: the pictures of a batch, the frames
/// of a clip, the windows of a picture. Segment i is the rows [bounds[i], bounds[i + 1]). On a GPU
/// it keeps what a launch over all segments has to know, so that the layers of a tower share it.
class Segments {
 public:
  Segments() = default;
  Segments(std::span<const int32_t> bounds, Stream& stream) { assign(bounds, stream); }

  /// The first bound is 0, and each is larger than the one before; at least two. What was queued
  /// before still sees the segments that were. Throws Error{kInvalidArgument}.
  void assign(std::span<const int32_t> bounds, Stream& stream);

  std::span<const int32_t> bounds() const noexcept { return bounds_; }
  /// Of all segments.
  int64_t rows() const noexcept { return bounds_.empty() ? 0 : bounds_.back(); }

  /// Up to `size` queries of a segment, which a block attends for on a GPU.
  struct Tile {
    int32_t first = 0;    ///< row at which the segment begins
    int32_t rows = 0;     ///< of the segment
    int32_t queries = 0;  ///< the first query, counted from `first`
    int32_t unused = 0;
  };
  /// The tiles of 64 or of 128 queries, on the GPU; `tile_count` says how many.
  const Tile* tiles(int size) const noexcept;
  int64_t tile_count(int size) const noexcept { return counts_[size == 64 ? 0 : 1]; }

 private:
  std::vector<int32_t> bounds_;
  std::array<int64_t, 2> counts_{};  // of tiles of 64, of 128
  Tensor tiles_;                     // (at least all counts, 4) i32, on the GPU
};

/// attention() of every segment: each is, bit for bit, what attention() makes of it alone.
///
///   q, k, v, out  as of attention(), as many rows as the segments have
///
/// Throws and is asynchronous as attention() is. On CUDA one launch, and one more that rounds where
/// `multiply` is a half format.
void segment_attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                       const Segments& segments, float scale, DType multiply, Stream& stream);

/// The same of operands that one product made, on a GPU: what is multiplied is in their format and
/// the scale, which is positive, is applied to the scores.
///
///   qkv  (n, 3, heads, head_dim)  f16 | bf16; head_dim a multiple of 8 up to 256
///   out  (n, heads, head_dim)     of the same dtype
///
/// One launch. Throws Error{kInvalidArgument} on a shape, dtype or device mismatch,
/// Error{kUnsupported} on the CPU.
void segment_attention(TensorView out, ConstTensorView qkv, const Segments& segments, float scale,
                       Stream& stream);

/// The running softmax of `queries` query rows of one kv_head: what two parts of a cache must know
/// of each other to be merged. sum and out are relative to exp(max); an empty state has max = -inf,
/// sum = 0, out = 0.
struct SoftmaxState {
  float* max = nullptr;  // (queries,)
  float* sum = nullptr;  // (queries,)
  float* out = nullptr;  // (queries, head_dim)
};

/// One piece of decode attention: q_per_kv query rows of one kv_head of one sequence against a run
/// of its cached rows.
struct DecodePiece {
  const float* q = nullptr;  // (q_per_kv, head_dim) f32
  KeyValueRows cached;
  SoftmaxState state;  // overwritten; may not overlap q or another piece's state
};

/// On the CPU: computes the state of every piece: state.max = max_j
/// s_j, sum = sum_j exp(s_j - max), out = sum_j exp(s_j - max) V_j with s_j = scale * q . K_j.
/// Pieces are independent, so the result of one depends neither on the others nor on the threads.
/// cached.rows may be 0 (an empty state). Every cached byte is read once for all q_per_kv queries.
/// Allocates nothing. Throws Error{kInvalidArgument} on a dtype other than f32, f16 and bf16, a
/// missing pointer or a stream of another device.
void attend_rows(std::span<const DecodePiece> pieces, int q_per_kv, int head_dim, float scale,
                 Stream& stream);

/// States of the same queries over different rows, to become one output.
struct MergeJob {
  float* out = nullptr;  // (queries, head_dim) f32, dense; may be parts[0].out
  std::span<const SoftmaxState> parts;
};

/// On the CPU: merges the parts of every job in order and normalises: out[r,:] = sum_p w_p
/// out_p[r,:] / sum_p w_p sum_p[r] with w_p = exp(max_p - max). An empty state has no weight; a row
/// that no part has seen becomes 0. By the calling thread; allocates nothing.
void merge_states(std::span<const MergeJob> jobs, int queries, int head_dim);

}  // namespace kvlm
