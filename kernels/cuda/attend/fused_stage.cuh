#pragma once

#include "kernels/cuda/attend/fused_head.cuh"

// Shared memory of a warp: codes, scales and zero points of the current item and of the next one,
// copied with cp.async. fused_item.cuh calls the copies, fused_keys.cuh and fused_values.cuh read.
namespace kvlm::cuda::packed {

/// Codes, scales and zero points of an item's keys, or values. Scales by channel of keys are read
/// by quarters (kQuartersApart), padded by quarter_pad().
template <class C, Scaled kScaled, bool kQuartersApart>
struct StageOf {
  static constexpr int kDim = C::kDim;
  static constexpr int kRowMeta = 2 * scale_groups(kScaled, kDim);  // bytes of a token's scales
  /// Whether those are no power of two: copies of 8 bytes then begin before the first token's.
  static constexpr bool kSkewed = (kRowMeta & (kRowMeta - 1)) != 0;
  static constexpr int kPad = kQuartersApart ? quarter_pad(kDim) : 0;
  static constexpr int kZerosAt =  // offset in `meta`
      kItemSlots * kRowMeta + (kScaled == Scaled::kChannel ? 4 * kPad
                               : kSkewed                   ? 16
                                                           : 0);
  /// Scales by token are in registers, not here.
  static constexpr int kMetaBytes = kScaled == Scaled::kToken ? 16 : 2 * kZerosAt;
  static constexpr int kCodeBytes = (kItemSlots * C::kStride + 15) / 16 * 16 + 16;

  alignas(16) std::byte codes[kCodeBytes];
  alignas(16) std::byte meta[kMetaBytes];  // scales, then zero points, of channels or groups

  /// The item's first token, row `row` of its block. Copies of 16 bytes may begin before it.
  __device__ const std::byte* rows(int row) const {
    return codes + (C::kRowBytes % 16 == 0 ? 0 : row * C::kRowBytes % 16);
  }

  /// Begins to copy the codes of `rows` rows of a block. A copy of 0 bytes reads nothing.
  __device__ void copy_codes(const std::byte* block, int row, int rows) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(codes));
    if constexpr (C::kRowBytes % 16 == 0) {
      constexpr int kChunks = C::kRowBytes / 16;
      const std::byte* from = block + (row * C::kRowBytes + warp_lane * 16);
      const auto copied_to = [&](int chunk) {
        return chunk / kChunks * C::kStride + chunk % kChunks * 16;
      };
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {  // kItemSlots is the warp size
        // If kChunks divides 32, a thread copies the same chunk of every token.
        const int place = 32 % kChunks == 0 ? copied_to(warp_lane) + copied_to(32 * i)
                                            : copied_to(warp_lane + 32 * i);
        copy_some(to + place, from + 512 * i, warp_lane < rows * kChunks - 32 * i ? 16 : 0);
      }
    } else {
      const int at = row * C::kRowBytes;
      const int skew = at % 16;
      const int bytes = rows == 0 ? 0 : skew + rows * C::kRowBytes;
      const std::byte* from = block + (at - skew);
#pragma unroll
      for (int byte = 0; byte < kItemSlots * C::kRowBytes + 15; byte += 32 * 16) {
        const int mine = byte + warp_lane * 16;
        if (mine < kCodeBytes) copy_some(to + mine, from + mine, max(0, min(16, bytes - mine)));
      }
    }
  }

  /// Begins to copy the scales and zero points of channels, or of the item's groups.
  ///   scales, zeros  of the block
  ///   stored         channels: the number of stored zero points
  __device__ void copy_meta(const std::byte* scales, const std::byte* zeros, int row, int rows,
                            int stored) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(meta));
    if constexpr (kScaled == Scaled::kChannel) {
      constexpr int kChunks = kDim / 8;  // of either
#pragma unroll
      for (int first = 0; first < 2 * kChunks; first += 32) {
        const int i = first + warp_lane;
        if (2 * kChunks % 32 != 0 && i >= 2 * kChunks) break;
        const bool scale = i < kChunks;
        const int chunk = scale ? i : i - kChunks;
        const int at = (scale ? 0 : kZerosAt) + chunk * 16 + chunk * 4 / kChunks * kPad;
        copy_some(to + at, (scale ? scales : zeros) + chunk * 16,
                  rows > 0 && (scale || chunk * 8 < stored) ? 16 : 0);
      }
    } else if constexpr (scaled_group(kScaled) != 0) {
      constexpr int kSize = kSkewed ? 8 : kRowMeta;
      const int at = row * kRowMeta - skew(row) + warp_lane * kSize;
      const int left = skew(row) + rows * kRowMeta - warp_lane * kSize;
      const bool there = kSkewed ? rows > 0 : warp_lane < rows;
      const int bytes = !there ? 0 : kSkewed ? max(0, min(kSize, left)) : kSize;
      if (warp_lane * kSize < kZerosAt) {
        copy_few<kSize>(to + warp_lane * kSize, scales + at, bytes);
        if constexpr (codecs::CodeOf<C>::kZeroStored) {
          copy_few<kSize>(to + kZerosAt + warp_lane * kSize, zeros + at, bytes);
        }
      }
    }
  }

  /// Scales of an item's tokens, by group; zero points follow kZerosAt bytes later.
  __device__ const std::byte* group_scales(int row) const { return meta + skew(row); }

 private:
  static __device__ void copy_some(uint32_t to, const std::byte* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
  }
  template <int kSize>
  static __device__ void copy_few(uint32_t to, const std::byte* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kSize),
                 "r"(bytes));
  }
  /// Bytes copied before the scales of the item's first token.
  static __device__ int skew(int row) { return kSkewed ? row * kRowMeta % 8 : 0; }
};

template <class K, Scaled kKeys, class V, Scaled kValues>
struct Stage {
  StageOf<K, kKeys, true> keys;
  StageOf<V, kValues, false> values;
};

/// Shared memory of a warp.
template <class K, Scaled kKeys, class V, Scaled kValues>
struct WarpStages {
  using OneStage = Stage<K, kKeys, V, kValues>;
  OneStage stage[2];
  Places places;
  alignas(16) std::byte wide[WideRows<V>::kBytes + 16];

  /// Codes of an item's values as they are multiplied: widened if the codec needs it.
  __device__ const std::byte* wide_values(OneStage& from, const Item& item) {
    const std::byte* rows = from.values.rows(item.row[kValueSide]);
    if constexpr (WideRows<V>::kBytes == 0) {
      return rows;
    } else {
      if (!item.facts[kValueSide].coded()) return rows;
      const int warp_lane = static_cast<int>(threadIdx.x % 32);
      V::widen_row(rows + warp_lane * V::kStride, wide + warp_lane * V::kWideStride);
      __syncwarp();
      return wide;
    }
  }
};

/// Scale and zero point of this warp lane's token of an item, as two halves; 0 after the last.
///   scales, zeros  of the block; one of each if not `by_row`
__device__ inline uint32_t row_meta(bool by_row, const std::byte* scales, const std::byte* zeros,
                                    int row, int rows) {
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  if (warp_lane >= rows) return 0;
  const int at = by_row ? row + warp_lane : 0;
  return __ldg(reinterpret_cast<const uint16_t*>(scales) + at) |
         static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(zeros) + at)) << 16;
}

}  // namespace kvlm::cuda::packed
