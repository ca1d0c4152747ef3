#include "kvcache/quantizers/common.h"

namespace kvlm::quantizers {

namespace {

/// Share of a Gaussian beyond the end levels of the optimal uniform quantizer, by bits (Max 1960,
/// "Quantizing for minimum distortion", table II, and its continuation).
constexpr double kGaussianTails[9] = {0,       0.2,     0.0676,  0.0201, 0.00597,
                                      0.00177, 0.00052, 0.00015, 0.00004};

/// Visual keys and values with one range per head, between two quantiles of their values. Source:
/// "From 16-Bit to 1-Bit: Visual KV Cache Quantization", sections 3.3-3.4, eqs. 3-9
/// (docs/formulas.md, "head_quantile"). Departures: at more than 1 bit, alpha is that of
/// kGaussianTails unless given or in a profile of this width. With 0.2, so much is clipped that 8
/// bits are no better than 1 (profile=paper: 0, since the paper's quantiles are for 1 bit). Rounds
/// to nearest (the paper floors, which leaves most codes 0: round=floor). One range per sequence.
/// alpha is 0.2 at 1 bit (the paper gives none).
class HeadQuantile final : public PlannedQuantizer {
 public:
  HeadQuantile(const OptionValues& options, const PolicyContext& context) {
    check_visual_bits(options);
    keys_ = {make_packing(options, context, visual_bits(options, "key_bits"))};
    values_ = {make_packing(options, context, visual_bits(options, "value_bits"))};
  }

  bool visual_only() const noexcept override { return true; }
  bool packs(KvSide side) const noexcept override { return packing(side, 0).nominal_bits < 16; }

 private:
  static Packing make_packing(const OptionValues& options, const PolicyContext& context, int bits) {
    if (bits == 16) return unpacked();
    const int dim = context.shape->head_dim;
    const std::string_view axes = options.text("group_axes");
    const ScaleAxis axis = axes == "channel" ? ScaleAxis::kChannel
                           : axes == "token" ? ScaleAxis::kToken
                                             : ScaleAxis::kHead;
    Packing packing =
        packing_of(axis, bits, axis == ScaleAxis::kToken ? dim : 0, dim, meta_of(options));
    packing.range_of_layer = axes == "layer";
    packing.rules[0].alpha = static_cast<float>(alpha_of(options, context, bits));
    packing.rules[0].rounding =
        options.text("round") == "floor" ? Rounding::kFloor : Rounding::kNearestEven;
    return packing;
  }
  static double alpha_of(const OptionValues& options, const PolicyContext& context, int bits) {
    if (options.given("alpha")) return options.real("alpha");
    // Eqs. 8-9 are for 1-bit codes; wider ones use the whole range (eqs. 3-6).
    if (options.text("profile") == "paper" && bits > 1) return 0;
    const bool as_fitted = options.text("profile") != "official" &&
                           options.text("group_axes") == "head" &&
                           options.text("round") == "nearest";
    const double* alpha = fitted(context.profile, &PolicyProfile::alpha, bits);
    if (alpha != nullptr && as_fitted) return *alpha;
    return bits > 1 ? kGaussianTails[bits] : options.real("alpha");
  }
};

constexpr std::array kOptions{
    OptionInfo{.key = "alpha",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 0.5,
               .open_high = true,
               .standard = "0.2",
               .help = "share of values clipped at each end of the range. Without alpha=, "
                       "--kv-profile supplies the value measured at this bit width, else 0.2 at 1 "
                       "bit and less at more bits (paper: 0)"},
    OptionInfo{.key = "bits",
               .type = OptionInfo::Type::kInteger,
               .low = 1,
               .high = 8,
               .standard = "1",
               .help = "bit width of keys and values"},
    OptionInfo{
        .key = "group_axes",
        .choices = "layer|head|channel|token",
        .standard = "head",
        .help = "which numbers share a range. layer: those of a layer; head: those of a KV head; "
                "channel: those of a channel of a head; token: those of a token in a head"},
    OptionInfo{.key = "key_bits",
               .choices = "auto|1|2|3|4|5|6|7|8|16",
               .standard = "auto",
               .help = "bit width of keys; 16: keys are not packed; auto: bits"},
    kMeta,
    OptionInfo{
        .key = "round",
        .choices = "nearest|floor",
        .standard = "nearest",
        .paper = "floor",
        .help = "rounding between two levels. nearest: to the nearer one; floor: to the lower one"},
    kVisualScope,
    OptionInfo{.key = "value_bits",
               .choices = "auto|1|2|3|4|5|6|7|8|16",
               .standard = "auto",
               .help = "bit width of values; 16: values are not packed; auto: bits"},
};

}  // namespace

const QuantizerEntry head_quantile{
    {.name = "head_quantile",
     .kind = PartKind::kQuantizer,
     .source = "1BitVKV, sections 3.3-3.4, equations 3-9",
     .stores =
         "visual tokens at 1 to 8 bits, one quantile range per KV head; other tokens unquantized; "
         "keys suffer where biases of k_proj are large (vlm-run warns)",
     .composes = "any retention rule; share=codes; a quantizer with scope=text",
     .options = kOptions,
     .example = "head_quantile,bits=2 + int4,scope=text",
     .arxiv = "2502.14882v1"},
    make<HeadQuantile>};

}  // namespace kvlm::quantizers
