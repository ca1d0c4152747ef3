#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/row_batch.h"
#include "kvcache/engine/float_space.h"
#include "kvcache/engine/row_appender.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/decode_weights.h"
#include "kvcache/extensions/key_basis.h"
#include "kvcache/extensions/visual_remap.h"

namespace kvlm {

/// Attention of generated rows on the CPU: appends each to its sequence and describes the KV heads
/// of a layer to the kernels, which read them as they are stored.
class DecodeAttention {
 public:
  DecodeAttention(const CacheTraits& traits, RowAppender& appender, KeyBasisChange& key_basis,
                  VisualRemap& remap, DecodeWeights& weights);

  void reserve(const Workload& load);
  /// Begins a layer, without rows.
  void start_layer() noexcept { rows_.clear(); }
  /// A generated row: number `row` of the step.
  void add(Sequence& sequence, int64_t row) { rows_.push_back({&sequence, row, nullptr}); }
  /// Appends and attends the rows that were added.
  ///   q     of all rows of the step, (rows, q_heads, head_dim)
  ///   k, v  likewise, (rows, kv_heads, head_dim)
  ///   out   as q, which it may not overlap
  void attend(int layer, const float* q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream);

  /// Slopes that remaps have clamped.
  int64_t guarded_remaps() const noexcept { return clamped_; }

 private:
  /// KV heads have keys and values of two stores, each in at most three runs, and protected values.
  static constexpr size_t kRunsPerHead = 13;

  /// A generated row, while a layer attends.
  struct Row {
    Sequence* sequence;
    int64_t row;     // of the step
    float* weights;  // (kv_heads, q_per_kv, at most max_rows)
  };
  void place_weights() noexcept;
  void store_rows(ConstTensorView k, ConstTensorView v, Stream& stream);
  size_t describe(int layer, const float* q, float* out, Stream& stream);
  size_t describe_rows(size_t first, size_t last, int layer, const float* q, float* out);
  size_t describe_head(HeadState& head, int layer, size_t index, SlotRun* memory);
  void add_key_runs(const HeadState& head, size_t store, int layer, size_t index, RunList& runs);
  void add_value_runs(const HeadState& head, int layer, RunList& runs);
  bool is_full(const HeadState& head, int layer) const noexcept;
  void prefetch(size_t i, size_t last, int layer, size_t head) const noexcept;
  size_t attend_full(size_t full, float scale, Stream& stream);
  void attend_packed_heads(size_t count, float scale, Stream& stream);

  const CacheTraits& traits_;
  RowAppender& appender_;
  KeyBasisChange& key_basis_;
  VisualRemap& remap_;
  DecodeWeights& decode_weights_;
  RowBatch full_batch_;  // KV heads that hold nothing packed
  int64_t clamped_ = 0;
  std::vector<Row> rows_;
  // By number of the generated row times kv_heads, plus the KV head; then those with packed rows.
  std::vector<PackedLane> packed_;
  std::vector<HeadState*> heads_;
  std::vector<SlotRun> runs_;  // of these, with gaps
  FloatSpace weights_;
};

}  // namespace kvlm
