#include <fmt/format.h>

#include <utility>

#include "kernels/base/error.h"
#include "kvcache/quantizers/common.h"

// CalibQuant: shrunk ranges per channel over visual tokens, and the linear remap of their scores.
// Departures from the paper are listed at the class.
namespace kvlm::quantizers {

namespace {

/// Visual keys and values with one range per channel over all visual tokens. A linear remap lowers
/// the visual scores' peaks, which few bits inflate. Source: CalibQuant sections 4.1-4.3, eqs. 3-8,
/// algs. 1-2 (docs/formulas.md, "CalibQuant"). Departures: at 1 bit the end levels move towards the
/// middle of the range (shrink=eta), not towards zero as in its code (shrink=kappa) or not at all
/// as in its text (shrink=none). The remap's slope cannot become negative (guard=clamp0). tau is
/// the code's, unless a profile of this width has one; the paper searches 0..3 for each model
/// (profile=paper: refused without a profile).
class CalibQuant final : public PlannedQuantizer {
 public:
  CalibQuant(const OptionValues& options, const PolicyContext& context)
      : per_image_(options.text("span") == "per_image") {
    check_visual_bits(options);
    const int key_bits = visual_bits(options, "key_bits");
    const std::string_view shrink = options.text("shrink");
    for (const char* key : {"eta_k", "eta_v"}) {
      refuse_idle(options, key, shrink != "eta", "it applies with shrink=eta only");
    }
    for (const char* key : {"kappa_k", "kappa_v"}) {
      refuse_idle(options, key, shrink != "kappa", "it applies with shrink=kappa only");
    }
    const int value_bits = visual_bits(options, "value_bits");
    for (const char* key : {"eta_k", "kappa_k"}) {
      refuse_idle(options, key, key_bits == 16, "keys are not packed");
    }
    for (const char* key : {"eta_v", "kappa_v", "value_axis"}) {
      refuse_idle(options, key, value_bits == 16, "values are not packed");
    }
    for (const char* key : {"tau", "guard"}) {
      refuse_idle(options, key, key_bits > options.integer("calib_bits"),
                  "scores are remapped only where keys have at most calib_bits bits");
    }
    const std::string_view of = options.text("value_axis");
    if (of == "layer" && per_image_) {
      throw Error(ErrorCode::kInvalidArgument,
                  "--kv calibquant,span=per_image,value_axis=layer asks for one range per image "
                  "and one range for all values of a layer; use span=union or value_axis=head");
    }
    const auto packing = [&](ScaleAxis axis, int bits, const char* eta, const char* kappa) {
      if (bits == 16) return unpacked();
      Packing made = packing_of(axis, bits, 0, context.shape->head_dim, meta_of(options));
      const bool one_bit = bits == 1;
      // The published constants are for 1 bit; explicit ones apply at any width.
      if (shrink == "eta" && (one_bit || options.given(eta))) {
        made.rules[0].eta = static_cast<float>(options.real(eta));
      }
      if (shrink == "kappa" && (one_bit || options.given(kappa))) {
        made.rules[0].kappa = static_cast<float>(options.real(kappa));
      }
      return made;
    };
    keys_ = {packing(ScaleAxis::kChannel, key_bits, "eta_k", "kappa_k")};
    values_ = {packing(of == "channel" ? ScaleAxis::kChannel : ScaleAxis::kHead, value_bits,
                       "eta_v", "kappa_v")};
    values_[0].range_of_layer = of == "layer";
    if (key_bits > options.integer("calib_bits")) return;
    const auto [low, high] = tau_of(options, context, key_bits);
    remap_ = {static_cast<float>(low), static_cast<float>(high), options.text("guard") == "clamp0"};
    remaps_ = low != 0 || high != 0;
  }

  bool visual_only() const noexcept override { return true; }
  bool per_image() const noexcept override { return per_image_; }
  bool packs(KvSide side) const noexcept override { return packing(side, 0).nominal_bits < 16; }
  const RemapRule* remap(int) const noexcept override { return remaps_ ? &remap_ : nullptr; }

 private:
  static std::pair<double, double> tau_of(const OptionValues& options, const PolicyContext& context,
                                          int bits) {
    if (options.given("tau")) return options.real_pair("tau");
    const std::string_view shrink = options.text("shrink");
    const auto* tau = shrink == "eta" ? fitted(context.profile, &PolicyProfile::tau, bits)
                      : shrink == "none"
                          ? fitted(context.profile, &PolicyProfile::tau_unshrunk, bits)
                          : nullptr;  // the published code has its own
    if (tau != nullptr && options.text("profile") != "official") return *tau;
    if (options.text("profile") == "paper") {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("--kv calibquant,profile=paper needs the tau that a search on the model "
                      "finds, and no profile has one for bits={}; {}write tau=A:B",
                      bits,
                      bits > 2 ? std::string()
                               : fmt::format("measure it with vlm-kv profile --policy calibquant "
                                             "--bits {} and pass the file with --kv-profile, or ",
                                             bits)));
    }
    return options.real_pair("tau");
  }

  bool per_image_;
  RemapRule remap_;
  bool remaps_ = false;
};

constexpr OptionInfo shrink_option(std::string_view key, std::string_view standard,
                                   std::string_view help) {
  return {.key = key,
          .type = OptionInfo::Type::kReal,
          .low = 0,
          .high = key.starts_with("eta") ? 0.5 : 1,
          .open_high = key.starts_with("eta"),
          .standard = standard,
          .help = help};
}

constexpr std::array kOptions{
    OptionInfo{.key = "bits",
               .choices = "1|2|4|8",
               .standard = "1",
               .help = "bit width of keys and values"},
    OptionInfo{.key = "calib_bits",
               .type = OptionInfo::Type::kInteger,
               .low = 0,
               .high = 8,
               .standard = "2",
               .help = "largest key bit width at which attention scores are remapped; 0: never"},
    shrink_option("eta_k", "0.25",
                  "share of the range by which the two end levels of keys move towards the middle, "
                  "with shrink=eta; by default at 1 bit only"),
    shrink_option("eta_v", "0.35",
                  "share of the range by which the two end levels of values move towards the "
                  "middle, with shrink=eta; by default at 1 bit only"),
    OptionInfo{.key = "guard",
               .choices = "clamp0|none",
               .standard = "clamp0",
               .official = "none",
               .paper = "none",
               .help = "clamp0: a remap with a negative slope takes slope 0, so that it never "
                       "reverses the order of scores; none: no guard"},
    shrink_option(
        "kappa_k", "0.5",
        "factor on both ends of the range of keys, with shrink=kappa; by default at 1 bit only"),
    shrink_option(
        "kappa_v", "0.3",
        "factor on both ends of the range of values, with shrink=kappa; by default at 1 bit only"),
    OptionInfo{.key = "key_bits",
               .choices = "auto|1|2|4|8|16",
               .standard = "auto",
               .help = "bit width of keys; 16: keys are not packed; auto: bits"},
    kMeta,
    kVisualScope,
    OptionInfo{.key = "shrink",
               .choices = "eta|kappa|none",
               .standard = "eta",
               .official = "kappa",
               .paper = "none",
               .help = "how the extreme levels are corrected. eta: the end levels move towards the "
                       "middle of the range; kappa: both ends of the range are scaled towards "
                       "zero; none: plain min-max"},
    OptionInfo{.key = "span",
               .choices = "union|per_image",
               .standard = "union",
               .help = "union: all images of a sequence share ranges and remap; per_image: each "
                       "image has its own"},
    OptionInfo{.key = "tau",
               .type = OptionInfo::Type::kRealPair,
               .low = 0,
               .high = 1000,
               .standard = "0:3",
               .help = "the remap lowers the smallest visual score by A and the largest by B. "
                       "Without tau=, --kv-profile supplies the values measured at this bit width; "
                       "profile=paper has no other default"},
    OptionInfo{.key = "value_axis",
               .choices = "channel|head|layer",
               .standard = "channel",
               .help = "which values share a range. channel: those of a channel; head: those of a "
                       "KV head; layer: those of a layer"},
    OptionInfo{.key = "value_bits",
               .choices = "auto|1|2|4|8|16",
               .standard = "auto",
               .help = "bit width of values; 16: values are not packed; auto: bits"},
};

}  // namespace

const QuantizerEntry calibquant{
    {.name = "calibquant",
     .kind = PartKind::kQuantizer,
     .source = "CalibQuant, sections 4.1-4.3, equations 3-8",
     .stores =
         "visual tokens at 1, 2, 4 or 8 bits, one range per channel; other tokens unquantized",
     .composes = "any retention rule; share=codes; a quantizer with scope=text",
     .options = kOptions,
     .example = "calibquant,bits=2 + int4,scope=text",
     .arxiv = "2502.14882"},
    make<CalibQuant>};

}  // namespace kvlm::quantizers
