#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "kernels/attention.h"
#include "kernels/base/device.h"

namespace kvlm {

/// A kv_head of a sequence: how RowBatch holds it.
struct RowHead {
  const float* q = nullptr;  ///< (q_per_kv, head_dim)
  float* out = nullptr;      ///< (q_per_kv, head_dim)
  size_t first_run = 0;      ///< among the runs of all KV heads
  size_t runs = 0;
};

/// Decode attention over full rows of many KV heads (a kv_head of a sequence) at once:
///
///   out[r,:] = softmax(q[r,:] . K * scale) . V
///
/// KV heads are cut into parts of a constant number of rows, so that a result depends neither on
/// the threads nor on the other KV heads. It serves the CPU: a DecodeTable attends on a GPU.
///
///   batch.start(q_per_kv, head_dim); for each KV head: batch.add(...); batch.attend(scale,
///   stream);
class RowBatch {
 public:
  RowBatch();
  ~RowBatch();

  /// Room for `heads` KV heads of `runs` runs that hold `rows` rows between them: within it nothing
  /// is allocated.
  void reserve(int q_per_kv, int head_dim, size_t heads, size_t runs, size_t rows);

  /// Forgets the KV heads.
  void start(int q_per_kv, int head_dim);
  /// A KV head that is `runs` of rows one after the other.
  ///   q, out  (q_per_kv, head_dim) f32; out may be q
  /// Throws Error{kInvalidArgument} for a KV head without q or out, a run without memory or of
  /// other types than f32, f16 and bf16.
  void add(const float* q, std::span<const KeyValueRows> runs, float* out);
  /// Attends the KV heads. Throws Error{kInvalidArgument} for a scale that is not finite, and
  /// Error{kUnsupported} on a GPU.
  void attend(float scale, Stream& stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
