#include <algorithm>
#include <array>

#include "kvcache/policies.h"
#include "kvcache/retention/common.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {kKeep, kOurSinks, kLast, kEvictIfAsked, kDistance};

/// Keeps the rows that the prompt's last row looks at, floor(r N) of them, and that row itself: one
/// set of rows for all heads of a layer. Nothing is evicted in decode unless asked for. At least
/// sinks + 1 rows stay [S].
///
/// Source: Oren et al. 2024, "Transformers are Multi-State RNNs" (TOVA) [G], as in NVIDIA/kvpress
/// [K]; docs/arithmetic.md, "TOVA". Departure: the original drops a row in every step, by that
/// step's attention; kvpress compresses the prompt only, and so do we.
class Tova final : public PlacedRule {
 public:
  using PlacedRule::PlacedRule;

  ImportanceNeeds needs() const noexcept override {
    if (identity()) return {};
    return {.rows = ImportanceNeeds::Rows::kLast, .last_rows = 1};
  }
  bool joint() const noexcept override { return false; }

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

  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override {
    return int64_t{layers} * peak_rows(kept(prompt_rows), 1 - keep(), prompt_rows, max_rows);
  }

 private:
  int kept(int n) const noexcept {
    return std::min(n, std::max(floored_rows(keep(), n), eviction().ends.alone()));
  }
};

std::unique_ptr<Retention> make(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<Tova>(options.real("keep"), PlaceEviction::from(options, context));
}

}  // namespace

const RetentionEntry tova{
    {.name = "tova",
     .kind = PartKind::kRetention,
     .source = "TOVA, as in kvpress",
     .stores = "the rows that the prompt's last row looks at, one set per layer",
     .composes = "any quantizer; pairs of layers that share codes keep the same rows",
     .options = kOptions},
    make};

}  // namespace kvlm::retention
