#include "kvcache/quantizers/common.h"

namespace kvlm::quantizers {

namespace {

/// KIVI with 2 bits in the first layers and 1 bit in the others, with separate limits for keys and
/// values. Source: AsymKV l_k/l_v as XQuant's appendices B and C describe it (docs/formulas.md,
/// "AsymKV").
class AsymKv final : public PlannedQuantizer {
 public:
  AsymKv(const OptionValues& options, const PolicyContext& context) {
    check_residual(options);
    const int group = options.integer("group");
    const int residual = options.integer("residual");
    const int tail_keep = tail_keep_of(options, context);
    const CacheShape& shape = *context.shape;
    const int key_layers =
        options.text("key_layers") == "auto" ? shape.layers : options.integer("key_layers");
    const int value_layers = options.integer("value_layers");
    for (int layer = 0; layer < shape.layers; ++layer) {
      keys_.push_back(packing_of(ScaleAxis::kChannel, layer < key_layers ? 2 : 1, group,
                                 shape.head_dim, meta_of(options)));
      keys_.back().flush = kivi_key_flush(residual, tail_keep);
      values_.push_back(packing_of(ScaleAxis::kToken, layer < value_layers ? 2 : 1, group,
                                   shape.head_dim, meta_of(options)));
      values_.back().flush = kivi_value_flush(residual, tail_keep);
    }
  }
};

constexpr std::array kOptions{
    kGroup,
    OptionInfo{
        .key = "key_layers",
        .type = OptionInfo::Type::kChannels,
        .low = 0,
        .high = 1024,
        .standard = "auto",
        .help =
            "number of first layers whose keys take 2 bits, the others take 1; auto: all layers"},
    kMeta,
    kResidual,
    kTailKeep,
    OptionInfo{.key = "value_layers",
               .type = OptionInfo::Type::kInteger,
               .low = 0,
               .high = 1024,
               .standard = "0",
               .help = "number of first layers whose values take 2 bits, the others take 1"},
};

}  // namespace

const QuantizerEntry asymkv{
    {.name = "asymkv",
     .kind = PartKind::kQuantizer,
     .source = "AsymKV, as in XQuant, appendices B and C",
     .stores = "as kivi: 2 bits in the first layers and 1 bit in the others",
     .composes = "any retention rule; share=codes where both layers of a pair have one bit width; "
                 "a quantizer with scope=visual",
     .options = kOptions,
     .example = "asymkv,key_layers=16",
     .arxiv = "2410.13212"},
    make<AsymKv>};

}  // namespace kvlm::quantizers
