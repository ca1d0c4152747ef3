#include "kvcache/quantizers/common.h"

namespace kvlm::quantizers {

namespace {

/// Keys min-max per channel over groups of tokens, values min-max per token over groups of
/// channels, after a residual window of unpacked tokens. Source: Liu et al. 2024, "KIVI", as in its
/// code, and as XQuant and VidKV use it as a baseline (docs/formulas.md, "KIVI").
class Kivi final : public PlannedQuantizer {
 public:
  Kivi(const OptionValues& options, const PolicyContext& context) {
    check_residual(options);
    refuse_idle(options, "bits",
                options.text("key_bits") != "auto" && options.text("value_bits") != "auto",
                "key_bits and value_bits set both bit widths");
    const int group = options.integer("group");
    const int residual = options.integer("residual");
    const int tail_keep = tail_keep_of(options, context);
    const int dim = context.shape->head_dim;
    const auto bits = [&](const char* part) {
      return options.text(part) == "auto" ? options.integer("bits") : options.integer(part);
    };
    keys_ = {packing_of(ScaleAxis::kChannel, bits("key_bits"), group, dim, meta_of(options))};
    keys_[0].flush = kivi_key_flush(residual, tail_keep);
    values_ = {packing_of(ScaleAxis::kToken, bits("value_bits"), group, dim, meta_of(options))};
    values_[0].flush = kivi_value_flush(residual, tail_keep);
  }
};

constexpr std::array kOptions{
    OptionInfo{.key = "bits",
               .type = OptionInfo::Type::kInteger,
               .low = 1,
               .high = 8,
               .standard = "2",
               .help = "bit width of keys and values"},
    kGroup,
    OptionInfo{.key = "key_bits",
               .type = OptionInfo::Type::kChannels,
               .low = 1,
               .high = 8,
               .standard = "auto",
               .help = "bit width of keys; auto: bits"},
    kMeta,
    kResidual,
    kTailKeep,
    OptionInfo{.key = "value_bits",
               .type = OptionInfo::Type::kChannels,
               .low = 1,
               .high = 8,
               .standard = "auto",
               .help = "bit width of values; auto: bits"},
};

}  // namespace

const QuantizerEntry kivi{
    {.name = "kivi",
     .kind = PartKind::kQuantizer,
     .source = "KIVI and its code",
     .stores = "keys per channel in groups of tokens, values per token in groups of channels; the "
               "newest tokens stay unquantized (residual window)",
     .composes = "any retention rule; share=codes; a quantizer with scope=visual",
     .options = kOptions,
     .example = "kivi,bits=2,residual=32",
     .arxiv = "2402.02750"},
    make<Kivi>};

}  // namespace kvlm::quantizers
