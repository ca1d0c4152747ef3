#pragma once

#include "kernels/cuda/fused_lane.cuh"

// Scores of an item of the fused decode attention: the queries of a lane as operands of the tensor
// cores, in shared memory and then in registers, and their products with 32 keys.
namespace kvlm::cuda::packed {

/// The queries of one basis as halves in shared memory, in two orders: `natural`, neighbouring
/// channels in pairs, for f16 rows and zero points; and `coded`, the order in which words of codes
/// give their channels, each raised by what its place in a word takes from it. Queries are in units
/// of log2: a score x weighs 2^x.
template <class K, int kGroups>
struct QuerySource {
  using Pairs = CodePairs<K::kWidth>;
  static constexpr int kQueries = kGroups * kGroupQueries;
  // Padded so that what a quarter of a warp reads falls into different banks.
  static constexpr int kQuarterWords = 24;
  static constexpr int kColumnWords = 4 * kQuarterWords + 4;
  static constexpr int kPartWords = kGroupQueries * 4 * kQuarterWords + 4;

  uint32_t natural[kGroups][2 * kGroupQueries][kColumnWords];  // by column of the operand
  uint32_t coded[kGroups][3][kPartWords];  // higher part, lower part, minus the higher; by query
  float natural_down[kQueries];            // what undoes the raise of a query
  float coded_down[kQueries];
  float sums[kChannelGroups][kQueries];  // of groups of 32 channels of a query

  /// Place of a channel among the halves of a quarter.
  struct Place {
    int quarter;
    int half;
    int exponent;  // of its codes as operands
  };
  static __device__ Place coded_place(int channel, bool grouped) {
    if (grouped) {  // a quarter has 8 neighbours of every group of 32
      const int i = channel % 4;
      return {channel % 32 / 8, (channel / 32 * 4 + i) * 2 + channel / 4 % 2,
              Pairs::exponent(i % Pairs::kPairs)};
    }
    const int i = channel % 32 % (2 * Pairs::kPairs);  // in a word
    const int word = channel % 32 / (2 * Pairs::kPairs);
    return {channel / 32, (word * Pairs::kPairs + i % Pairs::kPairs) * 2 + i / Pairs::kPairs,
            Pairs::exponent(i % Pairs::kPairs)};
  }

  __device__ void fill(const float* queries, bool grouped, int q_per_kv, int first_query,
                       float scale) {
    constexpr float kLog2e = 1.4426950408889634f;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int i = static_cast<int>(threadIdx.x) / 32; i < kQueries; i += kWarps) {
      float x[4] = {};
      if (first_query + i < q_per_kv) {
        const float4 from =
            __ldg(reinterpret_cast<const float4*>(queries + (first_query + i) * kDim) + lane);
        x[0] = from.x, x[1] = from.y, x[2] = from.z, x[3] = from.w;
      }
      float most = 0;
      float sum = 0;
#pragma unroll
      for (float& y : x) {
        y *= scale * kLog2e;
        most = fmaxf(most, fabsf(y));
        sum += y;
      }
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      sum += __shfl_xor_sync(kAll, sum, 4);
      if (lane % 8 == 0) sums[lane / 8][i] = sum;
      most = warp_max(most);
      const Raise raise = raise_of(most);
      // Products of coded queries with scales below 2^11 are halves.
      constexpr int kRoom = Pairs::kTop - Pairs::kBottom + 11;
      const Raise raise_coded = raise_of(most * power_of_two(kRoom));
      if (lane == 0) {
        natural_down[i] = raise.down;
        coded_down[i] = raise_coded.down * power_of_two(-Pairs::kTop);
      }
      const int group = i / kGroupQueries;
      const int query = i % kGroupQueries;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int channel = 4 * lane + j;
        const auto put = [&](uint32_t* words, int half, float y, bool lower) {
          const __half high = __float2half_rn(y);
          reinterpret_cast<__half*>(words)[half] =
              lower ? __float2half_rn(y - __half2float(high)) : high;
        };
        const Place at = coded_place(channel, grouped);
        const float up = raise_coded.up * power_of_two(Pairs::kTop - at.exponent);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          put(natural[group][2 * query + part] + channel / 32 * kQuarterWords, channel % 32,
              x[j] * raise.up, part == 1);
          put(coded[group][part] + (query * 4 + at.quarter) * kQuarterWords, at.half, x[j] * up,
              part == 1);
        }
        put(coded[group][2] + (query * 4 + at.quarter) * kQuarterWords, at.half, -x[j] * up, false);
      }
    }
  }
};

__device__ inline void load_16(const uint32_t* from, uint32_t (&to)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(from + i);
    to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
  }
}

/// Scores of an item, then weights: of query `quarter` of each group, and slots `row` and 8 further
/// of each tile.
template <int kGroups>
struct Scores {
  float of[kItemTiles][kGroups][2];
};

/// Queries as columns of an operand, as the keys at hand want them.
template <class K, int kGroups>
class Keys {
 public:
  using Source = QuerySource<K, kGroups>;
  using Pairs = CodePairs<K::kWidth>;
  static constexpr int kWidth = K::kWidth;

  __device__ void take_natural(const Source& source, const OperandThread& my) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      load_16(source.natural[group][my.row] + my.quarter * Source::kQuarterWords, b_[group]);
      unit_[group] = source.natural_down[group * kGroupQueries + my.quarter];
      bias_[group] = 0;
    }
  }

  __device__ void take_coded(const Source& source, const OperandThread& my) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      load_16(source.coded[group][my.lower ? 1 : 0] +
                  (my.asked * 4 + my.quarter) * Source::kQuarterWords,
              b_[group]);
      unit_[group] = source.coded_down[group * kGroupQueries + my.quarter];
      bias_[group] = 0;
    }
  }

  /// Multiplies the queries with the scales of a block's channels, and with its zero points.
  ///   scales, zeros  (128,) halves in shared memory; zeros of channels that store them
  __device__ void fold(const Source& source, const PackedFormat& format, const std::byte* scales,
                       const std::byte* zeros, const OperandThread& my) {
    const PackedSection& section = format.section[format.sections == 2 && my.quarter >= 2 ? 1 : 0];
    uint32_t s[16];
    uint32_t z[16];
    load_16(reinterpret_cast<const uint32_t*>(scales) + 16 * my.quarter, s);
    if (section.zero_stored) {
      load_16(reinterpret_cast<const uint32_t*>(zeros) + 16 * my.quarter, z);
    } else {
      const __half2 offset = __float2half2_rn(section.offset);
      const __half2 slope = __float2half2_rn(section.slope);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        z[i] = half2_mul(s[i], *reinterpret_cast<const uint32_t*>(&offset));
        s[i] = half2_mul(s[i], *reinterpret_cast<const uint32_t*>(&slope));
      }
    }
    __syncwarp();
    // Zero points are 16 equal rows.
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t b[16];
      load_16(source.natural[group][my.row] + my.quarter * Source::kQuarterWords, b);
      float sums[2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        mma(sums[step % 2], z[2 * step], z[2 * step], z[2 * step + 1], z[2 * step + 1], b[2 * step],
            b[2 * step + 1]);
      }
      bias_[group] = (sums[0][0] + sums[0][1] + sums[1][0] + sums[1][1]) *
                     source.natural_down[group * kGroupQueries + my.quarter];
    }
    float unit = 1;
    __half2 most = __habs2(*reinterpret_cast<const __half2*>(&s[0]));
#pragma unroll
    for (int i = 1; i < 16; ++i) {
      most = __hmax2(most, __habs2(*reinterpret_cast<const __half2*>(&s[i])));
    }
    const bool large = fmaxf(__low2float(most), __high2float(most)) >= 2048;
    if (__any_sync(kAll, large)) {
      const __half2 norm = __float2half2_rn(1.0f / 32);
      unit = 32;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        s[i] = half2_mul(s[i], *reinterpret_cast<const uint32_t*>(&norm));
      }
    }
    const PartOf part(my.lower);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t x[16];
      uint32_t y[16];
      const int at = (my.asked * 4 + my.quarter) * Source::kQuarterWords;
      load_16(source.coded[group][my.lower ? 2 : 0] + at, x);
      load_16(source.coded[group][1] + at, y);
#pragma unroll
      for (int reg = 0; reg < 16; ++reg) {
        const int channel = reg / Pairs::kPairs * (2 * Pairs::kPairs) + reg % Pairs::kPairs;
        const uint32_t scale = __byte_perm(s[channel / 2], s[(channel + Pairs::kPairs) / 2],
                                           channel % 2 == 1 ? 0x7632 : 0x5410);
        const uint32_t low = scale & part.mask;
        b_[group][reg] =
            half2_fma(y[reg], low, half2_subtract(half2_mul(x[reg], scale), x[reg], low));
      }
      unit_[group] = source.coded_down[group * kGroupQueries + my.quarter] * unit;
    }
  }

  /// Scores of an item of f16 rows, of which `rows` are there: of query `quarter` of each group,
  /// and slots `row` and 8 further of each tile.
  __device__ void score_rows(const std::byte* keys, int rows, const OperandThread& my,
                             Scores<kGroups>& scores) const {
    uint32_t words[kItemTiles][2][16];
#pragma unroll
    for (int i = 0; i < 2 * kItemTiles; ++i) {
      const int row = min(my.row + 8 * i, rows - 1);
      load_words<16>(keys + row * (kDim * 2) + my.quarter * (kDim / 2), words[i / 2][i % 2]);
    }
#pragma unroll
    for (int tile = 0; tile < kItemTiles; ++tile) {
      multiply([&](int side, int reg) { return words[tile][side][reg]; }, tile, scores);
    }
  }

  /// The same of codes in shared memory, whose channels share scales; folded into the queries, or
  /// kByToken: those of the item's row `warp_lane` as two halves.
  template <bool kByToken>
  __device__ void score_codes(const std::byte* codes, const Source& source, uint32_t of_row,
                              const OperandThread& my, Scores<kGroups>& scores) const {
    uint32_t words[kItemTiles][2][kWidth];
#pragma unroll
    for (int i = 0; i < 2 * kItemTiles; ++i) {
      K::quarter(codes + (my.row + 8 * i) * K::kStride, my.quarter, words[i / 2][i % 2]);
    }
#pragma unroll
    for (int tile = 0; tile < kItemTiles; ++tile) {
      multiply(
          [&](int side, int reg) {
            return Pairs::halves(words[tile][side][reg / Pairs::kPairs], reg % Pairs::kPairs);
          },
          tile, scores);
      if constexpr (kByToken) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float2 affine =
              two_floats(__shfl_sync(kAll, of_row, tile * kTileSlots + my.row + 8 * side));
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const int query = group * kGroupQueries + my.quarter;
            const float sum = (source.sums[0][query] + source.sums[1][query]) +
                              (source.sums[2][query] + source.sums[3][query]);
            float& score = scores.of[tile][group][side];
            score = affine.x * score + affine.y * sum;
          }
        }
      }
    }
  }

  /// The same of codes with scales for each 32 channels of a row.
  ///   meta  (32, 4) halves of scales, then of zero points, in shared memory
  __device__ void score_grouped(const std::byte* codes, const std::byte* meta, const Source& source,
                                const OperandThread& my, Scores<kGroups>& scores) const {
#pragma unroll
    for (int tile = 0; tile < kItemTiles; ++tile) {
      score_groups(codes + tile * kTileSlots * K::kStride, meta + tile * kTileSlots * 8,
                   meta + (kItemSlots + tile * kTileSlots) * 8, source, my, scores.of[tile]);
    }
  }

 private:
  __device__ void score_groups(const std::byte* codes, const std::byte* scales,
                               const std::byte* zeros, const Source& source,
                               const OperandThread& my, float (&scores)[kGroups][2]) const {
    constexpr int kWords = kWidth == 8 ? 2 : 1;  // of 8 channels
    constexpr int kPairs = 4 / kWords;
    uint2 s[2];
    uint2 z[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      s[side] = reinterpret_cast<const uint2*>(scales)[my.row + 8 * side];
      z[side] = reinterpret_cast<const uint2*>(zeros)[my.row + 8 * side];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) scores[group][side] = 0;
    }
#pragma unroll
    for (int channels = 0; channels < kChannelGroups; ++channels) {
      uint32_t words[2][kWords];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const std::byte* row = codes + (my.row + 8 * side) * K::kStride;
        const uint32_t x = K::four(row, channels, 2 * my.quarter);
        const uint32_t y = K::four(row, channels, 2 * my.quarter + 1);
        words[side][0] = __byte_perm(x, y, 0x5410);
        if constexpr (kWords == 2) words[side][1] = __byte_perm(x, y, 0x7632);
      }
      float products[kGroups][4] = {};
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int pair = 2 * step + i / 2;
          a[i] = Pairs::halves(words[i % 2][pair / kPairs], pair % kPairs);
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int reg = 4 * channels + 2 * step;
          mma(products[group], a[0], a[1], a[2], a[3], b_[group][reg], b_[group][reg + 1]);
        }
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float2 scale = two_floats(channels < 2 ? s[side].x : s[side].y);
        const float2 zero = two_floats(channels < 2 ? z[side].x : z[side].y);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const float product = products[group][2 * side] + products[group][2 * side + 1];
          scores[group][side] += (channels % 2 == 0 ? scale.x : scale.y) * unit_[group] * product +
                                 (channels % 2 == 0 ? zero.x : zero.y) *
                                     source.sums[channels][group * kGroupQueries + my.quarter];
        }
      }
    }
  }

  /// Products of a tile whose operands are `words(side, reg)`.
  template <class Words>
  __device__ void multiply(const Words& words, int tile, Scores<kGroups>& scores) const {
    float products[kGroups][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t a[4] = {words(0, 2 * step), words(1, 2 * step), words(0, 2 * step + 1),
                             words(1, 2 * step + 1)};
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        mma(products[group], a[0], a[1], a[2], a[3], b_[group][2 * step], b_[group][2 * step + 1]);
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float(&x)[4] = products[group];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        scores.of[tile][group][side] =
            (x[2 * side] + x[2 * side + 1]) * unit_[group] + bias_[group];
      }
    }
  }

  uint32_t b_[kGroups][16];
  float unit_[kGroups];
  float bias_[kGroups];  // 0 but for keys whose channels have zero points
};

}  // namespace kvlm::cuda::packed
