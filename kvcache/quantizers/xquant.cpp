// XQuant: moved end levels, and layers that share codes. Departures from the paper are listed at
// the class.
#include <algorithm>

#include "kvcache/quantizers/common.h"

namespace kvlm::quantizers {

namespace {

/// Scales a threshold published for 32 layers to another number of layers: the nearest even layer,
/// ties upward (docs/formulas.md, "XQuant").
int scaled(int threshold, int layers) {
  return 2 * static_cast<int>((2 * threshold * layers + 64) / 128);
}

/// KIVI's layout with end levels moved inwards (eta) and groups of layers that share codes. By
/// default an odd layer stores only scales and reads the codes of the layer before. Source: XQuant
/// sections 3.2-3.3 and 4.3, eqs. 4-13, algs. 1-2, table 5 (docs/formulas.md, "XQuant").
/// Departures: none by default. Its algorithms mix up some thresholds; its code does not. Codes of
/// two layers are never averaged (its section 3.3.3; docs/formulas.md, "Not built").
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
    group_ = options.integer("layer_group");
    dominant_ = options.integer("dominant");
    if (dominant_ >= group_) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("--kv xquant,dominant={} is outside a group of {} layers; use 0 to "
                              "{}, or a larger layer_group",
                              dominant_, group_, group_ - 1));
    }
    check_groups("kq", kq, "km", km, shape.layers);
    check_groups("vq", vq, "vm", vm, shape.layers);
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
    const auto packing = [&](ScaleAxis axis, int bits, bool shared) {
      Packing made = packing_of(axis, bits, group, shape.head_dim, meta_of(options));
      made.rules[0].eta = static_cast<float>(bits == 1 ? eta1 : eta2);
      made.rules[0].eta_of_step = options.text("calib") == "alg2";
      made.flush = axis == ScaleAxis::kChannel ? kivi_key_flush(residual, tail_keep)
                                               : kivi_value_flush(residual, tail_keep);
      if (shared) made.nominal_bits = 0;
      return made;
    };
    bool any = false;
    for (int layer = 0; layer < shape.layers; ++layer) {
      const bool shares_keys = shares(layer, km);
      const bool shares_values = shares(layer, vm);
      keys_.push_back(packing(ScaleAxis::kChannel, layer < kq ? 2 : 1, shares_keys));
      values_.push_back(packing(ScaleAxis::kToken, layer < vq ? 2 : 1, shares_values));
      share_.key_owner.push_back(shares_keys ? first_of(layer) : layer);
      share_.value_owner.push_back(shares_values ? first_of(layer) : layer);
      share_.key_writer.push_back(writer(layer, km, shape.layers));
      share_.value_writer.push_back(writer(layer, vm, shape.layers));
      any |= shares_keys || shares_values;
    }
    for (const char* key : {"layer_group", "dominant"}) {
      refuse_idle(options, key, !any, "no layer of this decoder shares codes");
    }
  }

  ShareMap share() const override { return share_; }

 private:
  int first_of(int layer) const noexcept { return layer - layer % group_; }
  /// Layers from `from` on share codes, except the first of a group.
  bool shares(int layer, int from) const noexcept { return layer >= from && layer % group_ != 0; }
  /// The layer that makes the codes of `layer`: its group's dominant one if that shares too, else
  /// the first.
  int writer(int layer, int from, int layers) const noexcept {
    const int first = first_of(layer);
    const int dominant = first + dominant_;
    const bool has_dominant = dominant < layers && (dominant_ == 0 || shares(dominant, from));
    if (layer != first && !shares(layer, from)) return layer;
    return has_dominant ? dominant : first;
  }

  /// Throws if layers that share codes have different bits.
  void check_groups(const char* bits_key, int bits, const char* share_key, int share,
                    int layers) const {
    const int first = first_of(bits);
    for (int layer = bits; layer < std::min(first + group_, layers); ++layer) {
      if (first == bits || !shares(layer, share)) continue;
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("--kv xquant,{}={},{}={}: layers {} and {} share codes but would "
                              "have 2 bits and 1; use a multiple of {} for {}",
                              bits_key, bits, share_key, share, first, layer, group_, bits_key));
    }
  }

  int group_ = 2;     // layers per group
  int dominant_ = 0;  // index in the group of the layer that makes the codes
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
               .choices = "eq12|alg2",
               .standard = "eq12",
               .help = "zero point of the calibrated levels. eq12: equation 12; alg2: algorithm 2 "
                       "of the paper, which lacks a factor"},
    OptionInfo{.key = "dominant",
               .type = OptionInfo::Type::kInteger,
               .low = 0,
               .high = 3,
               .standard = "0",
               .help = "layer of a group whose codes the others use, counted from 0"},
    OptionInfo{.key = "eta1",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 0.5,
               .open_high = true,
               .standard = "0.16666666666666666",
               .help = "share of the range by which the end levels move towards the middle at 1 "
                       "bit. Without eta1=, --kv-profile supplies the measured value"},
    OptionInfo{.key = "eta2",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 0.5,
               .open_high = true,
               .standard = "0.045",
               .help = "share of the range by which the end levels move towards the middle at 2 "
                       "bits. Without eta2=, --kv-profile supplies the measured value"},
    kGroup,
    threshold_option("km",
                     "layers from this one on share key codes in groups; auto: 32 of 32 layers"),
    threshold_option("kq", "layers below this one have 2-bit keys; auto: 30 of 32 layers"),
    OptionInfo{.key = "layer_group",
               .type = OptionInfo::Type::kInteger,
               .low = 2,
               .high = 4,
               .standard = "2",
               .help = "neighbouring layers that share codes"},
    kMeta,
    kResidual,
    kTailKeep,
    threshold_option("vm",
                     "layers from this one on share value codes in groups; auto: 16 of 32 layers"),
    threshold_option("vq", "layers below this one have 2-bit values; auto: 2 of 32 layers"),
};

constexpr NotBuilt kNotBuilt[] = {
    {"merge",
     "codes of the layers of a group are not averaged (average, floor, ceil), since a GPU packs "
     "these layers in one launch without an order; use dominant= to choose the layer whose codes "
     "the group shares"},
};

}  // namespace

const QuantizerEntry xquant{
    {.name = "xquant",
     .kind = PartKind::kQuantizer,
     .source = "XQuant, sections 3.2-3.3, equations 4-13, algorithms 1-2",
     .stores = "as kivi at 2 bits and 1 bit with calibrated levels; each group of layers, by "
               "default a pair, stores the codes of one of them",
     .composes = "retention rules with one set of tokens per layer (the layers of a pair keep the "
                 "same tokens)",
     .options = kOptions,
     .example = "xquant,residual=32",
     .arxiv = "2510.11236",
     .not_built = kNotBuilt},
    make<XQuant>};

}  // namespace kvlm::quantizers
