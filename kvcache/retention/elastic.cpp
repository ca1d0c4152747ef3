#include <algorithm>
#include <array>

#include "kvcache/retention/uniform.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {
    kKeep,
    kScore,
    kSinks,
    kLast,
    OptionInfo{.key = "anchors",
               .choices = "all|inner",
               .standard = "all",
               .official = "inner",
               .paper = "inner",
               .help = "kept tokens that evicted ones are averaged into. all: every kept token; "
                       "inner: those kept by score, neither sinks nor last"},
    OptionInfo{.key = kEvict.key,
               .choices = kEvict.choices,
               .standard = kEvict.standard,
               .official = "fixed_index",
               .paper = "fixed_index",
               .help = kEvict.help},
    kDistance,
};

/// Elastic Cache: the most attended rows are anchors, equally many in every layer, and every other
/// row is averaged, key and value, into the anchor that is nearest by position (docs/formulas.md,
/// "Merging"); decode evicts to the budget (docs/formulas.md, "Eviction").
///
/// Source: Liu et al. 2024, "Efficient Inference of Vision Instruction-Following Models with
/// Elastic Cache", ECCV (arXiv 2407.18121), from descriptions of it; its published code,
/// liuzuyan/ElasticCache [C]; docs/formulas.md, "Elastic". From the code, under profile=official:
/// the score, a layer's attention summed over all rows and averaged over its heads; one sink and
/// the last row kept, which no row is averaged into; means of an anchor and its rows, keys and
/// values alike; in decode the row at a fixed place, 25 before the end of what the prompt left
/// ("fixed-point elimination"), when (N + t) r rows are exceeded. Departures:
///   - the code keeps the rows whose place in the order of scores holds a large number: it compares
///     the permutation that sorts, not the ranks. And it averages the row before each dropped one,
///     as it forgets to add the number of sinks. Both are taken for slips: here the best scores
///     stay, and the rows that go are averaged.
///   - round(r N) rows stay, at least sinks + 2 [S]; there ceil(r N) - 1, by the same comparison.
///   - by default scores are means over the rows that can look, 16 last rows stay, sinks and last
///     rows are anchors too, and decode drops the prompt's least row.
/// Not stated, so far as descriptions go; chosen as in the code: which kept rows are anchors, what
/// the offset counts from.
class Elastic final : public Uniform {
 public:
  Elastic(double keep, Score score, bool inner_anchors, const PlaceEviction& eviction)
      : Uniform(keep, score, eviction), inner_anchors_(inner_anchors) {}

  MergeRule merge() const noexcept override {
    return identity() ? MergeRule::kNone : MergeRule::kPosition;
  }
  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    std::vector<LayerSelection> selections = Uniform::select(prompt, pairs);
    if (identity() || !inner_anchors_) return selections;
    for (LayerSelection& selection : selections) {
      selection.lone_last = eviction().ends.tail(selection.kept());
      selection.lone_first =
          std::min(eviction().ends.sinks, selection.kept() - selection.lone_last);
    }
    return selections;
  }

 private:
  bool inner_anchors_;
};

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<Elastic>(options.real("keep"), score_from(options),
                                   options.text("anchors") == "inner",
                                   PlaceEviction::from(options, context));
}

}  // namespace

const RetentionEntry elastic{
    {.name = "elastic",
     .kind = PartKind::kRetention,
     .source = "Elastic Cache and its code",
     .stores = "the tokens with the most attention, each averaged with the evicted tokens near it",
     .composes =
         "any quantizer; share=codes and xquant (the layers of a pair keep the same tokens)",
     .options = kOptions,
     .example = "elastic,keep=0.5",
     .arxiv = "2407.18121"},
    make_rule};

}  // namespace kvlm::retention
