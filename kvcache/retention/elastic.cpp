#include <array>

#include "kvcache/policies.h"
#include "kvcache/retention/uniform.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {kKeep, kScore, kSinks, kLast, kEvict, kDistance};

/// Elastic Cache: the most attended rows are anchors, equally many in every layer, and every other
/// row is averaged, key and value, into the anchor that is nearest by position (docs/arithmetic.md,
/// "Merging"); decode evicts to the budget (docs/arithmetic.md, "Eviction"), the published rule
/// being fixed_index.
///
/// As PrefixKV's paper describes it; its own code was not read [G].
///
/// Source: Liu et al. 2024, "Efficient Inference of Vision Instruction-Following Models with
/// Elastic Cache" [G]; docs/arithmetic.md, "Elastic".
class Elastic final : public Uniform {
 public:
  using Uniform::Uniform;
  MergeRule merge() const noexcept override {
    return identity() ? MergeRule::kNone : MergeRule::kPosition;
  }
};

std::unique_ptr<Retention> make(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<Elastic>(options.real("keep"), score_from(options),
                                   PlaceEviction::from(options, context));
}

}  // namespace

const RetentionEntry elastic{
    {.name = "elastic",
     .kind = PartKind::kRetention,
     .source = "Elastic Cache, as PrefixKV describes it",
     .stores = "the rows that got most attention, each the mean of itself and its neighbours",
     .composes = "any quantizer; pairs of layers that share codes keep the same rows",
     .options = kOptions},
    make};

}  // namespace kvlm::retention
