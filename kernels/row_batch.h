#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "kernels/attention.h"
#include "kernels/base/device.h"

namespace kvlm {

/// A kv_head of a sequence: how RowBatch holds it.
struct RowLane {
  const float* q = nullptr;  ///< (q_per_kv, head_dim)
  float* out = nullptr;      ///< (q_per_kv, head_dim)
  size_t first_run = 0;      ///< among the runs of all lanes
  size_t runs = 0;
};

/// Decode attention over full rows of many lanes (a kv_head of a sequence) at once:
///
///   out[r,:] = softmax(q[r,:] . K * scale) . V
///
/// Lanes are cut into parts of a constant number of rows, so that a result depends neither on the
/// threads nor on the other lanes. Lanes that are kept may gain rows: what a step then gives to a
/// GPU is what the last one gave, so that it can be recorded (kernels/base/recording.h).
///
///   batch.start(q_per_kv, head_dim); for each lane: batch.add(...); batch.describe(...);
///   batch.attend(...); then, of lanes that are kept, batch.append(...); batch.attend(...); ...
class RowBatch {
 public:
  explicit RowBatch(Device device);
  ~RowBatch();
  RowBatch(RowBatch&&) noexcept;
  RowBatch& operator=(RowBatch&&) noexcept;

  /// Room for `lanes` lanes of `runs` runs that hold `rows` rows between them: within it nothing is
  /// allocated on the CPU.
  void reserve(int q_per_kv, int head_dim, size_t lanes, size_t runs, size_t rows);

  /// Forgets the lanes.
  void start(int q_per_kv, int head_dim);
  /// A lane that is `runs` of rows one after the other.
  ///   q, out  (q_per_kv, head_dim) f32; out may be q
  /// Throws Error{kInvalidArgument} for a lane without q or out, a run without memory or of other
  /// types than f32, f16 and bf16.
  void add(const float* q, std::span<const KeyValueRows> runs, float* out);
  /// No lane follows. `q` and `out` are the bases from which those of lanes are counted. What the
  /// runs of lanes that are to `keep` point to must stay until start().
  void describe(const float* q, const float* out, bool keep, Stream& stream);

  /// Rows that may still be appended as far as the description goes; whether there is memory behind
  /// the last runs the caller must know. 0 unless lanes are kept and all end with rows of one
  /// dtype.
  int room() const noexcept;
  /// A row more for each lane, behind its last in the same memory, rounded to that run's dtype.
  ///   k, v  (lanes, head_dim) f32
  /// Throws Error{kInvalidArgument} without room.
  void append(const float* k, const float* v, Stream& stream);
  /// append() is done by a recording that is run (kernels/base/recording.h): while that is made,
  /// append() does not count.
  void appended() noexcept;
  void attend(const float* q, float* out, float scale, Stream& stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
