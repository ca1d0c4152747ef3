#include "kvcache/quantizers/common.h"

namespace kvlm::quantizers {

namespace {

/// 8-bit min-max with one scale per token and head; tokens are packed once they have been attended
/// to. The usual baseline of serving engines.
class Int8 final : public PlannedQuantizer {
 public:
  Int8(const OptionValues& options, const PolicyContext& context) {
    const int dim = context.shape->head_dim;
    Packing packing = packing_of(ScaleAxis::kToken, 8, dim, dim, meta_of(options));
    packing.flush.hold = tail_keep_of(options, context);
    packing.flush.trigger = packing.flush.hold + 1;
    keys_ = {packing};
    values_ = {packing};
  }
};

constexpr std::array kOptions{kMeta, kTailKeep};

}  // namespace

const QuantizerEntry int8{
    {.name = "int8",
     .kind = PartKind::kQuantizer,
     .source = "baseline",
     .stores = "every token at 8 bits, one scale per token and KV head",
     .composes = "any retention rule; share=codes; a quantizer with scope=visual",
     .options = kOptions,
     .example = "int8"},
    make<Int8>};

}  // namespace kvlm::quantizers
