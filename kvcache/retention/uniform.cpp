#include "kvcache/retention/uniform.h"

#include <algorithm>
#include <array>

#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {kKeep, kScore, kSinks, kLast, kEvict, kDistance};

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<Uniform>(options.real("keep"), score_from(options),
                                   PlaceEviction::from(options, context));
}

}  // namespace

ImportanceNeeds Uniform::needs() const noexcept {
  return {.rows = identity() ? ImportanceNeeds::Rows::kNone : ImportanceNeeds::Rows::kAll};
}

std::vector<LayerSelection> Uniform::select(const PromptView& prompt,
                                            std::span<const int> pairs) const {
  if (identity()) return keep_everything(prompt);
  const std::vector<Unit> units = units_of(prompt, pairs);
  std::vector<LayerSelection> selections;
  for (const Unit& unit : units) {
    selections.push_back({{}, 1 - keep()});
    add_best(selections.back(), unit_scores(prompt, unit, score_), kept(prompt.rows));
  }
  return by_layer(prompt, units, std::move(selections));
}

int64_t Uniform::peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept {
  return int64_t{layers} * peak_rows(kept(prompt_rows), 1 - keep(), prompt_rows, max_rows);
}

int Uniform::kept(int n) const noexcept {
  return std::min(n, std::max(rounded_rows(keep(), n), eviction().ends.least()));
}

const RetentionEntry uniform{
    {.name = "uniform",
     .kind = PartKind::kRetention,
     .source = "PrefixKV, table 4 (baseline)",
     .stores = "the tokens with the most attention, equally many in every layer",
     .composes =
         "any quantizer; share=codes and xquant (the layers of a pair keep the same tokens)",
     .options = kOptions,
     .example = "uniform,keep=0.5",
     .arxiv = "2412.03409"},
    make_rule};

}  // namespace kvlm::retention
