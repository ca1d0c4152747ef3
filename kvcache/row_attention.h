#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/attention.h"
#include "kernels/base/buffer.h"
#include "kvcache/kv_cache.h"

namespace kvlm {

/// Decode attention over full-precision rows of many lanes (a kv_head of a sequence) in one launch.
/// A lane is cut into pieces of a constant number of rows, so that a result depends neither on the
/// threads nor on the other lanes. Allocates nothing within what reserve() announced.
class RowAttention {
 public:
  explicit RowAttention(Device device = {}) : device_(device) {}
  /// Room for `lanes` lanes that hold `rows` rows between them.
  void reserve(const CacheShape& shape, size_t lanes, size_t rows);

  void clear() noexcept;
  /// A lane that is `runs` of rows one after the other.
  ///   q, out  (q_per_kv, head_dim) f32; out may be q
  void add(const float* q, std::span<const KeyValueRows> runs, float* out, const CacheShape& shape);
  /// Computes every lane added since clear().
  void run(const CacheShape& shape, float scale, Stream& stream);

 private:
  void add_pieces(const float* q, const KeyValueRows& rows, const CacheShape& shape);

  struct Lane {
    float* out;
    size_t pieces;
  };
  std::vector<DecodePiece> pieces_;
  std::vector<SoftmaxState> states_;
  Device device_;
  Buffer state_floats_;  // per piece: max, sum (q_per_kv), out (q_per_kv, head_dim)
  std::vector<Lane> lanes_;
  std::vector<MergeJob> merges_;
};

}  // namespace kvlm
