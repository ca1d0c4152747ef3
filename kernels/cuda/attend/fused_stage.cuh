#pragma once

#include "kernels/cuda/attend/fused_lane.cuh"

// What a warp of the fused decode attention has in shared memory of the item at hand and of the
// next one, and the copies that bring it there.
namespace kvlm::cuda::packed {

/// Codes and what scales them, of the keys or values of an item, in shared memory. Scales of the
/// channels of keys are read by quarters, which lie apart.
template <class C, Scaled kScaled, bool kQuartersApart>
struct StageOf {
  static constexpr int kDim = C::kDim;
  static constexpr int kRowMeta =
      2 * scale_groups(kScaled, kDim);  // bytes of scales of a row's groups
  /// Whether those lie at no multiple of what one copy takes.
  static constexpr bool kSkewed = (kRowMeta & (kRowMeta - 1)) != 0;
  static constexpr int kPad = kQuartersApart ? quarter_pad(kDim) : 0;
  static constexpr int kZerosAt =  // of `meta`
      kItemSlots * kRowMeta + (kScaled == Scaled::kChannel ? 4 * kPad
                               : kSkewed                   ? 16
                                                           : 0);
  /// Where a scale serves a row, threads keep it.
  static constexpr int kMetaBytes = kScaled == Scaled::kToken ? 16 : 2 * kZerosAt;
  static constexpr int kCodeBytes = (kItemSlots * C::kStride + 15) / 16 * 16 + 16;

  alignas(16) std::byte codes[kCodeBytes];
  alignas(16) std::byte meta[kMetaBytes];  // of channels or of groups; scales, then zero points

  /// The row that an item begins with, which is row `row` of its block, behind what comes with it
  /// because copies are of 16 bytes.
  __device__ const std::byte* rows(int row) const {
    return codes + (C::kRowBytes % 16 == 0 ? 0 : row * C::kRowBytes % 16);
  }

  /// Begins to copy the codes of `rows` rows of a block. Copies of no bytes read nothing.
  __device__ void copy_codes(const std::byte* block, int row, int rows) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(codes));
    if constexpr (C::kRowBytes % 16 == 0) {
      constexpr int kChunks = C::kRowBytes / 16;
      const std::byte* from = block + (row * C::kRowBytes + lane * 16);
      const auto copied_to = [&](int chunk) {
        return chunk / kChunks * C::kStride + chunk % kChunks * 16;
      };
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {  // kItemSlots is a warp
        // Rows that are whole in 32 chunks leave the same part of a row to a thread.
        const int place =
            32 % kChunks == 0 ? copied_to(lane) + copied_to(32 * i) : copied_to(lane + 32 * i);
        copy_some(to + place, from + 512 * i, lane < rows * kChunks - 32 * i ? 16 : 0);
      }
    } else {
      const int at = row * C::kRowBytes;
      const int skew = at % 16;
      const int bytes = rows == 0 ? 0 : skew + rows * C::kRowBytes;
      const std::byte* from = block + (at - skew);
#pragma unroll
      for (int byte = 0; byte < kItemSlots * C::kRowBytes + 15; byte += 32 * 16) {
        const int mine = byte + lane * 16;
        if (mine < kCodeBytes) copy_some(to + mine, from + mine, max(0, min(16, bytes - mine)));
      }
    }
  }

  /// Begins to copy the scales and zero points of channels, or of groups of the item's rows.
  ///   scales, zeros  of the block
  ///   stored         zero points of a block whose channels are scaled
  __device__ void copy_meta(const std::byte* scales, const std::byte* zeros, int row, int rows,
                            int stored) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(meta));
    if constexpr (kScaled == Scaled::kChannel) {
      constexpr int kChunks = kDim / 8;  // of either
#pragma unroll
      for (int first = 0; first < 2 * kChunks; first += 32) {
        const int i = first + lane;
        if (2 * kChunks % 32 != 0 && i >= 2 * kChunks) break;
        const bool scale = i < kChunks;
        const int chunk = scale ? i : i - kChunks;
        const int at = (scale ? 0 : kZerosAt) + chunk * 16 + chunk * 4 / kChunks * kPad;
        copy_some(to + at, (scale ? scales : zeros) + chunk * 16,
                  rows > 0 && (scale || chunk * 8 < stored) ? 16 : 0);
      }
    } else if constexpr (scaled_group(kScaled) != 0) {
      constexpr int kSize = kSkewed ? 8 : kRowMeta;
      const int at = row * kRowMeta - skew(row) + lane * kSize;
      const int left = skew(row) + rows * kRowMeta - lane * kSize;
      const bool there = kSkewed ? rows > 0 : lane < rows;
      const int bytes = !there ? 0 : kSkewed ? max(0, min(kSize, left)) : kSize;
      if (lane * kSize < kZerosAt) {
        copy_few<kSize>(to + lane * kSize, scales + at, bytes);
        if constexpr (codecs::CodeOf<C>::kZeroStored) {
          copy_few<kSize>(to + kZerosAt + lane * kSize, zeros + at, bytes);
        }
      }
    }
  }

  /// Scales of an item's rows, by group; zero points lie kZerosAt behind them.
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
  /// Bytes that come before the scales of the item's first row because of what a copy takes.
  static __device__ int skew(int row) { return kSkewed ? row * kRowMeta % 8 : 0; }
};

template <class K, Scaled kKeys, class V, Scaled kValues>
struct Stage {
  StageOf<K, kKeys, true> keys;
  StageOf<V, kValues, false> values;
};

/// What a warp has of shared memory.
template <class K, Scaled kKeys, class V, Scaled kValues>
struct WarpStages {
  using OneStage = Stage<K, kKeys, V, kValues>;
  OneStage stage[2];
  Places places;
  alignas(16) std::byte wide[WideRows<V>::kBytes + 16];

  /// The codes of an item's values as they are added.
  __device__ const std::byte* wide_values(OneStage& from, const Item& item) {
    const std::byte* rows = from.values.rows(item.row[kValueSide]);
    if constexpr (WideRows<V>::kBytes == 0) {
      return rows;
    } else {
      if (!item.facts[kValueSide].coded()) return rows;
      const int lane = static_cast<int>(threadIdx.x % 32);
      V::widen_row(rows + lane * V::kStride, wide + lane * V::kWideStride);
      __syncwarp();
      return wide;
    }
  }
};

/// Scale and zero point of a row that one of each serves, as two halves: of an item's row
/// `warp_lane`, none behind its last.
///   scales, zeros  of the block; one of each if not `by_row`
__device__ inline uint32_t row_meta(bool by_row, const std::byte* scales, const std::byte* zeros,
                                    int row, int rows) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane >= rows) return 0;
  const int at = by_row ? row + lane : 0;
  return __ldg(reinterpret_cast<const uint16_t*>(scales) + at) |
         static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(zeros) + at)) << 16;
}

}  // namespace kvlm::cuda::packed
