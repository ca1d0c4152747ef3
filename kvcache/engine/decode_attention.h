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

/// Decode attention on the CPU: appends each generated token to its sequence, and describes the KV
/// heads of a layer to the kernels, which read them as stored.
class DecodeAttention {
 public:
  DecodeAttention(const CacheTraits& traits, RowAppender& appender, KeyBasisChange& key_basis,
                  VisualRemap& remap, DecodeWeights& weights);

  void reserve(const Workload& load);
  /// Begins a layer with an empty list.
  void start_layer() noexcept { rows_.clear(); }
  /// Adds the generated token in row `row` of the step.
  void add(Sequence& sequence, int64_t row) { rows_.push_back({&sequence, row, nullptr}); }
  /// Stores the added tokens and computes their attention.
  ///   q     (rows of the step, q_heads, head_dim)
  ///   k, v  (rows of the step, kv_heads, head_dim)
  ///   out   as q, which it may not overlap
  void attend(int layer, const float* q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream);

  /// Slopes that remaps have clamped so far.
  int64_t guarded_remaps() const noexcept { return clamped_; }

 private:
  /// Keys and values of two stores in at most three segments each, and protected values.
  static constexpr size_t kSegmentsPerHead = 13;

  /// A generated token, while a layer attends.
  struct Row {
    Sequence* sequence;
    int64_t row;     // of the step
    float* weights;  // (kv_heads, q_per_kv, at most max_rows)
  };
  void place_weights() noexcept;
  void store_rows(ConstTensorView k, ConstTensorView v, Stream& stream);
  size_t describe(int layer, const float* q, float* out, Stream& stream);
  size_t describe_rows(size_t first, size_t last, int layer, const float* q, float* out);
  size_t describe_head(HeadState& head, int layer, size_t index, SlotSegment* memory);
  void add_key_segments(const HeadState& head, size_t store, int layer, size_t index,
                        SegmentList& segments);
  void add_value_segments(const HeadState& head, int layer, SegmentList& segments);
  bool is_full(const HeadState& head, int layer) const noexcept;
  void prefetch(size_t i, size_t last, int layer, size_t head) const noexcept;
  size_t attend_full(size_t full, float scale, Stream& stream);
  void attend_packed_heads(size_t count, float scale, Stream& stream);

  const CacheTraits& traits_;
  RowAppender& appender_;
  KeyBasisChange& key_basis_;
  VisualRemap& remap_;
  DecodeWeights& decode_weights_;
  RowBatch full_batch_;  // KV heads without packed tokens
  int64_t clamped_ = 0;
  std::vector<Row> rows_;
  // By index of the generated row times kv_heads plus KV head. Later compacted to packed KV heads.
  std::vector<PackedHead> packed_;
  std::vector<HeadState*> heads_;
  std::vector<SlotSegment> segments_;  // of packed_, with gaps
  FloatSpace weights_;
};

}  // namespace kvlm
