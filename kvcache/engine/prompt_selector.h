#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "kernels/attention.h"
#include "kvcache/engine/qkv_rows.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// By KvSide, what a layer has stored of a prompt, (kv_heads,).
using StoredSides = std::array<std::vector<StoredRows>, 2>;

/// Which rows of a first prompt stay: gathers what the retention rule asks for (docs/formulas.md,
/// "Importance") and lets it select.
class PromptSelector {
 public:
  explicit PromptSelector(const CacheTraits& traits) : traits_(traits) {}

  /// Whether the rule asks for sums of attention.
  bool measures() const noexcept;
  /// Whether it scores stored rows.
  bool scores() const noexcept;
  /// The host selects for a group of layers while a GPU is at the next.
  bool selects_behind() const noexcept {
    return traits_.on_gpu() && measures() && !traits_.layouts().joint();
  }
  /// Layers that are selected for together: those staged, or half of them if it selects_behind().
  int group_layers() const noexcept {
    const int staged = traits_.layouts().staged_layers();
    return selects_behind() ? std::max(1, staged / 2) : staged;
  }
  /// Attends rows of a prompt, which come behind `past`, and sums their attention as the rule asks.
  void attend(Sequence& sequence, int layer, const QkvRows& x, std::span<const KeyValueRows> past,
              TensorView out, float scale, Stream& stream);
  /// Lets the rule score what a layer has stored of a prompt, once all is there.
  void score(Sequence& sequence, const StepRows& rows, int layer, const StoredSides& stored,
             ConstTensorView q, float scale, Stream& stream);
  /// Asks a GPU for the sums that the rule selects layers begin..end by, if it asks for any. Of two
  /// groups at most that select() has not had.
  void read_back(Sequence& sequence, int begin, int end, Stream& stream);
  /// The selections of layers begin..end, of all at once if joint; waits for their read_back().
  std::vector<LayerSelection> select(Sequence& sequence, int begin, int end, Stream& stream);
  /// The sums of a layer that has been selected for, (kv_heads, prompt rows), if a rule goes on
  /// with them in decode.
  const double* sums_of_heads(const Sequence& sequence, int layer) const noexcept;
  /// Keeps the memory of a prompt that has ended for the next one.
  void keep_memory(PromptState& prompt);

 private:
  int first_measured_row(const Sequence& sequence, int seen) const noexcept;
  double* sums_of(Sequence& sequence, int layer);
  bool selects_by_means() const noexcept;
  void await(Sequence& sequence, int begin, int end, Stream& stream);
  PromptView view_of(const Sequence& sequence, int layer) const;
  size_t index_of(int layer) const noexcept { return traits_.layouts().staged_index(layer); }
  size_t staged_layers() const noexcept {
    return static_cast<size_t>(traits_.layouts().staged_layers());
  }

  const CacheTraits& traits_;
  // Of the prompt that has ended, for the next:
  Buffer spare_sums_;
  std::array<Readback, 2> spare_read_;
};

}  // namespace kvlm
