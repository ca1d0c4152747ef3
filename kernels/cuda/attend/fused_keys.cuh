#pragma once

#include "kernels/cuda/attend/fused_head.cuh"
#include "kernels/cuda/attend/log2.h"

// Scores of an item: 32 keys, the rows of a tensor-core operand, times the queries of a KV head,
// its columns. Each query takes two columns, for its high and its low half. QuerySource has the
// queries in shared memory, Keys the operand. Keys are f16, or codes with scales by channel (folded
// into the queries), by token, or by groups of 32 or 64 channels.
namespace kvlm::cuda::packed {

/// The queries of one basis as halves in shared memory, in two orders. `natural`, for f16 tokens
/// and zero points, has neighbouring channels in pairs. `coded` has the order in which words of
/// codes give their channels, each scaled against CodePairs::exponent() of its code. Queries are in
/// units of log2: a score x weighs 2^x.
template <class K, int kGroups>
struct QuerySource {
  using Pairs = CodePairs<K::kWidth>;
  static constexpr int kDim = K::kDim;
  static constexpr int kQuarter = kDim / 4;  // channels
  static constexpr int kQueries = kGroups * kGroupQueries;
  // Padded to 8 words more than a multiple of 16: a quarter of a warp reads different banks.
  static constexpr int kQuarterWords = (kQuarter / 2 + 7) / 16 * 16 + 8;
  static constexpr int kColumnWords = 4 * kQuarterWords + 4;
  // Coded queries: high half, low half, negated high half. The last two begin 4 words further, as
  // neighbouring threads read the first and one of these.
  static constexpr int kPartWords = kGroupQueries * 4 * kQuarterWords;
  static constexpr int kHigher = 0;
  static constexpr int kLower = kPartWords + 4;
  static constexpr int kMinusHigher = 2 * kPartWords + 4;
  static_assert(kPartWords % 32 == 0);

  uint32_t natural[kGroups][2 * kGroupQueries][kColumnWords];  // by column of the operand
  uint32_t coded[kGroups][3 * kPartWords + 4];                 // by half and query
  float natural_down[kQueries];                                // inverse of the query's scale
  float coded_down[kQueries];
  float sums[channel_groups(kDim)][kQueries];  // over groups of 32 channels

  /// Pairs of codes in a word of a quarter. The last word may be partly filled.
  static constexpr __device__ int pairs_of(int word) {
    const int left = kQuarter / 2 - word * Pairs::kPairs;
    return left < Pairs::kPairs ? left : Pairs::kPairs;
  }

  /// Index of pair i of a quarter in natural order. Of four pairs the inner two are swapped, so
  /// that neighbouring words are multiplied with every other pair (Keys::fold).
  static constexpr __device__ int natural_place(int i) {
    if (i / 4 * 4 + 4 > kQuarter / 2) return i;
    return i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
  }
  /// Position of a channel in the coded order.
  struct Place {
    int quarter;
    int half;
    int exponent;  // of its codes as operands
  };
  static __device__ Place coded_place(int channel, bool grouped) {
    if (grouped) {  // a quarter has 8 channels of every group of 32; all groups are whole
      const int i = channel % 4;
      return {channel % 32 / 8, (channel / 32 * 4 + i) * 2 + channel / 4 % 2,
              Pairs::exponent(i % Pairs::kPairs)};
    }
    const int i = channel % kQuarter % (2 * Pairs::kPairs);  // in a word
    const int word = channel % kQuarter / (2 * Pairs::kPairs);
    const int pair = i % pairs_of(word);
    return {channel / kQuarter, (word * Pairs::kPairs + pair) * 2 + i / pairs_of(word),
            Pairs::exponent(pair)};
  }

  /// A quarter of a coded query; `part` is kHigher, kLower or kMinusHigher.
  __device__ const uint32_t* coded_at(int group, int part, int query, int quarter) const {
    return coded[group] + part + (query * 4 + quarter) * kQuarterWords;
  }
  __device__ uint32_t* coded_at(int group, int part, int query, int quarter) {
    return coded[group] + part + (query * 4 + quarter) * kQuarterWords;
  }

  __device__ void fill(const float* queries, bool grouped, int q_per_kv, int first_query,
                       float scale) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
    constexpr int kRounds = (kDim + 127) / 128;  // of 4 channels a thread
    for (int i = static_cast<int>(threadIdx.x / 32); i < kQueries; i += kWarps) {
      float x[kRounds][4] = {};
      float most = 0;
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        const int four = round * 32 + warp_lane;
        if (first_query + i < q_per_kv && (kDim % 128 == 0 || 4 * four < kDim)) {
          // No __ldg: queries may be written after this kernel has started.
          const float4 from =
              reinterpret_cast<const float4*>(queries + (first_query + i) * kDim)[four];
          x[round][0] = from.x, x[round][1] = from.y, x[round][2] = from.z, x[round][3] = from.w;
        }
        float sum = 0;
#pragma unroll
        for (float& y : x[round]) {
          y *= scale * kLog2e;
          most = fmaxf(most, fabsf(y));
          sum += y;
        }
        sum += __shfl_xor_sync(kAll, sum, 1);
        sum += __shfl_xor_sync(kAll, sum, 2);
        sum += __shfl_xor_sync(kAll, sum, 4);
        if (warp_lane % 8 == 0 && four / 8 < channel_groups(kDim)) sums[four / 8][i] = sum;
      }
      most = warp_max(most);
      const Raise raise = raise_of(most);
      // Products of coded queries with scales below 2^11 stay finite halves.
      constexpr int kRoom = Pairs::kTop - Pairs::kBottom + 11;
      const Raise raise_coded = raise_of(most * power_of_two(kRoom));
      if (warp_lane == 0) {
        natural_down[i] = raise.down;
        coded_down[i] = raise_coded.down * power_of_two(-Pairs::kTop);
      }
#pragma unroll
      for (int j = 0; j < 4 * kRounds; ++j) {
        const int channel = j / 4 * 128 + 4 * warp_lane + j % 4;
        if (kDim % 128 == 0 || channel < kDim) {
          put_channel(i, channel, grouped, x[j / 4][j % 4], raise.up, raise_coded.up);
        }
      }
    }
  }

 private:
  /// Stores a channel of query i in both orders.
  __device__ void put_channel(int i, int channel, bool grouped, float x, float natural_up,
                              float coded_up) {
    const auto put = [&](uint32_t* words, int half, float y, bool lower) {
      const __half high = __float2half_rn(y);
      reinterpret_cast<__half*>(words)[half] =
          lower ? __float2half_rn(y - __half2float(high)) : high;
    };
    const int group = i / kGroupQueries;
    const int query = i % kGroupQueries;
    const Place at = coded_place(channel, grouped);
    const float up = coded_up * power_of_two(Pairs::kTop - at.exponent);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      put(natural[group][2 * query + part] + channel / kQuarter * kQuarterWords,
          2 * natural_place(channel % kQuarter / 2) + channel % 2, x * natural_up, part == 1);
      put(coded_at(group, part == 1 ? kLower : kHigher, query, at.quarter), at.half, x * up,
          part == 1);
    }
    put(coded_at(group, kMinusHigher, query, at.quarter), at.half, -x * up, false);
  }
};

/// Scores of an item, then its weights. A thread has query `quarter` of each group, and slots `row`
/// and row + 8 of each tile (OperandThread).
template <int kGroups>
struct Scores {
  float of[kItemTiles][kGroups][2];
};

/// Queries as columns of an operand, prepared for the current keys.
template <class K, int kGroups>
class Keys {
 public:
  using Source = QuerySource<K, kGroups>;
  using Pairs = CodePairs<K::kWidth>;
  static constexpr int kWidth = K::kWidth;
  static constexpr int kDim = K::kDim;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kPairs = kDim / 8;  // of channels in a quarter
  static constexpr float kSlope = codecs::slope_of<codecs::CodeOf<K>>(kDim);
  static constexpr float kOffset = codecs::offset_of<codecs::CodeOf<K>>(kDim);
  /// What `row_affine` holds as zero point is multiplied by: it is minus the scale if none is
  /// stored.
  static constexpr float kZeroFactor = codecs::CodeOf<K>::kZeroStored ? 1 : -kOffset;

  __device__ void take_natural(const Source& source, const OperandThread& my) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      load_pairs(source.natural[group][my.row] + my.quarter * Source::kQuarterWords, b_[group]);
      unit_[group] = source.natural_down[group * kGroupQueries + my.quarter];
      bias_[group] = 0;
    }
  }

  __device__ void take_coded(const Source& source, const OperandThread& my) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int part = my.lower ? Source::kLower : Source::kHigher;
      load_pairs(source.coded_at(group, part, my.asked, my.quarter), b_[group]);
      unit_[group] = source.coded_down[group * kGroupQueries + my.quarter] * kSlope;
      bias_[group] = 0;
    }
  }

  /// Multiplies the queries with the scales and zero points of a block's channels.
  ///   segments, of   all segments, and that of the keys
  ///   scales, zeros  (kDim,) halves in shared memory, padded by quarter_pad(); `zeros` of
  ///                  channels that store them
  __device__ void fold(const Source& source, const HeadSegment* segments, SegmentFacts of,
                       const std::byte* scales, const std::byte* zeros, const OperandThread& my) {
    const bool second = of.two_sections() && my.quarter >= 2;
    uint32_t s[kPairs];
    uint32_t z[kPairs];
    codecs::load_shared(scales + apart_quarter<kDim>(my.quarter), s);
    if (of.zero_stored(second)) {
      codecs::load_shared(zeros + apart_quarter<kDim>(my.quarter), z);
    } else {
      const PackedSection& section = segments[of.segment()].format.section[second];
      // Channels of this quarter before those with offset_after.
      const int before = section.split - (my.quarter - (second ? 2 : 0)) * 2 * kPairs;
      const __half2 slope = __float2half2_rn(section.slope);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const __half2 offset =
            __floats2half2_rn(2 * i < before ? section.offset : section.offset_after,
                              2 * i + 1 < before ? section.offset : section.offset_after);
        z[i] = half2_mul(s[i], *reinterpret_cast<const uint32_t*>(&offset));
        s[i] = half2_mul(s[i], *reinterpret_cast<const uint32_t*>(&slope));
      }
    }
    __syncwarp();
    // Zero points are an operand as stored: rows 0..7 have every other pair, which the first
    // product sums, rows 8..15 the rest, which the second product sums.
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t b[kPairs];
      load_pairs(source.natural[group][my.row] + my.quarter * Source::kQuarterWords, b);
      float sums[2][4] = {};
#pragma unroll
      for (int i = 0; i < kPairs; i += 4) {
        const auto at = [&](const uint32_t(&of)[kPairs], int j) {
          return i + j < kPairs ? of[(i + j) % kPairs] : 0;
        };
        const bool whole = i + 4 <= kPairs;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          mma(sums[side], at(z, 0), at(z, 1), at(z, 2), at(z, 3), at(b, whole ? 2 * side : side),
              whole ? at(b, 2 * side + 1) : 0);
        }
      }
      bias_[group] = (sums[0][0] + sums[0][1] + sums[1][2] + sums[1][3]) *
                     source.natural_down[group * kGroupQueries + my.quarter];
    }
    float unit = 1;
    __half2 most = __habs2(*reinterpret_cast<const __half2*>(&s[0]));
#pragma unroll
    for (int i = 1; i < kPairs; ++i) {
      most = __hmax2(most, __habs2(*reinterpret_cast<const __half2*>(&s[i])));
    }
    if (__any_sync(kAll, any_at_least(most, 2048))) {
      const __half2 norm = __float2half2_rn(1.0f / 32);
      unit = 32;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        s[i] = half2_mul(s[i], *reinterpret_cast<const uint32_t*>(&norm));
      }
    }
    const PartOf part(my.lower);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t x[kPairs];
      uint32_t y[kPairs];
      const int higher = my.lower ? Source::kMinusHigher : Source::kHigher;
      load_pairs(source.coded_at(group, higher, my.asked, my.quarter), x);
      load_pairs(source.coded_at(group, Source::kLower, my.asked, my.quarter), y);
#pragma unroll
      for (int reg = 0; reg < kPairs; ++reg) {
        const int word = reg / Pairs::kPairs;
        const int channel = word * (2 * Pairs::kPairs) + reg % Pairs::kPairs;
        const uint32_t scale =
            __byte_perm(s[channel / 2], s[(channel + Source::pairs_of(word)) / 2],
                        channel % 2 == 1 ? 0x7632 : 0x5410);
        const uint32_t low = scale & part.mask;
        b_[group][reg] =
            half2_fma(y[reg], low, half2_subtract(half2_mul(x[reg], scale), x[reg], low));
      }
      unit_[group] = source.coded_down[group * kGroupQueries + my.quarter] * unit;
    }
  }

  /// Scores of an item of `rows` f16 tokens.
  __device__ void score_rows(const std::byte* keys, int rows, const OperandThread& my,
                             Scores<kGroups>& scores) const {
    uint32_t words[kItemTiles][2][kPairs];
#pragma unroll
    for (int i = 0; i < 2 * kItemTiles; ++i) {
      const int row = min(my.row + 8 * i, rows - 1);
      load_words<kPairs>(keys + row * (kDim * 2) + my.quarter * (kDim / 2), words[i / 2][i % 2]);
    }
#pragma unroll
    for (int tile = 0; tile < kItemTiles; ++tile) {
      multiply([&](int side, int reg) { return words[tile][side][Source::natural_place(reg)]; },
               tile, scores);
    }
  }

  /// Scores of codes in shared memory. fold() has put their scales into the queries; or, kByToken,
  /// `of_row` is the scale and zero point of this warp lane's token, as two halves.
  template <bool kByToken>
  __device__ void score_codes(const std::byte* codes, const Source& source, uint32_t of_row,
                              const OperandThread& my, Scores<kGroups>& scores) const {
    constexpr int kWords = codecs::kQuarterWords<kWidth, kDim>;
    constexpr int kLastPairs = Source::pairs_of(kWords - 1);
    static_assert(kLastPairs % 2 == 0, "scales come in pairs of channels");
    uint32_t words[kItemTiles][2][kWords];
#pragma unroll
    for (int i = 0; i < 2 * kItemTiles; ++i) {
      uint32_t(&to)[kWords] = words[i / 2][i % 2];
      K::quarter(codes + (my.row + 8 * i) * K::kStride, my.quarter, to);
      if constexpr (kLastPairs < Pairs::kPairs) {  // its second codes to the upper half
        uint32_t& last = to[kWords - 1];
        last = __byte_perm(last, last >> kLastPairs * kWidth, 0x5410);
      }
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
            float sum = 0;
#pragma unroll
            for (int i = 0; i < channel_groups(kDim); i += 2) {
              const bool two = i + 1 < channel_groups(kDim);
              sum += source.sums[i][query] + (two ? source.sums[i + 1][query] : 0);
            }
            float& score = scores.of[tile][group][side];
            score = affine.x * score + affine.y * (kZeroFactor * sum);
          }
        }
      }
    }
  }

  /// Scores of codes with kScales scales for the groups of a token's channels.
  ///   scales, zeros  (32, kScales) halves in shared memory
  template <int kScales>
  __device__ void score_grouped(const std::byte* codes, const std::byte* scales,
                                const std::byte* zeros, const Source& source,
                                const OperandThread& my, Scores<kGroups>& scores) const {
    static_assert(kDim % kChannelGroup == 0);
#pragma unroll
    for (int tile = 0; tile < kItemTiles; ++tile) {
      score_groups<kScales>(codes + tile * kTileSlots * K::kStride, tile * kTileSlots + my.row,
                            scales, zeros, source, my, scores.of[tile]);
    }
  }

 private:
  static __device__ void load_pairs(const uint32_t* from, uint32_t (&to)[kPairs]) {
    codecs::load_shared(reinterpret_cast<const std::byte*>(from), to);
  }

  /// Scores of one tile. The thread's slots are `slot` and slot + 8.
  template <int kScales>
  __device__ void score_groups(const std::byte* codes, int slot, const std::byte* scales,
                               const std::byte* zeros, const Source& source,
                               const OperandThread& my, float (&scores)[kGroups][2]) const {
    constexpr int kWords = kWidth == 8 ? 2 : 1;  // of 8 channels
    constexpr int kWordPairs = 4 / kWords;
    constexpr int kChannelGroups = channel_groups(kDim);
    using Halves = GroupHalves<kScales>;
    const Halves s[2] = {{scales, slot}, {scales, slot + 8}};
    constexpr bool kZeros = codecs::CodeOf<K>::kZeroStored;
    const Halves z[2] = {{kZeros ? zeros : scales, slot}, {kZeros ? zeros : scales, slot + 8}};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) scores[group][0] = scores[group][1] = 0;
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
      const int scale = channels * kScales / kChannelGroups;
      float products[kGroups][4] = {};
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int pair = 2 * step + i / 2;
          a[i] = Pairs::halves(words[i % 2][pair / kWordPairs], pair % kWordPairs);
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int reg = 4 * channels + 2 * step;
          mma(products[group], a[0], a[1], a[2], a[3], b_[group][reg], b_[group][reg + 1]);
        }
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const float product = products[group][2 * side] + products[group][2 * side + 1];
          scores[group][side] += s[side][scale] * unit_[group] * product +
                                 (kZeros ? 1.0f : kOffset) * z[side][scale] *
                                     source.sums[channels][group * kGroupQueries + my.quarter];
        }
      }
    }
  }

  /// Scores of one tile from operands `words(side, reg)`.
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

  uint32_t b_[kGroups][kPairs];
  float unit_[kGroups];
  float bias_[kGroups];  // 0 except after fold()
};

}  // namespace kvlm::cuda::packed
