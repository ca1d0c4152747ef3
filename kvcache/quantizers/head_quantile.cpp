#include "kvcache/quantizers/common.h"

namespace kvlm::quantizers {

namespace {

/// Visual keys and values with one range per head, between two quantiles of their values. Source:
/// "From 16-Bit to 1-Bit: Visual KV Cache Quantization", sections 3.3-3.4, eqs. 3-9 (specs 4).
/// Departures: rounds to nearest (the paper floors, which leaves most codes 0: round=floor), a
/// range per sequence, alpha 0.2 (the paper gives none).
class HeadQuantile final : public PlannedQuantizer {
 public:
  HeadQuantile(const OptionValues& options, const PolicyContext& context) {
    const int dim = context.shape->head_dim;
    const std::string_view axes = options.text("group_axes");
    const ScaleAxis axis = axes == "head"      ? ScaleAxis::kHead
                           : axes == "channel" ? ScaleAxis::kChannel
                                               : ScaleAxis::kToken;
    PartPlan plan = plan_of(axis, options.integer("bits"), axis == ScaleAxis::kToken ? dim : 0, dim,
                            meta_of(options));
    const bool profiled =
        context.profile != nullptr && context.profile->alpha.has_value() && !options.given("alpha");
    plan.rules[0].alpha =
        static_cast<float>(profiled ? *context.profile->alpha : options.real("alpha"));
    plan.rules[0].rounding =
        options.text("round") == "floor" ? Rounding::kFloor : Rounding::kNearestEven;
    keys_ = {plan};
    values_ = {plan};
  }

  bool visual_only() const noexcept override { return true; }
};

constexpr std::array kOptions{
    OptionInfo{.key = "alpha",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 0.5,
               .open_high = true,
               .standard = "0.2",
               .help = "share of values beyond either end of the range; 0: minimum and maximum"},
    OptionInfo{.key = "bits",
               .type = OptionInfo::Type::kInteger,
               .low = 1,
               .high = 8,
               .standard = "1",
               .help = "width of a code"},
    OptionInfo{.key = "group_axes",
               .type = OptionInfo::Type::kChoice,
               .choices = "head|channel|token",
               .standard = "head",
               .help = "one range per head, per head and channel, or per head and token"},
    kMeta,
    OptionInfo{.key = "round",
               .type = OptionInfo::Type::kChoice,
               .choices = "nearest|floor",
               .standard = "nearest",
               .paper = "floor",
               .help = "how a value between two levels is coded"},
    kVisualScope,
};

}  // namespace

const QuantizerEntry head_quantile{
    {.name = "head_quantile",
     .kind = PartKind::kQuantizer,
     .source = "1BitVKV, 3.3-3.4, eqs. 3-9",
     .stores = "visual rows at 1 to 8 bits, one quantile range per head; other rows full",
     .composes = "any retention; share=codes; a quantizer with scope=text",
     .options = kOptions},
    make<HeadQuantile>};

}  // namespace kvlm::quantizers
