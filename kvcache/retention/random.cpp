#include <algorithm>
#include <array>

#include "kvcache/chance.h"
#include "kvcache/retention/common.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {
    kKeep,
    OptionInfo{.key = "seed",
               .type = OptionInfo::Type::kInteger,
               .low = 0,
               .high = 2147483647,
               .standard = "0",
               .help = "seed of the random choice"},
    kHeadShared,
    kSinks,
    kLast,
    kEvict,
    kDistance,
};

/// Keeps random tokens: the baseline that every rule based on attention has to beat at equal bytes.
///
/// As uniform except for the score: round(r N) tokens of each layer, ties to even, but at least
/// sinks + 2. The first `sinks` stay, the last `last` (at most half), and random others, drawn for
/// every layer and kv_head (head_shared=on: for every layer). Decode evicts to the budget by the
/// same numbers, in random order with evict=score.
///
/// A token's number depends only on the seed, the layer, the kv_head and its index in the prompt.
/// So a request has the same answer in every batch and on every device, and another seed draws
/// anew. Layers that share codes use the first one's.
///
/// Source: our own baseline, in the spirit of NVIDIA/kvpress's RandomPress; docs/formulas.md,
/// "Random".
class Random final : public PlacedRule {
 public:
  Random(double keep, uint64_t seed, bool head_shared, const PlaceEviction& eviction)
      : PlacedRule(keep, eviction), seed_(seed), head_shared_(head_shared) {}

  ImportanceNeeds needs() const noexcept override { return {}; }
  bool per_head() const noexcept override { return !head_shared_ && !identity(); }

  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    if (identity()) return keep_everything(prompt);
    return for_units(prompt, pairs, [&](const Unit& unit) {
      LayerSelection selection{{}, 1 - keep()};
      for (int h = 0; h < (head_shared_ ? 1 : prompt.shape->kv_heads); ++h) {
        add_best(selection, numbers(unit.layers.front(), h, prompt.rows), kept(prompt.rows));
      }
      return selection;
    });
  }

  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override {
    return int64_t{layers} * peak_rows(kept(prompt_rows), 1 - keep(), prompt_rows, max_rows);
  }

 private:
  int kept(int n) const noexcept {
    return std::min(n, std::max(rounded_rows(keep(), n), eviction().ends.least()));
  }

  /// (n,) a number in [0, 1) per token.
  std::vector<double> numbers(int layer, int kv_head, int n) const {
    uint64_t stream = splitmix64(seed_);
    for (const int index : {layer, kv_head}) {
      stream = splitmix64(stream ^ static_cast<uint64_t>(index));
    }
    std::vector<double> result;
    for (int j = 0; j < n; ++j) {
      result.push_back(unit_number(splitmix64(stream ^ static_cast<uint64_t>(j))));
    }
    return result;
  }

  uint64_t seed_;
  bool head_shared_;
};

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<Random>(
      options.real("keep"), static_cast<uint64_t>(options.integer("seed")),
      options.text("head_shared") == "on", PlaceEviction::from(options, context));
}

}  // namespace

const RetentionEntry random{
    {.name = "random",
     .kind = PartKind::kRetention,
     .source = "baseline of this project",
     .stores = "per KV head, random tokens, equally many in every layer: what a retention rule has "
               "to beat",
     .composes = "any quantizer; share=codes and xquant only with head_shared=on",
     .options = kOptions,
     .example = "random,keep=0.5,seed=1"},
    make_rule};

}  // namespace kvlm::retention
