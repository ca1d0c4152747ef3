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

/// Elastic Cache: the most attended tokens are anchors, equally many in every layer. Every other
/// token is averaged, key and value, into the anchor nearest by position (docs/formulas.md,
/// "Merging"). Decode evicts to the budget (docs/formulas.md, "Eviction").
///
/// Source: Liu et al. 2024, "Efficient Inference of Vision Instruction-Following Models with
/// Elastic Cache", ECCV (arXiv 2407.18121), from descriptions of it; its published code,
/// liuzuyan/ElasticCache [C]; docs/formulas.md, "Elastic". From the code, under profile=official:
/// the score, a layer's attention summed over all queries and averaged over its heads. One sink and
/// the last token are kept, and nothing is averaged into them. Keys and values are averaged alike.
/// Decode evicts a fixed index, 25 before the end of the kept prompt ("fixed-point elimination"),
/// when (N + t) r tokens are exceeded. Departures:
///   - the code keeps tokens whose index in the order of scores holds a large number: it compares
///     the sorting permutation instead of ranks. It also averages the token before each dropped
///     one, as it forgets to add the number of sinks. We take both for bugs: here the best scores
///     stay, and the dropped tokens are averaged.
///   - round(r N) tokens stay, at least sinks + 2 [S]; there ceil(r N) - 1, by the same comparison.
///   - by default scores are divided by the number of queries that see the token, 16 last tokens
///     stay, sinks and last tokens are anchors too, and decode evicts the prompt's least token.
/// The descriptions do not state which kept tokens are anchors or what the offset counts from; both
/// are as in the code.
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
