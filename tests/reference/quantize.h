#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "tests/reference/half.h"

// Independent: codes, scales and zero points of a block of rows, written from docs/formulas.md,
// "Codes", with codes as integers: nothing here knows of bits, bytes or kernels. Codes are made in
// float where that page says f32, because a code is a rounding; means are in double.
namespace kvlm::reference {

/// Which elements share a scale.
enum class Axis { kHead, kChannel, kToken };

/// The codebook of NF4 (QLoRA, appendix E; bitsandbytes/functional.py).
inline constexpr double kNormalFloats[16] = {-1,
                                             -0.6961928009986877,
                                             -0.5250730514526367,
                                             -0.39491748809814453,
                                             -0.28444138169288635,
                                             -0.18477343022823334,
                                             -0.09105003625154495,
                                             0,
                                             0.07958029955625534,
                                             0.16093020141124725,
                                             0.24611230194568634,
                                             0.33791524171829224,
                                             0.44070982933044434,
                                             0.5626170039176941,
                                             0.7229568362236023,
                                             1};

/// Positive numbers of the codebooks that lose least of a normal distribution (Lloyd and Max).
inline constexpr double kLloydMax3[] = {0.245094, 0.756005, 1.343909, 2.151946};
inline constexpr double kLloydMax4[] = {0.128395, 0.388048, 0.656759, 0.942340,
                                        1.256231, 1.618046, 2.069017, 2.732590};

/// Channels that are coded alike.
struct Section {
  enum class Kind { kAffine, kTernary, kSign, kNf4, kLloydMax };
  enum class Scale { kMean, kNonZero, kUnit };

  Kind kind = Kind::kAffine;
  size_t channels = 0;
  // kAffine: b bits in [kappa Q_alpha, kappa Q_{1-alpha}], end levels moved inwards by eta.
  int bits = 0;
  float alpha = 0;
  float kappa = 1;
  float eta = 0;
  bool eta_of_step = false;
  bool floor = false;
  bool half_up = false;
  // kTernary
  float gamma = 0;
  Scale scale = Scale::kMean;
  bool five_to_a_byte = true;
  // kLloydMax: `bits` of a table times the norm of a row.
  bool corrects_norm = true;
  // kSign: codes 0 and 1 stand for these multiples of the scale, from channel `split` on for the
  // other two.
  float low = 0, high = 0;
  size_t split = 0;
  float low_after = 0, high_after = 0;

  /// kLloydMax: the number of the table over the root of the channels, and as it is read.
  double table_number(int code) const {
    const int half = 1 << (bits - 1);
    const auto at = static_cast<size_t>(code < half ? half - 1 - code : code - half);
    const double magnitude = bits == 3 ? kLloydMax3[at] : kLloydMax4[at];
    return (code < half ? -magnitude : magnitude) / std::sqrt(static_cast<double>(channels));
  }
  double read_number(int code) const {
    const double part = table_number(code) / table_number((1 << bits) - 1);
    const auto most = static_cast<float>(bits == 3 ? kLloydMax3[3] : kLloydMax4[7]);
    // Not independent in one point: the step of the numbers is a float, since the scale is rounded.
    const float step = most / 127 / std::sqrt(static_cast<float>(channels));
    return static_cast<double>(step) * std::nearbyint(127 * part);
  }

  size_t row_bytes() const {
    if (kind == Kind::kSign) return (channels + 7) / 8;
    if (kind == Kind::kNf4) return (channels + 1) / 2;
    if (kind == Kind::kAffine || kind == Kind::kLloydMax) {
      return (channels * static_cast<size_t>(bits) + 7) / 8;
    }
    return five_to_a_byte ? (channels + 4) / 5 : (2 * channels + 7) / 8;
  }
  /// What `code` of a channel means under a scale and a zero point.
  float value(size_t channel, int code, float scale_of_group, float zero) const {
    switch (kind) {
      case Kind::kTernary:
        return scale_of_group * static_cast<float>(code - 1);
      case Kind::kSign:
        if (channel < split) return scale_of_group * (code == 0 ? low : high);
        return scale_of_group * (code == 0 ? low_after : high_after);
      case Kind::kNf4:  // read as integers
        return static_cast<float>(static_cast<double>(scale_of_group) *
                                  std::nearbyint(127 * kNormalFloats[static_cast<size_t>(code)]) /
                                  127);
      case Kind::kLloydMax:  // likewise
        return static_cast<float>(static_cast<double>(scale_of_group) * read_number(code));
      case Kind::kAffine:
        break;
    }
    return static_cast<float>(static_cast<double>(scale_of_group) * code +
                              static_cast<double>(zero));
  }
};

/// How the keys or the values of a layer are packed, and when.
struct Scheme {
  Axis axis = Axis::kToken;
  bool range_of_layer = false;  ///< kHead: the range is that of all heads of the layer
  size_t group = 0;  ///< kToken: channels, else rows that share a scale; 0: all rows of a block
  bool f32_meta = false;
  std::vector<Section> sections;
  /// After a prompt of n rows floor((n - hold) / unit) units are packed; in decode `rows` rows,
  /// once `trigger` are not.
  int unit = 1, hold = 0, trigger = 1, rows = 1;

  size_t channels() const {
    size_t sum = 0;
    for (const Section& section : sections) sum += section.channels;
    return sum;
  }
  size_t row_bytes() const {
    size_t sum = 0;
    for (const Section& section : sections) sum += section.row_bytes();
    return sum;
  }
  /// Bytes of the scales and zero points of a block; only affine codes have zero points.
  size_t meta_bytes(size_t block_rows) const {
    const size_t each = f32_meta ? 4 : 2;
    if (axis == Axis::kHead) return 2 * each;
    if (axis == Axis::kToken) {
      const size_t numbers = sections[0].kind == Section::Kind::kAffine ? 2 : 1;
      return numbers * each * block_rows * ((channels() + group - 1) / group);
    }
    size_t numbers = 0;
    for (const Section& section : sections) {
      numbers += section.channels * (section.kind == Section::Kind::kAffine ? 2 : 1);
    }
    return numbers * each;
  }
};

/// Codes of elements that share a scale.
struct Group {
  std::vector<int> codes;
  float scale = 0;
  float zero = 0;
};

/// The value at place (n - 1) alpha of the sorted ones, between two of them in proportion: the
/// place in f64, the proportion in f32 (docs/formulas.md, "head_quantile").
inline float quantile(std::vector<float> x, float alpha) {
  std::sort(x.begin(), x.end());
  const double place = static_cast<double>(x.size() - 1) * static_cast<double>(alpha);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, x.size() - 1);
  return x[below] + static_cast<float>(place - static_cast<double>(below)) * (x[above] - x[below]);
}

/// The codes of x in the range of `all`.
inline Group affine_group(const Section& section, const std::vector<float>& x,
                          const std::vector<float>& all) {
  float a = *std::min_element(all.begin(), all.end());
  float b = *std::max_element(all.begin(), all.end());
  if (section.alpha > 0) {
    a = quantile(all, section.alpha);
    b = quantile(all, 1 - section.alpha);
  }
  a *= section.kappa;
  b *= section.kappa;
  const auto levels = static_cast<float>((1 << section.bits) - 1);
  const float step = (b - a) / levels;
  Group group;
  for (const float value : x) {
    if (step == 0) {
      group.codes.push_back(0);
      continue;
    }
    const float place = (value - a) / step;
    const float whole = section.floor     ? std::floor(place)
                        : section.half_up ? std::floor(place + 0.5f)
                                          : std::nearbyint(place);
    group.codes.push_back(static_cast<int>(std::clamp(whole, 0.0f, levels)));
  }
  group.scale = (1 - 2 * section.eta) * step;
  group.zero = a + section.eta * (section.eta_of_step ? 1 : levels) * step;
  return group;
}

inline Group ternary_group(const Section& section, const std::vector<float>& x) {
  double sum = 0;
  for (const float value : x) sum += static_cast<double>(std::abs(value));
  const auto mean = static_cast<float>(sum / static_cast<double>(x.size()));
  Group group;
  double beyond = 0;
  int count = 0;
  for (const float value : x) {
    const bool zero = std::abs(value) <= section.gamma * mean;
    group.codes.push_back(zero ? 1 : value > 0 ? 2 : 0);
    if (zero) continue;
    beyond += static_cast<double>(std::abs(value));
    ++count;
  }
  group.scale = mean;
  if (section.scale == Section::Scale::kUnit) group.scale = 1;
  if (section.scale == Section::Scale::kNonZero) {
    group.scale = count == 0 ? 0 : static_cast<float>(beyond / count);
  }
  return group;
}

inline Group sign_group(const std::vector<float>& x) {
  Group group;
  double sum = 0;
  for (const float value : x) {
    group.codes.push_back(value < 0 ? 0 : 1);
    sum += static_cast<double>(std::abs(value));
  }
  group.scale = static_cast<float>(sum / static_cast<double>(x.size()));
  return group;
}

/// The nearest number of the codebook to x / max |x|, the lower one of two as near.
inline Group nf4_group(const std::vector<float>& x) {
  Group group;
  for (const float value : x) group.scale = std::max(group.scale, std::abs(value));
  for (const float value : x) {
    const double place = group.scale == 0 ? 0 : static_cast<double>(value / group.scale);
    int best = 0;
    for (int code = 1; code < 16; ++code) {
      if (std::abs(kNormalFloats[code] - place) < std::abs(kNormalFloats[best] - place))
        best = code;
    }
    group.codes.push_back(best);
  }
  return group;
}

/// The number of the codebook nearest to x / |x|, the upper one of two as near.
inline Group lloyd_max_group(const Section& section, const std::vector<float>& x) {
  Group group;
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double norm = std::sqrt(squares);
  double code_squares = 0;
  for (const double value : x) {
    const double place = value / (norm + 1e-8);
    int best = (1 << section.bits) - 1;
    for (int code = best; code >= 0; --code) {
      const auto off = [&](int of) { return std::abs(section.table_number(of) - place); };
      if (off(code) < off(best)) best = code;
    }
    group.codes.push_back(best);
    code_squares += section.read_number(best) * section.read_number(best);
  }
  group.scale = static_cast<float>(section.corrects_norm ? norm / std::sqrt(code_squares) : norm);
  return group;
}

/// The codes of a group, and its scale and zero point as they are stored. `layer` has the numbers
/// that it shares a range with, itself among them; or none.
inline Group pack_group(const Section& section, bool f32_meta, const std::vector<float>& x,
                        const std::vector<float>& layer) {
  Group group = section.kind == Section::Kind::kAffine
                    ? affine_group(section, x, layer.empty() ? x : layer)
                : section.kind == Section::Kind::kTernary  ? ternary_group(section, x)
                : section.kind == Section::Kind::kNf4      ? nf4_group(x)
                : section.kind == Section::Kind::kLloydMax ? lloyd_max_group(section, x)
                                                           : sign_group(x);
  if (!f32_meta) {
    group.scale = as_f16(group.scale);
    group.zero = as_f16(group.zero);
  }
  return group;
}

using Rows = std::vector<std::vector<float>>;    // (rows, channels)
using CodeRows = std::vector<std::vector<int>>;  // (rows, channels)

/// Packs rows as one block and replaces them by what comes out of it. `codes` are the block's own,
/// or those of another layer if they are given: then only scales and zero points are made.
/// `layer` has the numbers of all heads where they share a range.
inline void pack_block(const Scheme& scheme, Rows& rows, CodeRows& codes,
                       const std::vector<float>& layer = {}) {
  const bool shared = !codes.empty();
  if (!shared) codes.assign(rows.size(), std::vector<int>(scheme.channels()));
  using Places = std::vector<std::pair<size_t, size_t>>;
  const auto pack = [&](const Section& section, size_t first, const Places& places) {
    std::vector<float> x;
    for (const auto& [row, channel] : places) x.push_back(rows[row][channel]);
    const Group group = pack_group(section, scheme.f32_meta, x, layer);
    for (size_t i = 0; i < places.size(); ++i) {
      const auto& [row, channel] = places[i];
      int& code = codes[row][channel];
      if (!shared) code = group.codes[i];
      rows[row][channel] = section.value(channel - first, code, group.scale, group.zero);
    }
  };
  if (scheme.axis == Axis::kHead) {
    Places all;
    for (size_t row = 0; row < rows.size(); ++row) {
      for (size_t channel = 0; channel < scheme.channels(); ++channel)
        all.push_back({row, channel});
    }
    return pack(scheme.sections[0], 0, all);
  }
  if (scheme.axis == Axis::kToken) {
    for (size_t row = 0; row < rows.size(); ++row) {
      for (size_t first = 0; first < scheme.channels(); first += scheme.group) {
        Places group;
        const size_t end = std::min(first + scheme.group, scheme.channels());
        for (size_t channel = first; channel < end; ++channel) group.push_back({row, channel});
        pack(scheme.sections[0], 0, group);
      }
    }
    return;
  }
  size_t first = 0;
  for (const Section& section : scheme.sections) {
    for (size_t channel = first; channel < first + section.channels; ++channel) {
      Places column;
      for (size_t row = 0; row < rows.size(); ++row) column.push_back({row, channel});
      pack(section, first, column);
    }
    first += section.channels;
  }
}

}  // namespace kvlm::reference
