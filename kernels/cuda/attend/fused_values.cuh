#pragma once

#include "kernels/cuda/attend/fused_keys.cuh"

// Weighted sums of the values of an item. V, channels by slots, is one operand of the tensor cores;
// the weights, slots by queries, are the other. Values are f16, or codes with scales by channel, by
// token, or by groups of 32 or 64 channels.
namespace kvlm::cuda::packed {

/// Which channels and slots of a tile of V a thread holds. Its channels are numbered: numbers 2 n
/// and 2 n + 1 are rows `row` and row + 8 of product n.
///
/// Tokens of whole 16 bytes are read by columns (ldmatrix): a thread gets 2 bytes of every 16, for
/// a pair of slots in a word. 16 bytes of 2-bit codes have two groups of 32 channels. If groups
/// have scales, threads `row` and row ^ 4 swap half of these codes, so that the channels of a
/// product share a scale. Other tokens are read channel by channel: thread `row` has channels
/// 4 row .. 4 row + 3 of every group of 32, and 2 row, 2 row + 1 of half a group at the end.
template <class V, Scaled kScaled>
struct ValuesLayout {
  static constexpr int kDim = V::kDim;
  static constexpr int kWidth = V::kWidth;
  static constexpr bool kGrouped = scaled_group(kScaled) != 0;
  static constexpr int kStride = WideRows<V>::kStride;
  static constexpr bool kWidened = WideRows<V>::kBytes > 0;
  /// Codes are contiguous: no call of the codec is needed to find one.
  static constexpr bool kPlain = kWidened || V::kRowBytes * 8 == kDim * kWidth;
  /// Tokens begin at multiples of 16 bytes.
  static constexpr bool kAligned = kStride % 16 == 0 && (kWidened || V::kRowBytes % 16 == 0);
  static constexpr bool kByColumns =
      kPlain && kAligned && kDim * kWidth % 128 == 0 && (!kGrouped || kWidth >= 2);
  static constexpr int kUnit = 16 / kWidth;    // channels of 2 bytes
  static constexpr int kChunk = 128 / kWidth;  // of 16 bytes
  static constexpr bool kSwapped = kByColumns && kGrouped && kWidth == 2;
  /// Neighbouring channels of a thread.
  static constexpr int kAdjacent = kByColumns && !kSwapped ? kUnit : 4;
  static constexpr int kNumbers = kDim / 8;  // channels of a thread

  /// Whether group g has 16 channels only, two a thread.
  static constexpr __device__ bool is_half(int g) { return (g + 1) * kChannelGroup > kDim; }
  /// Channel of a number: that of thread row 0, plus an offset that is the same for all numbers
  /// except those of half a group.
  static constexpr __device__ int channel(int number, int row) {
    return first_channel(number) + further(!kByColumns && is_half(number / 4), row);
  }
  static constexpr __device__ int first_channel(int number) {
    if (!kByColumns) return number / 4 * kChannelGroup + number % 4;
    const int i = number % kUnit;
    return number / kUnit * kChunk + (kSwapped ? i / 4 * kChannelGroup + i % 4 : i);
  }
  static constexpr __device__ int further(bool half, int row) {
    if (!kByColumns) return (half ? 2 : 4) * row;
    return kSwapped ? row % 4 * 8 + row / 4 * 4 : row * kUnit;
  }
  /// Index of the scale of a number's product (kGrouped).
  static constexpr __device__ int group(int number) {
    return first_channel(number) / std::max(scaled_group(kScaled), kChannelGroup);
  }
  /// Position of a number among the codes of a word.
  static constexpr __device__ int place(int number) {
    return kByColumns ? number % kUnit : number % 4 % CodePairs<kWidth>::kPairs;
  }
  /// Slot i = 0..3 of a thread in a tile; (0, 1) and (2, 3) are pairs.
  static constexpr __device__ int slot(int quarter, int i) {
    return kByColumns ? 2 * quarter + i % 2 + i / 2 * 8 : quarter + 4 * i;
  }
};

/// Weights of a tile of 16 slots as columns of an operand: pairs of slots of query `asked`.
template <class Layout>
struct TileWeights {
  uint32_t plain[2];    // this thread's half (PartOf)
  uint32_t flipped[2];  // high half, negated in threads of the low half
  uint32_t higher[2];   // high half in threads of the low half, else 0
  uint32_t lower[2];    // low half in threads of the low half, else 0

  /// From the thread's own weights, of query `quarter` and slots `row` and row + 8.
  __device__ void make(const float (&own)[2], float up, const PartOf& part,
                       const OperandThread& my) {
    const int first = Layout::slot(my.quarter, 0) * 4 + my.asked;
    const int second = Layout::slot(my.quarter, 1) * 4 + my.asked;
    const float x = own[0] * up;
    const float y = own[1] * up;
    const TwoHalves pairs[2] = {{__shfl_sync(kAll, x, first), __shfl_sync(kAll, x, second)},
                                {__shfl_sync(kAll, y, first), __shfl_sync(kAll, y, second)}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      plain[i] = part.plain(pairs[i].higher, pairs[i].lower);
      flipped[i] = pairs[i].higher ^ part.sign;
      higher[i] = pairs[i].higher & part.mask;
      lower[i] = pairs[i].lower & part.mask;
    }
  }

  /// This thread's half of weight times scale.
  __device__ uint32_t times(uint32_t scales, int pair) const {
    return half2_fma(lower[pair], scales,
                     half2_fma(higher[pair], scales, half2_mul(flipped[pair], scales)));
  }
};

/// Weights of an item.
template <class Layout, int kGroups>
struct ItemWeights {
  TileWeights<Layout> of[kItemTiles][kGroups];

  __device__ ItemWeights(const Scores<kGroups>& own, float up, const PartOf& part,
                         const OperandThread& my) {
#pragma unroll
    for (int tile = 0; tile < kItemTiles; ++tile) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        of[tile][group].make(own.of[tile][group], up, part, my);
      }
    }
  }
};

/// Sums of a warp's values times weights, in the units of what was added last: codes or f16 tokens.
template <class V, Scaled kScaled, int kGroups>
class Values {
 public:
  /// Scales by channel: the sums of each block are scaled by themselves.
  static constexpr bool kByBlock = kScaled == Scaled::kChannel;
  using Pairs = CodePairs<V::kWidth>;
  static constexpr int kWidth = V::kWidth;
  static constexpr int kDim = V::kDim;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kChannelGroups = channel_groups(kDim);
  static constexpr int kScaleGroups = scale_groups(kScaled, kDim);
  using Layout = ValuesLayout<V, kScaled>;
  using Weights = ItemWeights<Layout, kGroups>;
  static constexpr int kNumbers = Layout::kNumbers;
  static constexpr int kStride = Layout::kStride;
  static constexpr float kSlope = codecs::CodeOf<V>::kSlope;
  static_assert(codecs::CodeOf<V>::kZeroStored || codecs::CodeOf<V>::kOffset == -1);

  /// Multiplies all sums by `factor`.
  __device__ void shrink(const float (&factor)[kGroups]) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if constexpr (kByBlock) {
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) total_[group][i] *= factor[group];
      }
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) products_[group][i / 4][i % 4] *= factor[group];
#pragma unroll
      for (int i = 0; i < 4; ++i) zeros_[group][i] *= factor[group];
    }
  }

  /// Adds an item of `rows` f16 tokens.
  __device__ void add_rows(const std::byte* values, int rows, const Weights& weights,
                           const OperandThread& my) {
#pragma unroll
    for (int tile = 0; tile < kItemTiles; ++tile) {
      add_row_tile(values, tile * kTileSlots, rows, weights.of[tile], my);
    }
  }

  /// Adds an item of codes in shared memory.
  ///   scales, zeros  groups: (32, groups) halves in shared memory; zeros may be implied
  ///   of_row         kToken: scale and zero point of this warp lane's token, as two halves
  __device__ void add_codes(const std::byte* codes, const std::byte* scales, const std::byte* zeros,
                            uint32_t of_row, const Weights& weights, const OperandThread& my) {
    TileScales of_tile[kItemTiles];
#pragma unroll
    for (int tile = 0; tile < kItemTiles; ++tile) {
      of_tile[tile].take(scales, zeros, of_row, tile * kTileSlots, my);
      const uint32_t(&z)[2] = of_tile[tile].zeros;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const TileWeights<Layout>& w = weights.of[tile][group];
        mma(zeros_[group], z[0], z[0], z[1], z[1], w.plain[0], w.plain[1]);
      }
      if constexpr (!Layout::kByColumns) {
        add_code_tile(codes + tile * kTileSlots * kStride, of_tile[tile], weights.of[tile], my);
      }
    }
    if constexpr (Layout::kByColumns) add_columns(codes, of_tile, weights, my);
  }

  /// Converts the sums from units of codes (or f16 tokens) to values. `down` is the inverse of the
  /// weight scale. With kByBlock, finish_channels() converts codes.
  __device__ void bring_down(bool codes, float down, const OperandThread& my) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float sum = codes ? zeros_[group][0] + zeros_[group][1] : 0.0f;
      float zeros[kScaleGroups];
#pragma unroll
      for (int g = 0; g < kScaleGroups; ++g) {
        zeros[g] = Layout::kGrouped ? __shfl_sync(kAll, sum, g * 4 + my.quarter) : sum;
      }
#pragma unroll
      for (int number = 0; number < kNumbers; ++number) {
        float(&four)[4] = products_[group][number / 2];
        const int side = number % 2;
        const float product = four[2 * side] + four[2 * side + 1];
        four[2 * side + 1] = 0;
        if constexpr (kByBlock) {
          total_[group][number] += product * down;
          four[2 * side] = 0;
        } else {
          four[2 * side] = (product * (codes ? power_of(number) * kSlope : 1.0f) +
                            zeros[Layout::group(number)]) *
                           down;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) zeros_[group][i] = 0;
    }
  }

  /// Inverse of bring_down(): to the units of codes or f16 tokens, with weight scale `up`.
  __device__ void bring_up(bool codes, float up) {
    if constexpr (!kByBlock) {
#pragma unroll
      for (int i = 0; i < kGroups * kNumbers; ++i) {
        const int number = i % kNumbers;
        products_[i / kNumbers][number / 2][number % 2 * 2] *=
            codes ? up * inverse_power_of(number) / kSlope : up;
      }
    }
  }

  /// A sum of query `quarter`, after bring_down().
  __device__ float sum(int group, int number) const {
    if constexpr (kByBlock) return total_[group][number];
    return products_[group][number / 2][number % 2 * 2];
  }

  /// Scales the sums of a block of codes and adds them to the totals.
  ///   scales, zeros  (kDim,) halves in shared memory
  __device__ void finish_channels(float down, const PackedFormat& format, const std::byte* scales,
                                  const std::byte* zeros, const OperandThread& my) {
    static_assert(kDim % kChannelGroup == 0);
    constexpr int kAdjacent = std::min(Layout::kAdjacent, 4);  // registers are scarce
    const PackedSection& section = format.section[0];
    const float slope = section.slope * down;
#pragma unroll
    for (int first = 0; first < kNumbers; first += kAdjacent) {
      const int at = 2 * Layout::channel(first, my.row);
      uint32_t s[kAdjacent / 2];
      uint32_t z[kAdjacent / 2] = {};
      codecs::load_shared(scales + at, s);
      if (section.zero_stored) codecs::load_shared(zeros + at, z);
#pragma unroll
      for (int i = 0; i < kAdjacent; ++i) {
        const float scale = half_of(s[i / 2], i % 2);
        const float zero = section.zero_stored ? half_of(z[i / 2], i % 2) : section.offset * scale;
        const int number = first + i;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const float sum = (zeros_[group][0] + zeros_[group][1]) * down;
          total_[group][number] +=
              scale * (product(group, number) * (power_of(number) * slope)) + zero * sum;
        }
      }
    }
    clear();
  }

 private:
  static __device__ float power_of(int number) {
    return power_of_two(-Pairs::exponent(Layout::place(number)));
  }
  static __device__ float inverse_power_of(int number) {
    return power_of_two(Pairs::exponent(Layout::place(number)));
  }
  static __device__ float half_of(uint32_t pair, int i) {
    const float2 two = two_floats(pair);
    return i == 0 ? two.x : two.y;
  }
  __device__ float product(int group, int number) const {
    const float(&four)[4] = products_[group][number / 2];
    return four[2 * (number % 2)] + four[2 * (number % 2) + 1];
  }
  __device__ void clear() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) products_[group][i / 4][i % 4] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) zeros_[group][i] = 0;
    }
  }

  __device__ void add_row_tile(const std::byte* values, int first, int rows,
                               const TileWeights<Layout> (&weights)[kGroups],
                               const OperandThread& my) {
    uint32_t x[4][kSteps];  // of slots: pairs of numbers
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr int kAdjacent = Layout::kAdjacent;
      const int row = min(first + Layout::slot(my.quarter, i), rows - 1);
      const std::byte* whole = values + (row * kDim + Layout::further(false, my.row)) * 2;
      const std::byte* half = values + (row * kDim + Layout::further(true, my.row)) * 2;
#pragma unroll
      for (int number = 0; number < kNumbers; number += kAdjacent) {
        const int at = 2 * Layout::first_channel(number);
        if (number + kAdjacent > kNumbers) {
          x[i][number / 2] = __ldg(reinterpret_cast<const uint32_t*>(half + at));
        } else {
          uint32_t words[kAdjacent / 2];
          load_words<kAdjacent / 2>(whole + at, words);
#pragma unroll
          for (int j = 0; j < kAdjacent / 2; ++j) x[i][number / 2 + j] = words[j];
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] =
            __byte_perm(x[i / 2 * 2][step], x[i / 2 * 2 + 1][step], i % 2 == 1 ? 0x7632 : 0x5410);
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        mma(products_[group][step], a[0], a[1], a[2], a[3], weights[group].plain[0],
            weights[group].plain[1]);
      }
    }
  }

  /// Scales and zero points of a tile's slots, in the thread's pairs.
  struct TileScales {
    static constexpr int kScales = Layout::kGrouped ? kScaleGroups : 1;
    uint32_t scales[kScales][2];
    /// Of group row % kScales; ones if scales are by channel.
    uint32_t zeros[2];

    /// Of the item's slots [first, first + 16).
    __device__ void take(const std::byte* of_groups, const std::byte* zeros_of_groups,
                         uint32_t of_row, int first, const OperandThread& my) {
      if constexpr (kScaled == Scaled::kChannel) {
        zeros[0] = zeros[1] = 0x3c003c00u;
      } else if constexpr (kScaled == Scaled::kToken) {
        uint32_t of_slots[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of_slots[i] = __shfl_sync(kAll, of_row, first + Layout::slot(my.quarter, i));
        }
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          scales[0][pair] = __byte_perm(of_slots[2 * pair], of_slots[2 * pair + 1], 0x5410);
          zeros[pair] = __byte_perm(of_slots[2 * pair], of_slots[2 * pair + 1], 0x7632);
        }
      } else {
        const auto zero_of = [&](int slot) -> uint32_t {
          const int at = slot * kScales + my.row % kScales;
          if constexpr (!codecs::CodeOf<V>::kZeroStored) {
            return reinterpret_cast<const uint16_t*>(of_groups)[at] ^ 0x8000u;  // minus the scale
          } else {
            return reinterpret_cast<const uint16_t*>(zeros_of_groups)[at];
          }
        };
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int one = first + Layout::slot(my.quarter, 2 * pair);
          const int two = first + Layout::slot(my.quarter, 2 * pair + 1);
          const GroupHalves<kScales> x(of_groups, one);
          const GroupHalves<kScales> y(of_groups, two);
#pragma unroll
          for (int g = 0; g < kScales; ++g) {
            scales[g][pair] =
                __byte_perm(x.pairs[g / 2], y.pairs[g / 2], g % 2 == 1 ? 0x7632 : 0x5410);
          }
          zeros[pair] = zero_of(one) | zero_of(two) << 16;
        }
      }
    }

    /// Weights of a tile times the scales of group g.
    __device__ void weigh(const TileWeights<Layout>& weights, int g, uint32_t (&to)[2]) const {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        to[pair] = kScaled == Scaled::kChannel
                       ? weights.plain[pair]
                       : weights.times(scales[Layout::kGrouped ? g : 0][pair], pair);
      }
    }
  };

  /// Adds an item whose codes are read by columns.
  __device__ void add_columns(const std::byte* codes, const TileScales (&of_tile)[kItemTiles],
                              const Weights& weights, const OperandThread& my) {
    static_assert(kItemSlots == 32, "four matrices of 8 rows");
    constexpr int kUnit = Layout::kUnit;
    constexpr int kPart = Layout::kSwapped ? 4 : kUnit;  // numbers that share a scale
    const auto warp_lane = static_cast<int>(threadIdx.x % 32);
    const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(codes)) +
                      static_cast<uint32_t>(warp_lane * kStride);
    const uint32_t swapped = my.row < 4 ? 0x6240 : 0x3715;
    uint32_t b[kItemTiles][kGroups][2];
    int weighed = -1;  // group of b
#pragma unroll
    for (int number = 0; number < kNumbers; number += kUnit) {
      uint32_t words[4];  // of 8 slots each
      load_columns(words, from + static_cast<uint32_t>(number / kUnit * 16));
      if constexpr (Layout::kSwapped) {
#pragma unroll
        for (uint32_t& word : words) {
          word = __byte_perm(word, __shfl_xor_sync(kAll, word, 16), swapped);
        }
      }
#pragma unroll
      for (int first = number; first < number + kUnit; first += kPart) {
        const int g = Layout::kGrouped ? Layout::group(first) : 0;
        if (g != weighed) {
          weighed = g;
#pragma unroll
          for (int i = 0; i < kItemTiles * kGroups; ++i) {
            const int tile = i / kGroups;
            of_tile[tile].weigh(weights.of[tile][i % kGroups], g, b[tile][i % kGroups]);
          }
        }
#pragma unroll
        for (int step = first / 2; step < (first + kPart) / 2; ++step) {
#pragma unroll
          for (int tile = 0; tile < kItemTiles; ++tile) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              a[i] = Pairs::halves(words[2 * tile + i / 2], Layout::place(2 * step + i % 2));
            }
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
              mma(products_[group][step], a[0], a[1], a[2], a[3], b[tile][group][0],
                  b[tile][group][1]);
            }
          }
        }
      }
    }
  }

  /// Codes of the thread's channels of group g.
  static __device__ uint32_t own_codes(const std::byte* row, int g, const OperandThread& my) {
    if (!Layout::is_half(g)) return V::four(row, g, my.row);
    return V::four(row, g, my.row / 2) >> my.row % 2 * (2 * kWidth);
  }

  /// Adds a tile whose codes are read channel by channel.
  __device__ void add_code_tile(const std::byte* codes, const TileScales& of_tile,
                                const TileWeights<Layout> (&weights)[kGroups],
                                const OperandThread& my) {
    uint32_t words[kChannelGroups][2][kWidth == 8 ? 2 : 1];
#pragma unroll
    for (int g = 0; g < kChannelGroups; ++g) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const std::byte* row = codes + Layout::slot(my.quarter, 2 * pair) * kStride;
        const std::byte* next = codes + Layout::slot(my.quarter, 2 * pair + 1) * kStride;
        const uint32_t x = own_codes(row, g, my);
        const uint32_t y = own_codes(next, g, my);
        words[g][pair][0] = __byte_perm(x, y, 0x5410);
        if constexpr (kWidth == 8) words[g][pair][1] = __byte_perm(x, y, 0x7632);
      }
    }
#pragma unroll
    for (int g = 0; g < kChannelGroups; ++g) {
      uint32_t b[kGroups][2];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        of_tile.weigh(weights[group], g * kScaleGroups / kChannelGroups, b[group]);
      }
#pragma unroll
      for (int step = 2 * g; step < (Layout::is_half(g) ? 2 * g + 1 : 2 * g + 2); ++step) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int code = (2 * step + i % 2) % 4;
          const bool upper = kWidth == 8 && code >= 2;
          a[i] = Pairs::halves(words[g][i / 2][upper ? 1 : 0], upper ? code - 2 : code);
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          mma(products_[group][step], a[0], a[1], a[2], a[3], b[group][0], b[group][1]);
        }
      }
    }
  }

  float total_[kByBlock ? kGroups : 1][kNumbers] = {};
  float products_[kGroups][kSteps][4] = {};
  /// Sums of weights times zero points, or of weights (kChannel). All rows are equal, except with
  /// groups: row r has group r % kScaleGroups.
  float zeros_[kGroups][4] = {};
};

}  // namespace kvlm::cuda::packed
