#pragma once

#include <type_traits>

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/packed_codes.h"
#include "kernels/cuda/attend/packed_mma.cuh"
#include "kernels/cuda/device/launch.cuh"

// What the kernels that attend on the tensor cores share: rows of 128 channels, of codes or of f16,
// are the rows of an operand (slots for scores, channels for values); the columns of the other are
// four queries (or their weights) as pairs of a higher and a lower half, so that nothing is lost.
namespace kvlm::cuda::packed {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kDim = 128;
constexpr int kGroupQueries = 4;  // whose parts are the 8 columns of an operand
constexpr int kTileSlots = 16;
constexpr int kSteps = kDim / 16;
constexpr unsigned kAll = 0xffffffffu;

/// 4 * kWords bytes as words, in as few loads as there are.
template <int kWords>
__device__ void load_words(const std::byte* from, uint32_t (&to)[kWords]) {
  if constexpr (kWords == 1) {
    to[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kWords % 4 != 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 x = __ldg(reinterpret_cast<const uint2*>(from) + i / 2);
      to[i] = x.x, to[i + 1] = x.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
      to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
  }
}

/// Copies 16 bytes to shared memory while the thread goes on.
__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

/// Ends a group of copies.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until all but the last kAhead groups of this thread's copies are there.
template <int kAhead>
__device__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kAhead) : "memory");
}

__device__ inline float2 two_floats(uint32_t halves) {
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

/// What codes of a section mean beside their stored scales and zero points: x = slope * s * c + z,
/// z = offset * s if none is stored. Both are powers of two, or 0.
struct Meaning {
  float slope = 1;
  float offset = 0;
  bool zero_stored = true;

  __device__ Meaning() {}
  __device__ explicit Meaning(const PackedSection& section)
      : slope(section.slope), offset(section.offset), zero_stored(section.zero_stored) {}
};

/// Scale and zero point that serve all channels: of a block, or of row i.
__device__ inline float2 one_affine(const DeviceBlock& block, int i) {
  return {__half2float(reinterpret_cast<const __half*>(block.scales)[i]),
          __half2float(reinterpret_cast<const __half*>(block.zeros)[i])};
}

/// The same of a block whose codes have a meaning of their own.
__device__ inline float2 one_affine(const DeviceBlock& block, const Meaning& meaning, int i) {
  const float scale = __half2float(reinterpret_cast<const __half*>(block.scales)[i]);
  return {meaning.slope * scale, meaning.zero_stored
                                     ? __half2float(reinterpret_cast<const __half*>(block.zeros)[i])
                                     : meaning.offset * scale};
}

/// The block of a split of full rows.
__device__ inline DeviceBlock rows_of(const DeviceRun& run, const Split& split) {
  DeviceBlock block{};
  block.codes = run.rows + static_cast<int64_t>(split.first) * kDim * 2;
  block.rows = split.count;
  block.first_slot = run.first_slot + split.first;
  return block;
}

/// Where a thread stands in an operand.
struct OperandThread {
  int warp = static_cast<int>(threadIdx.x / 32);
  int row = static_cast<int>(threadIdx.x % 32 / 4);  // and row + 8
  int quarter = static_cast<int>(threadIdx.x % 4);
  int asked = row / 2;        // of the queries of a group, as a column
  bool lower = row % 2 == 1;  // which part of it
};

/// The queries of a split in shared memory, raised so that they and their products with scales
/// below 1 are halves, every channel by the power of two of its codes.
template <int kBits, int kGroups>
struct RaisedQueries {
  using Pairs = CodePairs<kBits>;
  static constexpr int kQueries = kGroups * kGroupQueries;
  /// [group][four channels of a quarter][query of the group][quarter]
  float4 q[kGroups][8][kGroupQueries][4];
  float down[kQueries];  // what undoes the raise of a query
  float sum[kQueries];   // of a query's channels, not raised

  static __device__ float channel_power(int channel) {    // of a quarter
    constexpr int kCodes = kBits == 16 ? 1 : 32 / kBits;  // of a word
    return power_of_two(Pairs::kTop - Pairs::exponent(channel % kCodes % Pairs::kPairs));
  }

  __device__ void fill(const float* queries, int q_per_kv, int first_query, float scale) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
    for (int i = static_cast<int>(threadIdx.x / 32); i < kQueries; i += kWarps) {
      float4 x{};
      if (first_query + i < q_per_kv) {
        x = __ldg(reinterpret_cast<const float4*>(queries + (first_query + i) * kDim) + warp_lane);
        x = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
      }
      const float all = warp_sum(x.x + x.y + x.z + x.w);
      const float most =
          warp_max(fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
      const Raise raise = raise_of(most * power_of_two(Pairs::kTop - Pairs::kBottom));
      const int channel = warp_lane % 8 * 4;
      x = {x.x * raise.up * channel_power(channel), x.y * raise.up * channel_power(channel + 1),
           x.z * raise.up * channel_power(channel + 2),
           x.w * raise.up * channel_power(channel + 3)};
      q[i / kGroupQueries][warp_lane % 8][i % kGroupQueries][warp_lane / 8] = x;
      if (warp_lane == 0) {
        down[i] = raise.down;
        sum[i] = all;
      }
    }
    __syncthreads();
  }
};

/// Queries as the columns of an operand, and what is multiplied with the products of query
/// `quarter` and added to them.
template <int kBits, int kGroups>
struct FoldedQueries {
  using Pairs = CodePairs<kBits>;
  using Raised = RaisedQueries<kBits, kGroups>;
  uint32_t b[kGroups][2 * kSteps];
  float unit[kGroups];
  float bias[kGroups];

  static constexpr __device__ int first_channel(int reg) {  // of a pair, in a quarter
    if (kBits == 16) return 2 * reg;
    return reg / Pairs::kPairs * (2 * Pairs::kPairs) + reg % Pairs::kPairs;
  }
  static constexpr int kApart = kBits == 16 ? 1 : Pairs::kPairs;  // to its second channel

  __device__ static void load(const Raised& raised, int group, const OperandThread& my,
                              float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 part = raised.q[group][i][my.asked][my.quarter];
      x[4 * i] = part.x, x[4 * i + 1] = part.y, x[4 * i + 2] = part.z, x[4 * i + 3] = part.w;
    }
  }

  __device__ void split(int group, const float (&x)[32], const OperandThread& my) {
#pragma unroll
    for (int reg = 0; reg < 2 * kSteps; ++reg) {
      const int at = first_channel(reg);
      b[group][reg] = half_parts(x[at], x[at + kApart], my.lower);
    }
  }

  /// The queries as they are; bias is the sum of a query.
  __device__ void fold(const Raised& raised, const OperandThread& my) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float x[32];
      load(raised, group, my, x);
      split(group, x, my);
      const int query = group * kGroupQueries + my.quarter;
      unit[group] = raised.down[query] * power_of_two(-Pairs::kTop);
      bias[group] = raised.sum[query];
    }
  }

  /// The queries times the scales of a block's channels; bias is the sum of query * zero point.
  __device__ void fold(const Raised& raised, const DeviceBlock& block, const Meaning& meaning,
                       const OperandThread& my) {
    uint4 scales[4];
    uint4 zeros[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scales[i] = __ldg(reinterpret_cast<const uint4*>(block.scales) + my.quarter * 4 + i);
      if (meaning.zero_stored) {
        zeros[i] = __ldg(reinterpret_cast<const uint4*>(block.zeros) + my.quarter * 4 + i);
      }
    }
    auto* s = reinterpret_cast<__half2*>(scales);
    auto* z = reinterpret_cast<uint32_t*>(zeros);
    if (!meaning.zero_stored) {
      const __half2 offset = __float2half2_rn(meaning.offset);
      const __half2 slope = __float2half2_rn(meaning.slope);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        reinterpret_cast<__half2*>(zeros)[i] = __hmul2(s[i], offset);
        s[i] = __hmul2(s[i], slope);
      }
    }
    // Scales are brought below 1 by a power of two: queries times them stay halves.
    __half2 most = __habs2(s[0]);
#pragma unroll
    for (int i = 1; i < 16; ++i) most = __hmax2(most, __habs2(s[i]));
    most = __hmax2(most, __shfl_xor_sync(kAll, most, 1));
    most = __hmax2(most, __shfl_xor_sync(kAll, most, 2));
    const float greatest = fmaxf(__low2float(most), __high2float(most));
    const int exponent = max(-14, min(16, static_cast<int>(__float_as_uint(greatest) >> 23) - 126));
    const __half2 norm = __float2half2_rn(power_of_two(-exponent));
    const float norm_back = power_of_two(exponent);
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i] = __hmul2(s[i], norm);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float x[32];
      load(raised, group, my, x);
      float sums[Pairs::kTogether] = {};  // by the power of two of a channel
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const float2 zero = two_floats(z[i / 2]);
        const float2 scale = __half22float2(s[i / 2]);
        constexpr int kCodes = 32 / kBits;
        sums[i % kCodes % Pairs::kPairs % Pairs::kTogether] += x[i] * zero.x;
        sums[(i + 1) % kCodes % Pairs::kPairs % Pairs::kTogether] += x[i + 1] * zero.y;
        x[i] *= scale.x;
        x[i + 1] *= scale.y;
      }
      split(group, x, my);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < Pairs::kTogether; ++i) {
        sum += sums[i] * power_of_two(Pairs::exponent(i) - Pairs::kTop);
      }
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      const float down = raised.down[group * kGroupQueries + my.quarter];
      unit[group] = down * norm_back * power_of_two(-Pairs::kTop);
      bias[group] = __shfl_sync(kAll, sum, my.quarter * 8) * down;
    }
  }
};

constexpr int kChannelGroup = 32;  // of kGrouped kernels
constexpr int kChannelGroups = kDim / kChannelGroup;

/// The codes of the 16 channels of a thread, of one slot. Channels are 16 neighbours, or four of
/// every group of 32.
template <int kBits, bool kGrouped>
struct SlotCodes {
  static constexpr int kWords = kGrouped ? kChannelGroups : kBits < 2 ? 1 : kBits / 2;
  uint32_t words[kWords];

  __device__ void load(const std::byte* row, int part) {
    if constexpr (kGrouped) {
#pragma unroll
      for (int group = 0; group < kChannelGroups; ++group) {
        const std::byte* from = row + group * (kChannelGroup * kBits / 8);
        if constexpr (kBits == 1) {
          words[group] = __ldg(reinterpret_cast<const uint8_t*>(from) + part / 2) >> (part % 2 * 4);
        } else if constexpr (kBits == 2) {
          words[group] = __ldg(reinterpret_cast<const uint8_t*>(from) + part);
        } else if constexpr (kBits == 4) {
          words[group] = __ldg(reinterpret_cast<const uint16_t*>(from) + part);
        } else {
          words[group] = __ldg(reinterpret_cast<const uint32_t*>(from) + part);
        }
      }
    } else if constexpr (kBits == 1) {
      words[0] = __ldg(reinterpret_cast<const uint16_t*>(row) + part);
    } else {
      load_words<kWords>(row + part * 2 * kBits, words);
    }
  }
};

/// Pair `channel` (0..15) of two slots as halves.
template <int kBits, bool kGrouped>
__device__ uint32_t channel_pair(const SlotCodes<kBits, kGrouped>& x,
                                 const SlotCodes<kBits, kGrouped>& y, int channel) {
  using Pairs = CodePairs<kBits>;
  if constexpr (kGrouped) {
    const int group = channel / 4;
    const int code = channel % 4;
    const bool upper = kBits == 8 && code >= 2;
    return Pairs::halves(__byte_perm(x.words[group], y.words[group], upper ? 0x7632 : 0x5410),
                         upper ? code - 2 : code);
  } else {
    const int half = channel / Pairs::kPairs;
    return Pairs::halves(
        __byte_perm(x.words[half / 2], y.words[half / 2], half % 2 == 1 ? 0x7632 : 0x5410),
        channel % Pairs::kPairs);
  }
}

/// The power of two that a product of channel_pair's is to be multiplied with.
template <int kBits, bool kGrouped>
constexpr __device__ int channel_exponent(int channel) {
  using Pairs = CodePairs<kBits>;
  const int code = kGrouped ? channel % 4 % Pairs::kPairs : channel % Pairs::kPairs;
  return -Pairs::exponent(code);
}

/// The sums of every thread, 16 channels of query `quarter` of each group: in vectors of its own
/// beside those of the other threads, so that they fall into different banks.
template <int kGroups, bool kGrouped = false>
struct ChannelSums {
  float4 of[kWarps][kGroups][4][32];

  /// Of this thread, channels 4 `vector` on.
  __device__ float4& mine(int group, int vector) {
    return of[threadIdx.x / 32][group][vector][threadIdx.x % 32];
  }
  /// Over all warps, channels 4 `four` on of a query's row.
  __device__ float4 all(int query, int four) const {
    const int vector = kGrouped ? four / 8 : four % 4;
    const int thread = (kGrouped ? four % 8 : four / 4) * 4 + query % kGroupQueries;
    float4 sum{};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float4 x = of[warp][query / kGroupQueries][vector][thread];
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    return sum;
  }
};

/// Calls launch(groups, grid) with how many groups of queries a block serves, as a constant.
template <class Launch>
void with_groups(const AttendArgs& args, Splits splits, const Launch& launch) {
  const int groups = args.q_per_kv <= kGroupQueries ? 1 : 2;
  const dim3 grid(splits.runs, splits.most,
                  static_cast<unsigned>(ceil_div(args.q_per_kv, groups * kGroupQueries)));
  if (groups == 1) {
    launch(std::integral_constant<int, 1>{}, grid);
  } else {
    launch(std::integral_constant<int, 2>{}, grid);
  }
}

}  // namespace kvlm::cuda::packed
