#include <algorithm>

#include "kvcache/quantizers/common.h"

namespace kvlm::quantizers {

namespace {

/// A threshold published for 32 layers, for another number of them: the nearest even layer, ties
/// upward (docs/arithmetic.md, "XQuant").
int scaled(int threshold, int layers) {
  return 2 * static_cast<int>((2 * threshold * layers + 64) / 128);
}

/// KIVI's layout with end levels moved inwards (eta) and pairs of layers that share codes: an odd
/// layer stores scales alone and reads the codes of the layer before. Source: XQuant sections
/// 3.2-3.3, eqs. 4-13, algs. 1-2 (docs/arithmetic.md, "XQuant"). Departures: none by default; its
/// algorithms mix up some thresholds, which its code does not.
class XQuant final : public PlannedQuantizer {
 public:
  XQuant(const OptionValues& options, const PolicyContext& context) {
    check_residual(options);
    const CacheShape& shape = *context.shape;
    const auto threshold = [&](const char* key, int published) {
      const int layer =
          options.text(key) == "auto" ? scaled(published, shape.layers) : options.integer(key);
      return std::min(layer, shape.layers);
    };
    const int kq = threshold("kq", 30);
    const int vq = threshold("vq", 2);
    const int km = threshold("km", 32);
    const int vm = threshold("vm", 16);
    check_pairs("kq", kq, "km", km, shape.layers);
    check_pairs("vq", vq, "vm", vm, shape.layers);
    const auto eta_of = [&](const char* key, int bits) {
      const double* eta = fitted(context.profile, &PolicyProfile::eta, bits);
      const bool as_fitted =
          options.text("profile") != "official" && options.text("calib") != "alg2";
      return eta != nullptr && as_fitted && !options.given(key) ? *eta : options.real(key);
    };
    const double eta1 = eta_of("eta1", 1);
    const double eta2 = eta_of("eta2", 2);
    const int group = options.integer("group");
    const int residual = options.integer("residual");
    const int tail_keep = tail_keep_of(options, context);
    const auto plan = [&](ScaleAxis axis, int bits, bool shared) {
      PartPlan made = plan_of(axis, bits, group, shape.head_dim, meta_of(options));
      made.rules[0].eta = static_cast<float>(bits == 1 ? eta1 : eta2);
      made.rules[0].eta_of_step = options.text("calib") == "alg2";
      made.flush = axis == ScaleAxis::kChannel ? kivi_key_flush(residual, tail_keep)
                                               : kivi_value_flush(residual, tail_keep);
      if (shared) made.nominal_bits = 0;
      return made;
    };
    for (int layer = 0; layer < shape.layers; ++layer) {
      const bool shares_keys = layer >= km && layer % 2 == 1;
      const bool shares_values = layer >= vm && layer % 2 == 1;
      keys_.push_back(plan(ScaleAxis::kChannel, layer < kq ? 2 : 1, shares_keys));
      values_.push_back(plan(ScaleAxis::kToken, layer < vq ? 2 : 1, shares_values));
      share_.key_owner.push_back(shares_keys ? layer - 1 : layer);
      share_.value_owner.push_back(shares_values ? layer - 1 : layer);
    }
  }

  ShareMap share() const override { return share_; }

 private:
  /// A layer that shares codes has as many bits as the layer they come from.
  static void check_pairs(const char* bits_key, int bits, const char* share_key, int share,
                          int layers) {
    if (bits > share && bits % 2 != 0 && bits < layers) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("--kv xquant,{}={},{}={}: layers {} and {} share codes and would have "
                      "2 bits and 1; use an even {}",
                      bits_key, bits, share_key, share, bits - 1, bits, bits_key));
    }
  }

  ShareMap share_;
};

constexpr OptionInfo threshold_option(std::string_view key, std::string_view help) {
  return {.key = key,
          .type = OptionInfo::Type::kChannels,
          .low = 0,
          .high = 1024,
          .standard = "auto",
          .help = help};
}

constexpr std::array kOptions{
    OptionInfo{.key = "calib",
               .type = OptionInfo::Type::kChoice,
               .choices = "eq12|alg2",
               .standard = "eq12",
               .help = "alg2: the zero point of algorithm 2, which lacks a factor"},
    OptionInfo{.key = "eta1",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 0.5,
               .open_high = true,
               .standard = "0.16666666666666666",
               .help = "share by which end levels move inwards at 1 bit; unless given, that of "
                       "--kv-profile"},
    OptionInfo{.key = "eta2",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 0.5,
               .open_high = true,
               .standard = "0.045",
               .help = "the same at 2 bits; unless given, that of --kv-profile"},
    kGroup,
    threshold_option("km", "pairs from this layer on share key codes; auto: 32 of 32"),
    threshold_option("kq", "layers before this one have 2-bit keys; auto: 30 of 32"),
    kMeta,
    kResidual,
    kTailKeep,
    threshold_option("vm", "pairs from this layer on share value codes; auto: 16 of 32"),
    threshold_option("vq", "layers before this one have 2-bit values; auto: 2 of 32"),
};

}  // namespace

const QuantizerEntry xquant{
    {.name = "xquant",
     .kind = PartKind::kQuantizer,
     .source = "XQuant, 3.2-3.3, eqs. 4-13, algs. 1-2",
     .stores = "as kivi at 2 and 1 bits with calibrated levels; odd layers share the codes of the "
               "layer before",
     .composes = "retention with one set per layer (pairs keep the same slots)",
     .options = kOptions},
    make<XQuant>};

}  // namespace kvlm::quantizers
