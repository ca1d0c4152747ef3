#pragma once

#include "kernels/cuda/fused_keys.cuh"

// Weighted sums of the values of an item of the fused decode attention. Channels are the rows of an
// operand: thread `row` of the tensor cores has channels 4 row .. 4 row + 3 of every group of 32,
// and 2 row, 2 row + 1 of half a group at the end, so that those of a product share the scales of a
// group.
namespace kvlm::cuda::packed {

/// The weights of a tile of 16 slots as columns of an operand: pairs of slots (quarter, + 4) and
/// (+ 8, + 12) of query `asked`.
struct TileWeights {
  uint32_t plain[2];    // the part of this thread
  uint32_t flipped[2];  // the higher part, its sign flipped for threads of the lower one
  uint32_t higher[2];   // the same for threads of the lower one, else 0
  uint32_t lower[2];

  /// From the thread's own weights, of query `quarter` and slots `row` and 8 further.
  __device__ void make(const float (&own)[2], float up, const PartOf& part,
                       const OperandThread& my) {
    const int from = my.quarter * 4 + my.asked;
    const float x = own[0] * up;
    const float y = own[1] * up;
    const TwoHalves pairs[2] = {{__shfl_sync(kAll, x, from), __shfl_sync(kAll, x, from + 16)},
                                {__shfl_sync(kAll, y, from), __shfl_sync(kAll, y, from + 16)}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      plain[i] = part.plain(pairs[i].higher, pairs[i].lower);
      flipped[i] = pairs[i].higher ^ part.sign;
      higher[i] = pairs[i].higher & part.mask;
      lower[i] = pairs[i].lower & part.mask;
    }
  }

  /// The part of this thread of weight times scale.
  __device__ uint32_t times(uint32_t scales, int pair) const {
    return half2_fma(lower[pair], scales,
                     half2_fma(higher[pair], scales, half2_mul(flipped[pair], scales)));
  }
};

/// The weights of an item.
template <int kGroups>
struct ItemWeights {
  TileWeights of[kItemTiles][kGroups];

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

/// What a warp has added up of values: products of rows or codes with weights. They are in units of
/// what was added last.
template <class V, Scaled kScaled, int kGroups>
class Values {
 public:
  /// Blocks whose channels are scaled are added up one by one.
  static constexpr bool kByBlock = kScaled == Scaled::kChannel;
  using Pairs = CodePairs<V::kWidth>;
  static constexpr int kWidth = V::kWidth;
  static constexpr int kDim = V::kDim;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kChannelGroups = channel_groups(kDim);
  static constexpr int kNumbers = kDim / 8;  // channels of a thread
  static constexpr int kStride = WideRows<V>::kStride;

  /// Whether a group is half a one.
  static constexpr __device__ bool is_half(int g) { return (g + 1) * kChannelGroup > kDim; }

  /// Everything so far weighs `factor` as much.
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

  /// Adds an item of f16 rows, of which `rows` are there.
  __device__ void add_rows(const std::byte* values, int rows, const ItemWeights<kGroups>& weights,
                           const OperandThread& my) {
#pragma unroll
    for (int tile = 0; tile < kItemTiles; ++tile) {
      add_row_tile(values, tile * kTileSlots, rows, weights.of[tile], my);
    }
  }

  /// Adds an item of codes in shared memory.
  ///   scales, zeros  kToken32: (32, groups) halves in shared memory; ternary digits have no zeros
  ///   of_row  kToken: scale and zero point of the item's row `warp_lane` as two halves
  __device__ void add_codes(const std::byte* codes, const std::byte* scales, const std::byte* zeros,
                            uint32_t of_row, const ItemWeights<kGroups>& weights,
                            const OperandThread& my) {
#pragma unroll
    for (int tile = 0; tile < kItemTiles; ++tile) {
      uint32_t of_slots[4] = {};
#pragma unroll
      for (int i = 0; i < 4 && kScaled == Scaled::kToken; ++i) {
        of_slots[i] = __shfl_sync(kAll, of_row, tile * kTileSlots + my.quarter + 4 * i);
      }
      add_code_tile(codes + tile * kTileSlots * kStride, tile * kTileSlots + my.quarter, scales,
                    zeros, of_slots, weights.of[tile], my);
    }
  }

  /// Brings what was added to its own units, of rows or of codes: `down` undoes the raise of
  /// weights. Codes by block are there already.
  __device__ void bring_down(bool codes, float down, const OperandThread& my) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float sum = codes ? zeros_[group][0] + zeros_[group][1] : 0.0f;
      float zeros[kChannelGroups];
#pragma unroll
      for (int g = 0; g < kChannelGroups; ++g) {
        zeros[g] = kScaled == Scaled::kToken32 ? __shfl_sync(kAll, sum, g * 4 + my.quarter) : sum;
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
          four[2 * side] = (product * (codes ? power_of(number) : 1.0f) + zeros[number / 4]) * down;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) zeros_[group][i] = 0;
    }
  }

  /// Brings what was brought down to the units in which rows or codes are added, `up` raised.
  __device__ void bring_up(bool codes, float up) {
    if constexpr (!kByBlock) {
#pragma unroll
      for (int i = 0; i < kGroups * kNumbers; ++i) {
        const int number = i % kNumbers;
        products_[i / kNumbers][number / 2][number % 2 * 2] *=
            codes ? up * inverse_power_of(number) : up;
      }
    }
  }

  /// A sum that was brought down, of query `quarter`.
  __device__ float sum(int group, int number) const {
    if constexpr (kByBlock) return total_[group][number];
    return products_[group][number / 2][number % 2 * 2];
  }

  /// Adds a block of codes to what was brought down before it.
  ///   scales, zeros  (kDim,) halves in shared memory
  __device__ void finish_channels(float down, const PackedFormat& format, const std::byte* scales,
                                  const std::byte* zeros, const OperandThread& my) {
    static_assert(kDim % kChannelGroup == 0);
    const PackedSection& section = format.section[0];
#pragma unroll
    for (int g = 0; g < kChannelGroups; ++g) {
      const int first = g * kChannelGroup + my.row * 4;
      const uint2 s = *reinterpret_cast<const uint2*>(scales + 2 * first);
      const float2 low = two_floats(s.x);
      const float2 high = two_floats(s.y);
      const float scale[4] = {low.x, low.y, high.x, high.y};
      float zero[4];
      if (section.zero_stored) {
        const uint2 z = *reinterpret_cast<const uint2*>(zeros + 2 * first);
        const float2 zero_low = two_floats(z.x);
        const float2 zero_high = two_floats(z.y);
        zero[0] = zero_low.x, zero[1] = zero_low.y, zero[2] = zero_high.x, zero[3] = zero_high.y;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) zero[i] = section.offset * scale[i];
      }
      const float slope = section.slope * down;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float sum = (zeros_[group][0] + zeros_[group][1]) * down;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total_[group][4 * g + i] +=
              scale[i] * (product(group, 4 * g + i) * (power_of(i) * slope)) + zero[i] * sum;
        }
      }
    }
    clear();
  }

 private:
  static __device__ float power_of(int number) {
    return power_of_two(-Pairs::exponent(number % 4 % Pairs::kPairs));
  }
  static __device__ float inverse_power_of(int number) {
    return power_of_two(Pairs::exponent(number % 4 % Pairs::kPairs));
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
                               const TileWeights (&weights)[kGroups], const OperandThread& my) {
    uint2 x[4][kChannelGroups];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = min(first + my.quarter + 4 * i, rows - 1);
#pragma unroll
      for (int g = 0; g < kChannelGroups; ++g) {
        const std::byte* from = values + row * (kDim * 2) + g * (kChannelGroup * 2);
        if (is_half(g)) {
          x[i][g] = {__ldg(reinterpret_cast<const uint32_t*>(from) + my.row), 0};
        } else {
          x[i][g] = __ldg(reinterpret_cast<const uint2*>(from) + my.row);
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2& first = x[i / 2 * 2][step / 2];
        const uint2& second = x[i / 2 * 2 + 1][step / 2];
        a[i] = __byte_perm(step % 2 == 0 ? first.x : first.y, step % 2 == 0 ? second.x : second.y,
                           i % 2 == 1 ? 0x7632 : 0x5410);
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        mma(products_[group][step], a[0], a[1], a[2], a[3], weights[group].plain[0],
            weights[group].plain[1]);
      }
    }
  }

  /// Codes of the thread's channels of a group.
  static __device__ uint32_t own_codes(const std::byte* row, int g, const OperandThread& my) {
    if (!is_half(g)) return V::four(row, g, my.row);
    return V::four(row, g, my.row / 2) >> my.row % 2 * (2 * kWidth);
  }

  /// Of the tile whose codes are `codes`; the thread's slots are `slot` and 4, 8, 12 further.
  __device__ void add_code_tile(const std::byte* codes, int slot, const std::byte* scales,
                                const std::byte* zeros, const uint32_t (&of_slots)[4],
                                const TileWeights (&weights)[kGroups], const OperandThread& my) {
    constexpr int kScales = kScaled == Scaled::kToken32 ? kChannelGroups : 1;
    uint32_t s[kScales][2];
    uint32_t z[2];
    if constexpr (kScaled == Scaled::kToken32) {
      const auto zero_of = [&](int i) -> uint16_t {
        const int at = i * kScales + my.row % kScales;
        if constexpr (is_ternary(V::kSections[0].code)) {
          return reinterpret_cast<const uint16_t*>(scales)[at] ^ 0x8000;  // minus the scale
        } else {
          return reinterpret_cast<const uint16_t*>(zeros)[at];
        }
      };
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const GroupHalves<kScales> x(scales, slot + 8 * pair);
        const GroupHalves<kScales> y(scales, slot + 8 * pair + 4);
#pragma unroll
        for (int g = 0; g < kScales; ++g) {
          s[g][pair] = __byte_perm(x.pairs[g / 2], y.pairs[g / 2], g % 2 == 1 ? 0x7632 : 0x5410);
        }
        z[pair] = zero_of(slot + 8 * pair) | static_cast<uint32_t>(zero_of(slot + 8 * pair + 4))
                                                 << 16;
      }
    } else if constexpr (kScaled == Scaled::kToken) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        s[0][pair] = __byte_perm(of_slots[2 * pair], of_slots[2 * pair + 1], 0x5410);
        z[pair] = __byte_perm(of_slots[2 * pair], of_slots[2 * pair + 1], 0x7632);
      }
    } else {
      z[0] = z[1] = 0x3c003c00u;  // ones
    }
    uint32_t words[kChannelGroups][2][kWidth == 8 ? 2 : 1];
#pragma unroll
    for (int g = 0; g < kChannelGroups; ++g) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const std::byte* row = codes + (my.quarter + 8 * pair) * kStride;
        const uint32_t x = own_codes(row, g, my);
        const uint32_t y = own_codes(row + 4 * kStride, g, my);
        words[g][pair][0] = __byte_perm(x, y, 0x5410);
        if constexpr (kWidth == 8) words[g][pair][1] = __byte_perm(x, y, 0x7632);
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      mma(zeros_[group], z[0], z[0], z[1], z[1], weights[group].plain[0], weights[group].plain[1]);
    }
#pragma unroll
    for (int g = 0; g < kChannelGroups; ++g) {
      uint32_t b[kGroups][2];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          if constexpr (kScaled == Scaled::kChannel) {
            b[group][pair] = weights[group].plain[pair];
          } else {
            b[group][pair] = weights[group].times(s[g % kScales][pair], pair);
          }
        }
      }
#pragma unroll
      for (int step = 2 * g; step < (is_half(g) ? 2 * g + 1 : 2 * g + 2); ++step) {
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
  /// Sums of weights times zero points, or of weights (kChannel). Rows are equal, but for kToken32:
  /// row r has those of group r % kChannelGroups.
  float zeros_[kGroups][4] = {};
};

}  // namespace kvlm::cuda::packed
