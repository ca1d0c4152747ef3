#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/quantize.h"

// Quantizes one token or the range of one group, for pack.cu and pack_windows.cu. Both are compiled
// without fused multiply-adds, so that codes equal the CPU's.
namespace kvlm::cuda::packing {

using quantize::AffineMeta;
using quantize::AffineRange;

constexpr unsigned kAll = 0xffffffffu;

struct Rules {
  PackRule rule[2];
};

__device__ inline int warp_lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x / 32); }

/// Orders floats as integers; NaN comes last.
__device__ inline uint32_t order_of(float x) {
  if (isnan(x)) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float number_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

/// Rank of a quantile among `numbers` sorted numbers.
struct QuantileRank {
  uint32_t below;
  uint32_t above;
  double part;  // interpolation weight of `above`

  __device__ QuantileRank(uint32_t numbers, float alpha) {
    const double at = static_cast<double>(numbers - 1) * static_cast<double>(alpha);
    below = static_cast<uint32_t>(floor(at));
    above = min(below + 1, numbers - 1);
    part = at - static_cast<double>(below);
  }
  /// The quantile, from the numbers at both ranks.
  __device__ float between(float low, float high) const {
    return above == below ? low : low + static_cast<float>(part) * (high - low);
  }
};

__device__ inline void store_range(const AffineRange& range, const PackRule& rule, DType meta,
                                   std::byte* scales, size_t scale_at, std::byte* zeros,
                                   size_t zero_at) {
  const AffineMeta made = quantize::affine_meta(range, rule);
  quantize::store_meta(scales, meta, scale_at, made.scale);
  quantize::store_meta(zeros, meta, zero_at, made.zero);
}

/// Packs unit `unit` of a row of `count` codes, given one per byte, as `rule` says.
__device__ inline void pack_unit(const PackRule& rule, uint8_t* row, CodeFormat format,
                                 uint8_t* codes, int count, int unit) {
  if (rule.merge != 0) {
    const int first = unit * unit_codes(format);
    quantize::merge_codes(rule.merge, row, format, codes, first,
                          min(first + unit_codes(format), count));
  }
  pack_row(row, format, codes, count, unit, 1);
}

// --------------------------------------------------------------------------------- groups of a row

/// Elements of a group, and the adjacent warp lanes (`lanes`, a power of two) that share them.
struct RowGroup {
  const float* x;
  int count;
  int lanes;
  int warp_lane;

  template <class T, class Combine>
  __device__ T joined(T x, const Combine& combine) const {
    for (int i = lanes / 2; i > 0; i /= 2) x = combine(x, __shfl_xor_sync(kAll, x, i));
    return x;
  }
  __device__ unsigned sum(unsigned x) const {
    return joined(x, [](unsigned a, unsigned b) { return a + b; });
  }
};

/// Element `rank` in sorted order, from 0: found bit by bit, highest first.
__device__ inline float ranked(const RowGroup& group, uint32_t rank) {
  uint32_t found = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t middle = found | 1u << bit;
    unsigned below = 0;
    for (int i = group.warp_lane; i < group.count; i += group.lanes) {
      below += order_of(group.x[i]) < middle ? 1 : 0;
    }
    if (group.sum(below) <= rank) found = middle;
  }
  return number_of(found);
}

__device__ inline float quantile(const RowGroup& group, uint32_t numbers, float alpha) {
  const QuantileRank rank(numbers, alpha);
  return rank.between(ranked(group, rank.below), ranked(group, rank.above));
}

__device__ inline AffineRange range_of(const RowGroup& group, const PackRule& rule, int levels) {
  float low = INFINITY;
  float high = -INFINITY;
  unsigned numbers = 0;
  for (int i = group.warp_lane; i < group.count; i += group.lanes) {
    const float x = group.x[i];
    low = x < low ? x : low;
    high = x > high ? x : high;
    numbers += isnan(x) ? 0 : 1;
  }
  low = group.joined(low, [](float a, float b) { return fminf(a, b); });
  high = group.joined(high, [](float a, float b) { return fmaxf(a, b); });
  const bool empty = !(low <= high);
  if (rule.alpha != 0) {
    numbers = group.sum(numbers);
    low = quantile(group, numbers, rule.alpha);
    high = quantile(group, numbers, 1 - rule.alpha);
  }
  return empty ? quantize::affine_range(0, 0, levels, 1)
               : quantize::affine_range(low, high, levels, rule.kappa);
}

/// Writes the ternary digits of a group; returns its scale.
__device__ inline float code_ternary(const RowGroup& group, const PackRule& rule, uint8_t* codes) {
  const auto add = [](double a, double b) { return a + b; };
  double sum = 0;
  for (int i = group.warp_lane; i < group.count; i += group.lanes) {
    sum += isnan(group.x[i]) ? 0 : static_cast<double>(fabsf(group.x[i]));
  }
  const auto mean = static_cast<float>(group.joined(sum, add) / static_cast<double>(group.count));
  double beyond = 0;
  unsigned count = 0;
  for (int i = group.warp_lane; i < group.count; i += group.lanes) {
    const int digit = quantize::ternary_digit(group.x[i], rule.gamma * mean);
    codes[i] = static_cast<uint8_t>(digit);
    if (digit == 1) continue;
    beyond += static_cast<double>(fabsf(group.x[i]));
    ++count;
  }
  beyond = group.joined(beyond, add);
  count = group.sum(count);
  if (rule.ternary_scale == TernaryScale::kUnit) return 1;
  if (rule.ternary_scale == TernaryScale::kMean) return mean;
  return count == 0 ? 0 : static_cast<float>(beyond / count);
}

/// Writes the codebook codes of a group; returns its scale.
__device__ inline float code_by_codebook(const RowGroup& group, CodeFormat code, uint8_t* codes) {
  float most = 0;
  for (int i = group.warp_lane; i < group.count; i += group.lanes) {
    const float x = fabsf(group.x[i]);
    most = x > most ? x : most;
  }
  const float scale =
      quantize::codebook_scale(group.joined(most, [](float a, float b) { return fmaxf(a, b); }));
  for (int i = group.warp_lane; i < group.count; i += group.lanes) {
    codes[i] = static_cast<uint8_t>(quantize::codebook_code(code, group.x[i], scale));
  }
  return scale;
}

/// Writes the codebook codes of a row that is scaled by its norm; returns its scale.
__device__ inline float code_by_norm(const RowGroup& group, CodeFormat code, const PackRule& rule,
                                     uint8_t* codes) {
  double squares = 0;
  for (int i = group.warp_lane; i < group.count; i += group.lanes) {
    const auto x = static_cast<double>(group.x[i]);
    squares += isnan(x) ? 0 : x * x;
  }
  squares = group.joined(squares, [](double a, double b) { return a + b; });
  const float unit = quantize::norm_unit(squares, group.count);
  unsigned code_squares = 0;
  for (int i = group.warp_lane; i < group.count; i += group.lanes) {
    const int made = quantize::codebook_code(code, group.x[i], unit);
    codes[i] = static_cast<uint8_t>(made);
    code_squares += quantize::square_of(code, made);
  }
  return quantize::norm_scale(code, rule, squares, group.sum(code_squares), group.count);
}

/// Bytes of a warp's workspace: a token's floats, and a byte for each code.
constexpr size_t row_room(int channels) {
  return (static_cast<size_t>(channels) * (sizeof(float) + 1) + 15) / 16 * 16;
}

/// Packs token `at` of a block from a warp's workspace, with scales per token.
__device__ inline void pack_token(float* x, const PackedFormat& format, const PackRule& rule,
                                  std::byte* scales, std::byte* zeros, size_t at, uint8_t* to) {
  const PackedSection& section = format.section[0];
  const int channels = section.channels;
  const int groups = format.groups();
  auto* codes = reinterpret_cast<uint8_t*>(x + channels);
  int lanes = 32;  // warp lanes of a group; all groups at once if they fit
  while (lanes > 1 && lanes * groups > 32) lanes /= 2;
  for (int done = 0; done < groups; done += 32 / lanes) {
    const int index = done + warp_lane_id() / lanes;
    const int first = min(index * format.group_size, channels);
    const RowGroup group{x + first, min(format.group_size, channels - first), lanes,
                         warp_lane_id() % lanes};
    const size_t scale = at * static_cast<size_t>(groups) + static_cast<size_t>(index);
    const bool stores = group.warp_lane == 0 && index < groups;
    if (rule.rule != CodeRule::kAffine) {
      const float made = rule.rule == CodeRule::kTernary ? code_ternary(group, rule, codes + first)
                         : rule.rule == CodeRule::kCodebook
                             ? code_by_codebook(group, section.code, codes + first)
                             : code_by_norm(group, section.code, rule, codes + first);
      if (stores) quantize::store_meta(scales, format.meta, scale, made);
      continue;
    }
    const AffineRange range = range_of(group, rule, max_code(section.code));
    if (stores) store_range(range, rule, format.meta, scales, scale, zeros, scale);
    for (int i = group.warp_lane; i < group.count; i += lanes) {
      codes[first + i] = static_cast<uint8_t>(range.code(group.x[i], rule.rounding));
    }
  }
  __syncwarp();
  if (to == nullptr) return;
  to += at * section.row_bytes();
  const int units = static_cast<int>(ceil_div(channels, unit_codes(section.code)));
  for (int i = warp_lane_id(); i < units; i += 32)
    pack_unit(rule, to, section.code, codes, channels, i);
}

constexpr int kShortRow = 128;  // channels

/// Whether a warp can pack a token in registers, 4 adjacent channels per thread: kShortRow channels
/// in groups of 32 or in one, min-max ranges, codes of 2, 4 or 8 bits.
VLM_HD inline bool is_short_row(const PackedFormat& format, const PackRule& rule) {
  const CodeFormat code = format.section[0].code;
  return format.channels() == kShortRow && rule.alpha == 0 &&
         (format.group_size == 32 || format.group_size >= kShortRow) &&
         (code == CodeFormat::kBits2 || code == CodeFormat::kBits4 || code == CodeFormat::kBits8);
}

/// pack_token() of a short row, from registers.
__device__ inline void pack_short_row(const float (&x)[4], const PackedFormat& format,
                                      const PackRule& rule, std::byte* scales, std::byte* zeros,
                                      size_t at, uint8_t* to) {
  const int lane = warp_lane_id();
  const int lanes = format.group_size == 32 ? 8 : 32;  // warp lanes of a group
  const int bits = code_bits(format.section[0].code);
  float low = INFINITY;
  float high = -INFINITY;
#pragma unroll
  for (const float y : x) {
    low = y < low ? y : low;
    high = y > high ? y : high;
  }
  for (int i = lanes / 2; i > 0; i /= 2) {
    low = fminf(low, __shfl_xor_sync(kAll, low, i));
    high = fmaxf(high, __shfl_xor_sync(kAll, high, i));
  }
  const AffineRange range = quantize::affine_range(low, high, (1 << bits) - 1, rule.kappa);
  if (lane % lanes == 0) {
    const size_t group = at * static_cast<size_t>(32 / lanes) + static_cast<size_t>(lane / lanes);
    store_range(range, rule, format.meta, scales, group, zeros, group);
  }
  if (to == nullptr) return;
  uint8_t* row = to + at * static_cast<size_t>(kShortRow / 8 * bits) + lane * bits / 2;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int code = range.code(x[i], rule.rounding);
    if (rule.merge != 0) code = quantize::merged_code(rule.merge, *row >> 2 * i & 3, code);
    word |= static_cast<uint32_t>(code) << (i * bits);
  }
  for (int byte = 0; byte < bits / 2; ++byte) row[byte] = static_cast<uint8_t>(word >> 8 * byte);
}

}  // namespace kvlm::cuda::packing
