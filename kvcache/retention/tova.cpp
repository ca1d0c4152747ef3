#include <algorithm>
#include <array>

#include "kvcache/retention/common.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {
    kKeep,
    kOurSinks,
    kLast,
    OptionInfo{
        .key = "evict",
        .choices = "step|none|score|window|fixed_index|sliding",
        .standard = "step",
        .help =
            "which token decode evicts. step: in every step, the one that the new token attends to "
            "least, as published; none: no token, as in kvpress; other values as in prefixkv"},
    kDistance,
};

/// Keeps the floor(r N) tokens that the newest token attends to most: one set for all heads of a
/// layer, by the mean of their weights. At the end of the prompt its last token chooses. Then every
/// step evicts the token that the new token attends to least, so the cache keeps its size. At least
/// sinks + 1 tokens stay [S].
///
/// Source: Oren et al. 2024, "Transformers are Multi-State RNNs" (TOVA) [G]; docs/formulas.md,
/// "TOVA". Departures: sinks and last stay whatever their weights (profile=official: only the
/// prompt's last token), and so does the newest token, which in the paper is treated as any other.
/// A later prompt evicts one token for each of its own, by the weights of its last one. evict=none
/// is NVIDIA/kvpress's way, which only compresses the prompt [K].
class Tova final : public PlacedRule {
 public:
  using PlacedRule::PlacedRule;

  ImportanceNeeds needs() const noexcept override {
    if (identity()) return {};
    const bool by_step = eviction().rule == PlaceEviction::Rule::kStep;
    using Weights = ImportanceNeeds::DecodeWeights;
    return {.rows = ImportanceNeeds::Rows::kLast,
            .last_rows = 1,
            .decode_weights = by_step ? Weights::kOfStep : Weights::kNone};
  }

  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    if (identity()) return keep_everything(prompt);
    const std::vector<Unit> units = units_of(prompt, pairs);
    std::vector<LayerSelection> selections;
    for (const Unit& unit : units) {
      selections.push_back({{}, 1 - keep()});
      add_best(selections.back(), unit_scores(prompt, unit), kept(prompt.rows));
    }
    return by_layer(prompt, units, std::move(selections));
  }

  int peak_rows_of_layer(int /*layers*/, int prompt_rows, int max_rows) const noexcept override {
    return peak_rows(kept(prompt_rows), 1 - keep(), prompt_rows, max_rows);
  }

 private:
  int kept(int n) const noexcept {
    return std::min(n, std::max(floored_rows(keep(), n), eviction().ends.alone()));
  }
};

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext& context) {
  const double keep = options.real("keep");
  PlaceEviction eviction = PlaceEviction::from(options, context);
  // With keep=1 no layer has a size to keep.
  if (keeps_everything(keep)) eviction.rule = PlaceEviction::Rule::kNone;
  return std::make_unique<Tova>(keep, eviction);
}

}  // namespace

const RetentionEntry tova{
    {.name = "tova",
     .kind = PartKind::kRetention,
     .source = "TOVA",
     .stores = "the tokens that the newest token attends to most, one set per layer",
     .composes =
         "any quantizer; share=codes and xquant (the layers of a pair keep the same tokens)",
     .options = kOptions,
     .example = "tova,keep=0.5",
     .arxiv = "2401.06104"},
    make_rule};

}  // namespace kvlm::retention
