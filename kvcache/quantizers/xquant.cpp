// XQuant: moved end levels, and layers that share codes. Departures from the paper are listed at
// the class.
#include <algorithm>
#include <cmath>

#include "kvcache/quantizers/common.h"

namespace kvlm::quantizers {

namespace {

/// Scales a threshold published for 32 layers to another number of layers: the nearest even layer,
/// ties upward (docs/formulas.md, "XQuant").
int scaled(int threshold, int layers) {
  return 2 * static_cast<int>((2 * threshold * layers + 64) / 128);
}

/// PackRule::merge of the layer whose code c1 joins the stored code c0 of the layer before.
uint32_t averages(double gamma, std::string_view rounding) {
  uint32_t merge = 0;
  for (int c0 = 0; c0 < 4; ++c0) {
    for (int c1 = 0; c1 < 4; ++c1) {
      const double mean = c1 + gamma * (c0 - c1);  // exact if both are the same
      const double code = rounding == "floor"  ? std::floor(mean)
                          : rounding == "ceil" ? std::ceil(mean)
                                               : std::nearbyint(mean);
      merge |= static_cast<uint32_t>(code) << 2 * (4 * c0 + c1);
    }
  }
  return merge;
}

/// Whether such a table stores another code than the first layer's, of codes of 1 bit.
bool changes_signs(uint32_t merge) { return (merge >> 2 & 3) != 0 || (merge >> 8 & 3) != 1; }

/// KIVI's layout with end levels moved inwards (eta) and groups of layers that share codes. By
/// default an odd layer stores only scales and reads the codes of the layer before. Source: XQuant
/// sections 3.2-3.3 and 4.3, eqs. 4-13, algs. 1-2, table 5 (docs/formulas.md, "XQuant").
/// Departures: none by default. Its algorithms mix up some thresholds; its code does not.
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
    const bool averaged = options.text("merge") == "average";
    if (averaged && group_ > 2) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("--kv xquant,merge=average,layer_group={}: only codes of pairs of "
                              "layers are averaged; use layer_group=2, or leave out merge=average",
                              group_));
    }
    const uint32_t merge =
        averaged ? averages(options.real("gamma"), options.text("round")) : uint32_t{0};
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
      if (shared) made.rules[0].merge = merge;
      return made;
    };
    bool any = false;
    bool merges = false;  // codes of 1 bit may all be the first layer's
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
      merges |= (shares_keys && (layer < kq || changes_signs(merge))) ||
                (shares_values && (layer < vq || changes_signs(merge)));
    }
    for (const char* key : {"layer_group", "dominant", "merge"}) {
      refuse_idle(options, key, !any, "no layer of this decoder shares codes");
    }
    refuse_idle(options, "dominant", averaged, "merge=average uses the codes of both layers");
    refuse_idle(options, "merge", averaged && !merges,
                "rounding gives the first layer's codes, as merge=dominant does; share codes of 2 "
                "bits (kq=, km=, vq=, vm=), or set gamma= below 0.5 or round=");
    for (const char* key : {"gamma", "round"}) {
      refuse_idle(options, key, !averaged, "it applies to averaged codes only (merge=average)");
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
    OptionInfo{.key = "gamma",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 1,
               .standard = "0.8",
               .help = "merge=average: weight of the first layer's code; the second has the rest"},
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
    OptionInfo{.key = "merge",
               .choices = "dominant|average",
               .standard = "dominant",
               .help = "codes that a group shares. dominant: those of one layer; average: the mean "
                       "of both codes of a pair, a whole number again"},
    kMeta,
    kResidual,
    OptionInfo{.key = "round",
               .choices = "nearest|floor|ceil",
               .standard = "nearest",
               .help = "merge=average: rounding of the mean, with ties to even"},
    kTailKeep,
    threshold_option("vm",
                     "layers from this one on share value codes in groups; auto: 16 of 32 layers"),
    threshold_option("vq", "layers below this one have 2-bit values; auto: 2 of 32 layers"),
};

}  // namespace

const QuantizerEntry xquant{
    {.name = "xquant",
     .kind = PartKind::kQuantizer,
     .source = "XQuant, sections 3.2-3.3, equations 4-13, algorithms 1-2",
     .stores = "as kivi at 2 bits and 1 bit with calibrated levels; each group of layers, by "
               "default a pair, stores the codes of one of them or their mean",
     .composes = "retention rules with one set of tokens per layer (the layers of a pair keep the "
                 "same tokens)",
     .options = kOptions,
     .example = "xquant,residual=32",
     .arxiv = "2510.11236"},
    make<XQuant>};

}  // namespace kvlm::quantizers
