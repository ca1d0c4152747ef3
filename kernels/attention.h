#pragma once

#include <array>
#include <span>
#include <vector>

#include "kernels/base/device.h"
#include "kernels/base/tensor.h"

namespace kvlm {

/// Keys and values of consecutive tokens of one KV head, dense in memory.
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
///   past      kv_heads * segments entries, those of KV head 0 first: tokens before k and v, which
///             every query sees; empty for none
///   causal    query i sees rows 0..i of k and v (and all of past), else all n
///   multiply  f32 | f16 | bf16: the type in which q * scale, k, v and the weights are multiplied
///             if the device has matrix units for it (CUDA); f16 saturates at its largest finite
///             number. The CPU always multiplies in f32
///
/// The result does not depend on the number of threads. Asynchronous on CUDA.
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch.
/// Source: Dao et al. 2022, "FlashAttention", alg. 1; Milakov & Gimelshein 2018 for the softmax.
void attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
               std::span<const KeyValueRows> past, bool causal, float scale, DType multiply,
               Stream& stream);

/// Block-diagonal attention: rows see only their own segment, such as the images of a batch, the
/// frames of a video or the windows of an image. Segment i is rows [bounds[i], bounds[i + 1]). On a
/// GPU it keeps the tiles of a launch over all segments, which the layers of a tower share.
class Segments {
 public:
  Segments() = default;
  Segments(std::span<const int32_t> bounds, Stream& stream) { assign(bounds, stream); }

  /// At least two bounds, ascending from 0. Work queued before still uses the old segments. Throws
  /// Error{kInvalidArgument}.
  void assign(std::span<const int32_t> bounds, Stream& stream);

  std::span<const int32_t> bounds() const noexcept { return bounds_; }
  /// Rows of all segments.
  int64_t rows() const noexcept { return bounds_.empty() ? 0 : bounds_.back(); }

  /// Up to `size` queries of a segment, the work of a thread block on a GPU.
  struct Tile {
    int32_t first = 0;    ///< row at which the segment begins
    int32_t rows = 0;     ///< of the segment
    int32_t queries = 0;  ///< the first query, counted from `first`
    int32_t unused = 0;
  };
  /// (tile_count(size),) tiles of 64 or of 128 queries, on the GPU.
  const Tile* tiles(int size) const noexcept;
  int64_t tile_count(int size) const noexcept { return counts_[size == 64 ? 0 : 1]; }

 private:
  std::vector<int32_t> bounds_;
  std::array<int64_t, 2> counts_{};  // of tiles of 64, of 128
  Tensor tiles_;                     // (at least all counts, 4) i32, on the GPU
};

/// attention() of every segment, bit for bit equal to a call for that segment alone.
///
///   q, k, v, out  as of attention(), as many rows as the segments have
///
/// Throws and is asynchronous as attention() is. On CUDA one launch, and one more to round if
/// `multiply` is a half format.
void segment_attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                       const Segments& segments, float scale, DType multiply, Stream& stream);

/// The same for q, k and v of one product, on a GPU. Multiplies in their dtype; the scale, which is
/// positive, is applied to the scores.
///
///   qkv  (n, 3, heads, head_dim)  f16 | bf16; head_dim a multiple of 8 up to 256
///   out  (n, heads, head_dim)     of the same dtype
///
/// One launch. Throws Error{kInvalidArgument} on a shape, dtype or device mismatch,
/// Error{kUnsupported} on the CPU.
void segment_attention(TensorView out, ConstTensorView qkv, const Segments& segments, float scale,
                       Stream& stream);

/// Softmax state of `queries` query rows of one KV head over some tokens, for merge_states(). sum
/// and out are relative to exp(max); an empty state has max = -inf, sum = 0, out = 0.
struct SoftmaxState {
  float* max = nullptr;  // (queries,)
  float* sum = nullptr;  // (queries,)
  float* out = nullptr;  // (queries, head_dim)
};

/// One split of decode attention: q_per_kv query rows of one KV head of one sequence against a
/// segment of its tokens.
struct DecodeSplit {
  const float* q = nullptr;  // (q_per_kv, head_dim) f32
  KeyValueRows cached;
  SoftmaxState state;  // overwritten; may not overlap q or another split's state
};

/// On the CPU: computes the state of every split: max = max_j s_j, sum = sum_j exp(s_j - max), out
/// = sum_j exp(s_j - max) V_j with s_j = scale * q . K_j. Splits are independent, so a result
/// depends neither on the other splits nor on the threads.
/// cached.rows may be 0 (an empty state). Every cached byte is read once for all q_per_kv queries.
/// Allocates nothing. Throws Error{kInvalidArgument} on a dtype other than f32, f16 and bf16, a
/// missing pointer or a stream of another device.
void attend_rows(std::span<const DecodeSplit> row_splits, int q_per_kv, int head_dim, float scale,
                 Stream& stream);

/// States of the same queries over different tokens, to be merged into one output.
struct MergeJob {
  float* out = nullptr;  // (queries, head_dim) f32, dense; may be parts[0].out
  std::span<const SoftmaxState> parts;
};

/// On the CPU: merges the parts of every job in order and normalises: out[r,:] = sum_p w_p
/// out_p[r,:] / sum_p w_p sum_p[r] with w_p = exp(max_p - max). An empty state has no weight; if
/// all
/// are empty, the row becomes 0. By the calling thread; allocates nothing.
void merge_states(std::span<const MergeJob> jobs, int queries, int head_dim);

}  // namespace kvlm
