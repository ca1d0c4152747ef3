#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/row_batch.h"
#include "kernels/row_moves.h"
#include "kernels/slot_weights.h"
#include "kernels/store_rows.h"
#include "kvcache/arena.h"
#include "kvcache/engine/evictor.h"
#include "kvcache/engine/float_space.h"
#include "kvcache/engine/for_sequences.h"
#include "kvcache/engine/prompt_packer.h"
#include "kvcache/engine/row_appender.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/engine/unpacker.h"
#include "kvcache/engine/window_packer.h"
#include "kvcache/extensions/decode_weights.h"
#include "kvcache/extensions/key_basis.h"
#include "kvcache/extensions/protected_values.h"
#include "kvcache/extensions/sink_rotation.h"
#include "kvcache/extensions/visual_remap.h"
#include "kvcache/kv_cache.h"
#include "kvcache/layouts.h"
#include "kvcache/plane.h"

namespace kvlm {

/// What attention reads of one kv_head of a layer, visual slots first where they are stored apart.
struct HeadRows {
  std::vector<float> keys, values;  ///< (slots, head_dim)
  std::vector<int16_t> tags;        ///< (slots,) modality
  std::vector<ScoreRemap> remaps;   ///< of scores, before the softmax
};

/// A cache of any composition of retention, quantizers and sharing (specs 10.1):
///
///   prompt rows in full precision -> retained slots of each layer -> merged -> visual | other
///   -> packed blocks -> shared codes;  decode: append, attend, flush, evict
///
/// The first prompt of a sequence comes in one pass, unless retention chooses for all layers at
/// once. Rows of later prompts attend to what is stored and then pass through decode's bookkeeping
/// one by one. See policy_prompt.cpp and policy_decode.cpp.
class PolicyCache final : public KvCache {
 public:
  /// Caches of one plan share it, so that it is made once for all of a session.
  PolicyCache(std::shared_ptr<const CachePlan> plan, size_t arena_bytes, Device device);

  const CacheShape& shape() const noexcept override { return shape_; }
  const std::string& spec() const noexcept override { return parts_.spec; }
  CacheNeeds needs() const noexcept override;

  SequenceId open(const SequenceSize& size, const std::string& who) override;
  void close(SequenceId sequence) noexcept override;
  void begin(std::span<const StepRows> step) override;
  void give_embeddings(ConstTensorView embeddings, Stream& stream) override;
  void attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream) override;
  Repetition repetition() const noexcept override;
  void repeated() noexcept override;
  void end(Stream& stream) override;

  int tokens(SequenceId sequence) const noexcept override { return at(sequence).rows; }
  int next_position(SequenceId sequence) const noexcept override;
  size_t bytes() const noexcept override { return arena_.used(); }
  CacheReport report(SequenceId sequence) const noexcept override;

  const CachePlan& plan() const noexcept { return parts_; }
  /// The state of a layer, between steps. For tests and tools.
  const LayerState& layer(SequenceId sequence, int layer) noexcept {
    catch_up(at(sequence));
    return at(sequence).layers[static_cast<size_t>(layer)];
  }
  /// What the newest attend() of `layer` has read, (kv_heads,): in a step, with its row. For tests
  /// and tools: nothing that serves a request reads keys.
  std::vector<HeadRows> inspect(SequenceId sequence, int layer, Stream& stream);

 private:
  /// A lane has keys and values of two stores, each in at most three runs, and protected values.
  static constexpr size_t kRunsPerLane = 13;

  Sequence& at(SequenceId id) noexcept { return sequences_[static_cast<size_t>(id)]; }
  const Sequence& at(SequenceId id) const noexcept { return sequences_[static_cast<size_t>(id)]; }
  size_t heads() const noexcept { return static_cast<size_t>(shape_.kv_heads); }
  size_t dim() const noexcept { return static_cast<size_t>(shape_.head_dim); }
  size_t row_bytes() const noexcept { return dim() * dtype_bytes(parts_.rows); }
  StoreIndex store_of(int16_t tag) const noexcept {
    return parts_.split && tag != kTextRow ? kVisual : kRest;
  }
  size_t first_store() const noexcept { return parts_.split ? kVisual : kRest; }
  const LayerTraits& plan_of(int layer) const noexcept { return traits_.layer(layer); }
  void reserve_workspace();
  void account(Sequence& sequence) noexcept;
  void count_planes(Sequence& sequence) noexcept;

  // policy_quiet.cpp
  bool goes_on() const noexcept;
  int room(size_t layer) const noexcept;
  bool one_packs(const Plane& plane, Part part, int layer) const noexcept;
  bool will_slide(const Plane& plane, Part part, int layer) const noexcept;
  size_t quiet_row_bytes(const Sequence& sequence) const noexcept;
  void describe_rings(int layer, Stream& stream);
  void pack_oldest(size_t layer, Stream& stream);
  bool can_keep();
  bool is_plain(const HeadState& lane, int layer) const noexcept;
  void catch_up(Sequence& sequence) noexcept;
  void count_rows(HeadState& lane, int layer, int rows);
  void show_newest(HeadState& lane) const;
  bool holds_uncounted_row(SequenceId sequence, int layer) const noexcept;
  int quiet_rows(const Sequence& sequence) const noexcept;
  int rows_until_eviction(const Sequence& sequence, int most) const noexcept;
  void decode_on(int layer, const float* q, ConstTensorView k, ConstTensorView v, TensorView out,
                 float scale, Stream& stream);

  // policy_prompt.cpp
  std::byte* staged_rows(const Sequence& sequence, int layer, Part part,
                         size_t head) const noexcept;
  void attend_first_prompt(Sequence& sequence, const StepRows& rows, int layer, ConstTensorView q,
                           ConstTensorView k, ConstTensorView v, TensorView out, float scale,
                           Stream& stream);
  void attend_later_prompt(Sequence& sequence, const StepRows& rows, int layer, ConstTensorView q,
                           ConstTensorView k, ConstTensorView v, TensorView out, float scale,
                           Stream& stream);
  void measure(Sequence& sequence, int layer, ConstTensorView q, ConstTensorView k, float scale,
               Stream& stream);
  std::vector<LayerSelection> select(const Sequence& sequence, int layer) const;
  void finish_layer(Sequence& sequence, int layer, const LayerSelection& selection, Stream& stream);
  void place_layer(Sequence& sequence, int layer, std::span<const std::array<int, kStores>> counts,
                   double forget);
  std::array<KeptRows, kStores> kept_rows(const Sequence& sequence, int layer,
                                          std::span<const KeptSlots> slots, Stream& stream);
  void merge_dropped(const Sequence& sequence, int layer, const LayerSelection& selection,
                     Stream& stream);

  // policy_decode.cpp
  void add_plain(const PackedLane& packed, const HeadState& lane, RowBatch& batch) const;
  void decode(int layer, const float* q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream);
  size_t describe_lanes(size_t first, size_t last, int layer, const float* q, float* out);
  size_t describe_lane(HeadState& lane, int layer, size_t index, SlotRun* memory);
  void prefetch_generated(size_t i, size_t last, int layer, size_t head) const noexcept;
  void add_key_runs(const HeadState& lane, size_t store, int layer, size_t index, RunList& runs);
  void run_packed(std::span<PackedLane> lanes, int layer, const float* q, float* out, float scale,
                  Stream& stream);
  void settle(Stream& stream);

  CacheTraits traits_;
  const CachePlan& parts_ = traits_.plan();
  const CacheShape& shape_ = traits_.shape();
  const Layouts& layouts_ = traits_.layouts();
  KeyBasisChange key_basis_{traits_};
  ProtectedValues protected_values_{traits_};
  DecodeWeights decode_weights_{traits_};
  VisualRemap remap_{traits_};
  SinkRotation sinks_{traits_};
  RowAppender appender_{traits_};
  Evictor evictor_{traits_, decode_weights_, sinks_};
  Unpacker unpacker_{traits_, protected_values_};
  PromptPacker prompt_packer_{traits_, key_basis_, protected_values_};
  WindowPacker window_packer_{traits_, unpacker_, key_basis_};
  Arena arena_;
  std::vector<Sequence> sequences_;
  std::span<const StepRows> step_;

  // Workspaces sized by open(), so that decode allocates nothing.
  std::vector<RowDestination> destinations_;  // (kv_heads,)
  std::vector<Sequence*> settling_;
  std::vector<KeyValueRows> past_;
  /// A generated row, while a layer attends.
  struct Generated {
    Sequence* sequence;
    int64_t row;     // of the step
    float* weights;  // (kv_heads, q_per_kv, at most max_rows)
  };
  std::vector<Generated> generated_;
  // By number of the generated row times kv_heads, plus the kv_head; then those of packed lanes.
  std::vector<PackedLane> packed_;
  std::vector<HeadState*> packed_lanes_;
  std::vector<SlotRun> runs_;  // of these lanes, with gaps
  FloatSpace weights_;
  FloatSpace queries_;  // a copy of a pass's queries
  std::vector<const std::byte*> row_sources_;
  std::vector<std::byte*> row_targets_;
  FloatSpace prompt_floats_;           // rows of a layer of a prompt, kept and sorted by store
  FloatSpace inspected_;               // keys and values of lanes
  std::vector<float> inspected_rows_;  // the same on the host
  // The lanes of the last generated rows, which the next step takes up again if it can.
  std::vector<PackedBatch> batches_;  // (layers,)
  std::vector<RowBatch> plain_;       // (layers,) those of them that hold nothing packed
  std::vector<uint8_t> all_plain_;    // (layers,) 1: these are all
  std::vector<std::array<RingPacker, 2>> packers_;  // (layers, keys and values) of rings that slide
  std::vector<std::array<uint8_t, 2>> packs_;       // 1: there are some
  std::vector<PackedRing> rings_;
  std::vector<SequenceId> kept_batch_;  // whose they are; empty: none are kept
  uint64_t kept_number_ = 0;            // of these lanes
  bool keep_ = false;                   // this step's lanes are kept, once it has ended
  bool goes_on_ = false;                // this step takes up the last one's
  bool in_step_ = false;                // begin() has been, end() has not
  int attended_ = 0;                    // layers that this step has passed
};

}  // namespace kvlm
