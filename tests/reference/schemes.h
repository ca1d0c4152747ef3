#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/spec/policy.h"
#include "tests/reference/quantize.h"
#include "tests/reference/vidkv.h"

// What the words of a quantizer mean in numbers, written from docs/formulas.md, "Quantizers":
// widths, axes, shrunk ranges, windows, thresholds of layers. Not independent: the values of
// options and their defaults are read from the tables that the parser has (OptionValues), because
// most of them stand nowhere else.
namespace kvlm::reference {

/// CalibQuant's remap of scores.
struct Remap {
  double low = 0;
  double high = 0;
  bool guarded = false;
};

/// How one policy packs the rows of one layer.
struct Packer {
  Scheme keys;
  Scheme values;
  bool turns = false;         ///< rotate=hadamard or keys
  bool turns_values = false;  ///< rotate=hadamard
  bool visual_only = false;   ///< visual rows, once, when the prompt ends
  bool per_image = false;
  bool packs_keys = true;  ///< of visual_only
  bool packs_values = true;
  std::optional<Remap> remap;
  // VidKV
  bool reorders_keys = false;
  size_t finer = 0;  ///< channels of keys at 2 bits
  Criterion criterion = Criterion::kRange;
  bool fft = false;
  bool order_per_head = false;
  bool repacks_keys = false;
  bool repacks_values = false;
  double protect = 0;
  bool protects_as_published = false;
  std::optional<uint64_t> protects_by_chance;  ///< the seed
  Scheme protected_values;                     ///< of protected rows, if protect > 0
};

/// XQuant's weighted average of the codes of two layers (section 3.3.3, appendix F), rounded.
struct Average {
  double gamma = 0;     ///< weight of the first layer
  char rounding = 'n';  ///< to nearest, ties to even; 'f': down; 'c': up

  int operator()(int e0, int e1) const {
    const double mean = gamma * e0 + (1 - gamma) * e1;
    constexpr double kInexact = 1e-9;  // 0.9 * 3 + 0.1 * 3 is not 3
    if (rounding == 'f') return static_cast<int>(std::floor(mean + kInexact));
    if (rounding == 'c') return static_cast<int>(std::ceil(mean - kInexact));
    return static_cast<int>(std::nearbyint(mean));
  }
};

/// The layer whose codes a layer uses; empty: every layer its own.
struct Sharing {
  std::vector<int> keys;
  std::vector<int> values;
  std::vector<int> key_makers = {};  ///< the layer whose rows those codes are of; empty: that layer
  std::vector<int> value_makers = {};
  std::optional<Average> average = {};  ///< of both layers' codes, made when the second has its own
};

inline Scheme affine_scheme(Axis axis, int bits, size_t group, size_t dim, bool f32_meta) {
  Scheme scheme;
  scheme.axis = axis;
  scheme.group = group;
  scheme.f32_meta = f32_meta;
  scheme.sections.resize(1);
  scheme.sections[0].channels = dim;
  scheme.sections[0].bits = bits;
  return scheme;
}

/// KIVI's windows (docs/formulas.md, "KIVI" and "Windows"): keys go R at a time, values one at a
/// time.
inline void set_windows(int residual, int tail, Packer& packer) {
  packer.keys.unit = packer.keys.rows = residual;
  packer.keys.hold = tail;
  packer.keys.trigger = residual + tail;
  packer.values.unit = packer.values.rows = 1;
  packer.values.hold = std::max(residual, tail);
  packer.values.trigger = packer.values.hold + 1;
}

/// Layers of XQuant's thresholds: published for 32, scaled to the nearest even layer, ties upward.
struct XQuantLayers {
  int kq, vq, km, vm;

  XQuantLayers(const OptionValues& options, int layers) {
    const auto of = [&](const char* key, int published) {
      if (options.text(key) != "auto") return std::min(options.integer(key), layers);
      return 2 * static_cast<int>(std::floor(published * layers / 64.0 + 0.5));
    };
    kq = of("kq", 30);
    vq = of("vq", 2);
    km = of("km", 32);
    vm = of("vm", 16);
  }
};

inline Packer xquant(const OptionValues& options, Packer packer, int layer, int layers) {
  const XQuantLayers thresholds(options, layers);
  const auto set = [&](int bits, Scheme& scheme) {
    scheme.sections[0].bits = bits;
    scheme.sections[0].eta = static_cast<float>(options.real(bits == 1 ? "eta1" : "eta2"));
    scheme.sections[0].eta_of_step = options.text("calib") == "alg2";
  };
  set(layer < thresholds.kq ? 2 : 1, packer.keys);
  set(layer < thresholds.vq ? 2 : 1, packer.values);
  return packer;
}

/// Bits of keys and values of a policy for visual rows, 16 where they stay as they are.
inline std::pair<int, int> visual_widths(const OptionValues& options, Packer& packer) {
  const auto width = [&](const char* key) {
    return options.integer(options.text(key) == "auto" ? "bits" : key);
  };
  packer.visual_only = true;
  packer.packs_keys = width("key_bits") != 16;
  packer.packs_values = width("value_bits") != 16;
  return {width("key_bits"), width("value_bits")};
}

inline Packer calibquant(const OptionValues& options, size_t dim, bool f32_meta) {
  Packer packer;
  const auto [key_bits, value_bits] = visual_widths(options, packer);
  packer.keys = affine_scheme(Axis::kChannel, key_bits, 0, dim, f32_meta);
  const bool by_channel = options.text("value_axis") == "channel";
  packer.values =
      affine_scheme(by_channel ? Axis::kChannel : Axis::kHead, value_bits, 0, dim, f32_meta);
  packer.values.range_of_layer = options.text("value_axis") == "layer";
  packer.per_image = options.text("span") == "per_image";
  const auto shrink = [&](Section& section, const char* eta, const char* kappa) {
    const int bits = section.bits;  // the published constants are those of 1 bit
    if (options.text("shrink") == "eta" && (bits == 1 || options.given(eta))) {
      section.eta = static_cast<float>(options.real(eta));
    }
    if (options.text("shrink") == "kappa" && (bits == 1 || options.given(kappa))) {
      section.kappa = static_cast<float>(options.real(kappa));
    }
  };
  shrink(packer.keys.sections[0], "eta_k", "kappa_k");
  shrink(packer.values.sections[0], "eta_v", "kappa_v");
  const auto [low, high] = options.real_pair("tau");
  if (key_bits <= options.integer("calib_bits") && (low > 0 || high > 0)) {
    packer.remap = {low, high, options.text("guard") == "clamp0"};
  }
  return packer;
}

inline Packer head_quantile(const OptionValues& options, size_t dim, bool f32_meta) {
  Packer packer;
  const auto [key_bits, value_bits] = visual_widths(options, packer);
  const auto axes = options.text("group_axes");
  const Axis axis = axes == "channel" ? Axis::kChannel
                    : axes == "token" ? Axis::kToken
                                      : Axis::kHead;
  const auto scheme = [&](int bits) {
    if (bits > 1 && bits < 16 && !options.given("alpha")) {
      throw std::logic_error("the reference wants head_quantile's alpha written above 1 bit");
    }
    Scheme made = affine_scheme(axis, bits, axis == Axis::kToken ? dim : 0, dim, f32_meta);
    made.range_of_layer = axes == "layer";
    made.sections[0].alpha = static_cast<float>(options.real("alpha"));
    made.sections[0].floor = options.text("round") == "floor";
    return made;
  };
  packer.keys = scheme(key_bits);
  packer.values = scheme(value_bits);
  return packer;
}

/// VidKV's key channels at 2 bits: floor(D (b - 1)) with b in ten-thousandths; 32 where that would
/// be none of some.
inline size_t finer_channels(double bits, size_t dim) {
  const auto ten_thousandths = static_cast<size_t>(std::llround(bits * 10000)) - 10000;
  const size_t channels = ten_thousandths * dim / 10000;
  return ten_thousandths > 0 && channels == 0 ? std::min<size_t>(32, dim) : channels;
}

inline Packer vidkv(const OptionValues& options, size_t dim, size_t group, int residual, int tail,
                    bool f32_meta) {
  Packer packer;
  packer.reorders_keys = true;
  packer.finer = finer_channels(options.real("key_bits"), dim);
  const double bits = options.real("key_bits");
  const bool alg3 = options.text("fft") == "alg3" && (bits == 1.5 || bits == 1.75);
  packer.fft = (options.text("fft") == "on" || alg3) && packer.finer < dim;
  packer.criterion = options.text("criterion") == "range"      ? Criterion::kRange
                     : options.text("criterion") == "variance" ? Criterion::kVariance
                                                               : Criterion::kOutliers;
  packer.order_per_head = options.text("mask_scope") == "head";
  packer.repacks_keys = options.text("flush") != "append";
  packer.repacks_values = options.text("flush") == "requant_all";
  packer.keys = affine_scheme(Axis::kChannel, 2, group, packer.finer, f32_meta);
  if (packer.finer == 0) packer.keys.sections.clear();
  if (const size_t others = dim - packer.finer; others > 0) {
    Section section;
    section.channels = others;
    section.bits = 1;
    const auto onebit = options.text("onebit");
    section.kind = onebit == "minmax" ? Section::Kind::kAffine : Section::Kind::kSign;
    section.low = section.low_after = -1;
    section.high = section.high_after = 1;
    section.split = others;
    if (onebit == "zero_mean") {  // real parts are 0 or S, imaginary parts -S/2 or S/2
      section.low = 0;
      section.low_after = -0.5f;
      section.high_after = 0.5f;
      if (packer.fft) section.split = others / 2 + 1;
    }
    packer.keys.sections.push_back(section);
  }
  packer.protected_values = affine_scheme(Axis::kChannel, 2, group, dim, f32_meta);
  packer.values = packer.protected_values;
  if (options.text("value_axis") == "token") packer.values.axis = Axis::kToken;
  if (options.text("value_bits") == "1") packer.values.sections[0].bits = 1;
  if (options.text("value_bits") == "1.58") {
    Section& section = packer.values.sections[0];
    section.kind = Section::Kind::kTernary;
    section.gamma = static_cast<float>(options.real("gamma"));
    section.five_to_a_byte = options.text("trits") == "trit5";
    section.scale = options.text("scale") == "mean"  ? Section::Scale::kMean
                    : options.text("scale") == "twn" ? Section::Scale::kNonZero
                                                     : Section::Scale::kUnit;
  }
  if (options.text("value_bits") != "2") {
    packer.protect = options.real("protect");
    packer.protects_as_published = options.text("stp") == "official";
    if (options.text("protect_by") == "random") {
      packer.protects_by_chance = static_cast<uint64_t>(options.integer("seed"));
    }
  }
  for (Scheme* scheme : {&packer.keys, &packer.values}) {
    scheme->unit = static_cast<int>(group);
    scheme->hold = tail;
    scheme->trigger = residual + tail;
    scheme->rows = residual;
  }
  return packer;
}

/// What the words that a quantizer has for itself mean in `layer`; `with_retention` if rows are
/// dropped beside it.
inline Packer packer_alone(const OptionValues& options, const CacheShape& shape, int layer,
                           bool with_retention) {
  const std::string name(options.info().name);
  const auto dim = static_cast<size_t>(shape.head_dim);
  const bool f32_meta = options.text("meta") == "f32";
  if (name == "calibquant") return calibquant(options, dim, f32_meta);
  if (name == "head_quantile") return head_quantile(options, dim, f32_meta);
  int tail = with_retention ? 32 : 0;
  if (options.text("tail_keep") != "auto") tail = options.integer("tail_keep");
  Packer packer;
  if (name == "int4" || name == "int8" || name == "nf4") {
    packer.keys = affine_scheme(Axis::kToken, name == "int8" ? 8 : 4, dim, dim, f32_meta);
    if (name == "nf4") {
      packer.keys.group = static_cast<size_t>(options.integer("group"));
      packer.keys.sections[0].kind = Section::Kind::kNf4;
    }
    packer.keys.hold = tail;
    packer.keys.trigger = tail + 1;
    packer.values = packer.keys;
    return packer;
  }
  if (name == "turboquant") {
    const bool tables = options.text("values") == "table";
    const bool eight = options.integer("key_bits") == 8;
    packer.keys = affine_scheme(Axis::kToken, options.integer("key_bits"), dim, dim, f32_meta);
    packer.values = affine_scheme(Axis::kToken, options.integer("value_bits"), dim, dim, f32_meta);
    for (Scheme* scheme : {&packer.keys, &packer.values}) {
      Section& section = scheme->sections[0];
      const bool table = scheme == &packer.keys ? !eight : tables;
      if (table) section.kind = Section::Kind::kLloydMax;
      section.corrects_norm = options.text("norm") == "corrected";
      section.half_up = options.text("round") == "half_up";
      scheme->hold = tail;
      scheme->trigger = tail + 1;
    }
    packer.turns = tables || !eight;
    packer.turns_values = tables;
    return packer;
  }
  const auto group = static_cast<size_t>(options.integer("group"));
  const int residual = options.integer("residual");
  if (name == "vidkv") return vidkv(options, dim, group, residual, tail, f32_meta);
  const auto kivi = [&](int key_bits, int value_bits) {
    packer.keys = affine_scheme(Axis::kChannel, key_bits, group, dim, f32_meta);
    packer.values = affine_scheme(Axis::kToken, value_bits, group, dim, f32_meta);
    set_windows(residual, tail, packer);
  };
  if (name == "kivi") {
    const auto bits = [&](const char* key) {
      return options.text(key) == "auto" ? options.integer("bits") : options.integer(key);
    };
    kivi(bits("key_bits"), bits("value_bits"));
    return packer;
  }
  if (name == "asymkv") {
    const bool all = options.text("key_layers") == "auto";
    kivi(all || layer < options.integer("key_layers") ? 2 : 1,
         layer < options.integer("value_layers") ? 2 : 1);
    return packer;
  }
  if (name == "xquant") {
    kivi(2, 2);
    return xquant(options, packer, layer, shape.layers);
  }
  throw std::logic_error("the reference has no quantizer " + name);
}

/// The same with what all quantizers have.
inline Packer packer_of(const OptionValues& options, const CacheShape& shape, int layer,
                        bool with_retention) {
  Packer packer = packer_alone(options, shape, layer, with_retention);
  if (options.text("rotate") == "auto") return packer;
  packer.turns_values = options.text("rotate") == "hadamard";
  packer.turns = packer.turns_values || options.text("rotate") == "keys";
  return packer;
}

/// XQuant's groups of `group` layers, of which number `dominant` makes the codes if it shares them:
/// layers from `keys` and `values` on share, the first of a group excepted, whose memory they use.
inline Sharing sharing_in_groups(int keys, int values, int group, int dominant, int layers) {
  Sharing sharing;
  for (int first = 0; first < layers; first += group) {
    const int end = std::min(first + group, layers);
    const auto add = [&](int from, std::vector<int>& owners, std::vector<int>& makers) {
      const int wanted = first + dominant;
      const int maker = wanted < end && (dominant == 0 || wanted >= from) ? wanted : first;
      for (int layer = first; layer < end; ++layer) {
        const bool in_group = layer == first || layer >= from;
        owners.push_back(in_group ? first : layer);
        makers.push_back(in_group ? maker : layer);
      }
    };
    add(keys, sharing.keys, sharing.key_makers);
    add(values, sharing.values, sharing.value_makers);
  }
  return sharing;
}

/// Odd layers from `keys` and `values` on use the codes of the layer before.
inline Sharing sharing_from(int keys, int values, int layers) {
  Sharing sharing;
  for (int layer = 0; layer < layers; ++layer) {
    sharing.keys.push_back(layer % 2 == 1 && layer >= keys ? layer - 1 : layer);
    sharing.values.push_back(layer % 2 == 1 && layer >= values ? layer - 1 : layer);
  }
  return sharing;
}

}  // namespace kvlm::reference
