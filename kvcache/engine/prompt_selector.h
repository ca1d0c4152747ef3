#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "kernels/attention.h"
#include "kernels/base/buffer.h"
#include "kernels/column_sums.h"
#include "kvcache/engine/qkv_rows.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// By KvSide: stored prompt tokens of a layer, (kv_heads,).
using StoredSides = std::array<std::vector<StoredRows>, 2>;

/// Chooses the tokens of a first prompt to keep: computes what the retention rule needs
/// (docs/formulas.md, "Importance") and calls its select().
class PromptSelector {
 public:
  explicit PromptSelector(const CacheTraits& traits) : traits_(traits) {}

  /// The rule needs sums of attention.
  bool measures() const noexcept;
  /// The rule scores stored tokens.
  bool scores() const noexcept;
  /// The host selects for one group of layers while the GPU computes the next.
  bool selects_behind() const noexcept {
    return traits_.on_gpu() && measures() && !traits_.layouts().joint();
  }
  /// Layers per selection: the staged ones, or half of them if selects_behind().
  int group_layers() const noexcept {
    const int staged = traits_.layouts().staged_layers();
    return selects_behind() ? std::max(1, staged / 2) : staged;
  }
  /// Computes attention of prompt tokens that follow `past`, and the sums that the rule needs.
  void attend(Sequence& sequence, int layer, const QkvRows& x, std::span<const KeyValueRows> past,
              TensorView out, float scale, Stream& stream);
  /// Calls the rule's score() for a layer, once its whole prompt is stored.
  void score(Sequence& sequence, const StepRows& rows, int layer, const StoredSides& stored,
             ConstTensorView q, float scale, Stream& stream);
  /// Starts copying the sums of layers begin..end from the GPU, if the rule needs any. At most two
  /// calls may be pending, each until its select().
  void read_back(Sequence& sequence, int begin, int end, Stream& stream);
  /// The selections of layers begin..end (joint rules: of all layers). Waits for read_back().
  std::vector<LayerSelection> select(Sequence& sequence, int begin, int end, Stream& stream);
  /// Sums of a layer after its selection, (kv_heads, prompt rows), for rules that continue them in
  /// decode.
  const double* sums_of_heads(const Sequence& sequence, int layer) const noexcept;
  /// Keeps the memory of an ended prompt for the next one.
  void keep_memory(PromptState& prompt);

 private:
  int first_measured_row(const Sequence& sequence, int seen) const noexcept;
  size_t lists() const noexcept;
  double* sums_of(Sequence& sequence, int layer);
  void add_weighted(Sequence& sequence, int layer, const QkvRows& x,
                    std::span<const KeyValueRows> past, SummedRows summed, float scale,
                    Stream& stream);
  bool selects_by_means() const noexcept;
  void await(Sequence& sequence, int begin, int end, Stream& stream);
  PromptView view_of(const Sequence& sequence, int layer) const;
  size_t index_of(int layer) const noexcept { return traits_.layouts().staged_index(layer); }
  size_t staged_layers() const noexcept {
    return static_cast<size_t>(traits_.layouts().staged_layers());
  }

  const CacheTraits& traits_;
  Buffer received_;  // what each query gets, (prompt rows,)
  // Memory of the previous prompt, for reuse:
  Buffer spare_sums_;
  std::array<Readback, 2> spare_read_;
};

}  // namespace kvlm
