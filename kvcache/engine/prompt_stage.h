#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "kernels/attention.h"
#include "kernels/row_moves.h"
#include "kernels/store_rows.h"
#include "kvcache/engine/float_space.h"
#include "kvcache/engine/placement.h"
#include "kvcache/engine/prompt_packer.h"
#include "kvcache/engine/prompt_selector.h"
#include "kvcache/engine/qkv_rows.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/decode_weights.h"
#include "kvcache/extensions/sink_rotation.h"

namespace kvlm {

/// First prompts: exact attention. At the end the tokens that PromptSelector selects are merged and
/// packed (docs/formulas.md, "Life cycle").
class PromptStage {
 public:
  PromptStage(const CacheTraits& traits, const Placement& placement, PromptPacker& packer,
              DecodeWeights& weights, SinkRotation& sinks);

  void reserve() { past_.reserve(2 * traits_.kv_heads()); }
  /// Attends to tokens of a first prompt in a layer and stages their K and V.
  ///   x       input of attention; in the basis of `stored` if tokens were staged before
  ///   stored  the same tokens as they are stored
  void attend(Sequence& sequence, const StepRows& rows, int layer, const QkvRows& x,
              const QkvRows& stored, TensorView out, float scale, Stream& stream);
  /// Selection needs results of the GPU, so the host waits for them.
  bool waits() const noexcept { return selector_.measures() || selector_.scores(); }
  /// If a layer's selection does not depend on other layers, the prompt is finished in groups of
  /// layers. True if `layer` is the last of a group: then finish_group() follows attend().
  bool ends_group(const StepRows& rows, int layer) const noexcept;
  /// Finishes the group that ends with `layer`. If selection lags one group behind the GPU, it
  /// finishes the previous group, and at the last layer both.
  void finish_group(Sequence& sequence, const StepRows& rows, int layer, Stream& stream);
  /// Ends a pass over all layers. Returns whether the prompt has ended.
  bool end(Sequence& sequence, const StepRows& rows, Stream& stream);

 private:
  /// By KvSide: how many tokens of each KV head are packed.
  using PackedCounts = std::array<std::vector<int>, 2>;
  /// The kept tokens of a layer, by store.
  struct KeptLayer {
    int layer = 0;
    const LayerSelection* selection = nullptr;
    std::array<KeptSlots, kStores> slots;
    std::array<PackedCounts, kStores> packed;
  };

  void count_rows(Sequence& sequence, int rows);
  std::byte* staged_rows(const Sequence& sequence, int layer, KvSide side, size_t head) const;
  void stage(Sequence& sequence, int layer, KvSide side, ConstTensorView x, Stream& stream);
  StoredSides stored_sides(const Sequence& sequence, const StepRows& rows, int layer) const;
  void finish(Sequence& sequence, int begin, int end, Stream& stream);
  void finish_layers(Sequence& sequence, std::span<const KeptLayer> layers, Stream& stream);
  KeptLayer keep(Sequence& sequence, int layer, const LayerSelection& selection) const;
  void place(Sequence& sequence, const KeptLayer& kept) const;
  std::array<KeptSlots, kStores> sort_by_store(const Sequence& sequence, LayerState& state,
                                               const LayerSelection& selection) const;
  void merge_dropped(const Sequence& sequence, int layer, const LayerSelection& selection,
                     Stream& stream);
  void merge_head(const Sequence& sequence, int layer, size_t head, const LayerSelection& selection,
                  Stream& stream);
  void simulate(const Sequence& sequence, int layer, const LayerSelection& selection,
                Stream& stream);
  bool lies_packable(const KeptLayer& kept, size_t store, KvSide side, size_t head) const;
  std::vector<std::array<KeptRows, kStores>> packed_rows(const Sequence& sequence,
                                                         std::span<const KeptLayer> layers,
                                                         Stream& stream);
  DenseRows gather(const Sequence& sequence, const KeptLayer& kept, size_t store, KvSide side,
                   size_t head, std::byte*& to);
  void pack_layers(Sequence& sequence, std::span<const KeptLayer> layers, Stream& stream);
  void queue_full(Sequence& sequence, const KeptLayer& kept);
  void begin_weights(Sequence& sequence, int layer, std::span<const KeptSlots> slots,
                     Stream& stream);
  void rotate_sinks(const Sequence& sequence, LayerState& state, const LayerSelection& selection,
                    Stream& stream);

  const CacheTraits& traits_;
  const Placement& placement_;
  PromptPacker& packer_;
  PromptSelector selector_;
  DecodeWeights& weights_;
  SinkRotation& sinks_;
  std::vector<RowDestination> destinations_;  // (kv_heads,)
  std::vector<KeyValueRows> past_;            // (kv_heads,) tokens staged earlier
  std::vector<const std::byte*> sources_;
  std::vector<std::byte*> targets_;
  std::vector<ListedRows> listed_;   // to gather unchanged
  std::vector<ListedRows> widened_;  // to gather as floats
  FloatSpace floats_;                // tokens gathered to be packed or merged
};

}  // namespace kvlm
