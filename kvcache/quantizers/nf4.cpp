#include "kvcache/quantizers/common.h"

namespace kvlm::quantizers {

namespace {

/// The NF4 codebook of QLoRA with one scale per group of channels of a token; tokens are packed
/// once they have been attended to. bitsandbytes stores scales in f32, or nested in 8 bits.
class Nf4 final : public PlannedQuantizer {
 public:
  Nf4(const OptionValues& options, const PolicyContext& context) {
    const int dim = context.shape->head_dim;
    const int group = std::min(options.integer("group"), dim);
    Packing packing = packing_of(ScaleAxis::kToken, 4, group, dim, meta_of(options));
    packing.format.section[0] = section_of(CodeFormat::kNf4, dim);
    packing.rules[0].rule = CodeRule::kCodebook;
    packing.flush.hold = tail_keep_of(options, context);
    packing.flush.trigger = packing.flush.hold + 1;
    keys_ = {packing};
    values_ = {packing};
  }
};

constexpr std::array kOptions{OptionInfo{.key = "group",
                                         .choices = "32|64|128",
                                         .standard = "64",
                                         .help = "channels of a token that share a scale"},
                              kMeta, kTailKeep};

}  // namespace

const QuantizerEntry nf4{
    {.name = "nf4",
     .kind = PartKind::kQuantizer,
     .source = "QLoRA, appendix E",
     .stores =
         "every token at 4 bits of a codebook for normal numbers, one scale per 64 channels of a "
         "token; keys suffer where biases of k_proj are large (vlm-run warns)",
     .composes = "any retention rule; share=codes; a quantizer with scope=visual",
     .options = kOptions,
     .example = "nf4",
     .arxiv = "2305.14314"},
    make<Nf4>};

}  // namespace kvlm::quantizers
