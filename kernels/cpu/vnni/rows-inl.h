// Rows of a tile, and their scales. LiveRowReader returns pointers to the live (not evicted) rows
// of blocks, a tile at a time. With scales per token a tile may span blocks; otherwise it ends with
// its block, whose scales its rows share. Scales and zero points are widened from f16 or f32.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>

#include "kernels/attend_packed.h"
#include "kernels/base/dtype.h"
#include "kernels/cpu/packed_slots.h"
#include "kernels/cpu/vnni/vectors-inl.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

/// `count` stored scales or zero points; any alignment.
inline void widen(const std::byte* from, DType dtype, size_t count, float* out) {
  for (size_t i = 0; i < count; i += 16) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 x = dtype == DType::kF32
                         ? _mm512_maskz_loadu_ps(mask, from + i * sizeof(float))
                         : _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from + i * sizeof(f16)));
    _mm512_mask_storeu_ps(out + i, mask, x);
  }
}

inline float stored_number(const std::byte* from, DType dtype) {
  if (dtype == DType::kF32) {
    float x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  f16 x;
  std::memcpy(&x, from, sizeof x);
  return to_float(x);
}

/// Live rows of a tile.
template <size_t kMost>
struct LiveRows {
  std::array<const uint8_t*, kMost> codes;  // filled up with the last row
  std::array<const std::byte*, kMost> scales;
  std::array<const std::byte*, kMost> zeros;
  /// kToken: whether the scales (and zero points) of rows 16 i to 16 i + 15 are contiguous.
  std::array<bool, kMost / 16> dense;
  const PackedBlock* block = nullptr;  // of the first row
  size_t count = 0;
};

/// Iterates over the live rows of a segment.
class LiveRowReader {
 public:
  explicit LiveRowReader(const SlotSegment& segment)
      : blocks_(segment.blocks),
        row_bytes_(segment.format->row_bytes()),
        meta_bytes_(segment.format->axis == ScaleAxis::kToken
                        ? static_cast<size_t>(segment.format->groups()) *
                              dtype_bytes(segment.format->meta)
                        : 0) {}

  /// Fills the batch with the next rows, of one block unless scales are per token; none at the end.
  template <size_t kMost>
  HWY_NOINLINE void read(LiveRows<kMost>& batch) {
    batch.count = 0;
    batch.dense.fill(true);
    while (batch.count < kMost) {
      while (block_ < blocks_.size() && taken_ == static_cast<size_t>(blocks_[block_].live_rows)) {
        ++block_;
        taken_ = row_ = 0;
      }
      if (block_ == blocks_.size()) break;
      if (batch.count == 0) batch.block = &blocks_[block_];
      append(blocks_[block_], batch);
      if (meta_bytes_ == 0) break;
    }
    const uint8_t* last = batch.count == 0 ? nullptr : batch.codes[batch.count - 1];
    for (size_t r = batch.count; r < kMost; ++r) batch.codes[r] = last;
    if (batch.count % 16 != 0) batch.dense[batch.count / 16] = false;
  }

 private:
  template <size_t kMost>
  void append(const PackedBlock& from, LiveRows<kMost>& batch) {
    const auto* codes = reinterpret_cast<const uint8_t*>(from.codes);
    const std::byte* zeros = from.zeros == nullptr ? from.scales : from.zeros;
    size_t r = batch.count;
    if (r % 16 != 0) batch.dense[r / 16] = false;
    if (from.live == nullptr) {
      const size_t end = std::min(kMost, r + static_cast<size_t>(from.rows) - row_);
      batch.count = end;
      taken_ += end - r;
      for (; r < end; ++r, ++row_) {
        batch.codes[r] = codes + row_ * row_bytes_;
        batch.scales[r] = from.scales + row_ * meta_bytes_;
        batch.zeros[r] = zeros + row_ * meta_bytes_;
      }
      return;
    }
    const auto live = static_cast<size_t>(from.live_rows);
    for (size_t last = row_; r < kMost && taken_ < live; ++row_) {
      if (!is_live(from, row_)) continue;
      if (r % 16 != 0 && row_ != last + 1) batch.dense[r / 16] = false;
      last = row_;
      batch.codes[r] = codes + row_ * row_bytes_;
      batch.scales[r] = from.scales + row_ * meta_bytes_;
      batch.zeros[r++] = zeros + row_ * meta_bytes_;
      ++taken_;
    }
    batch.count = r;
  }

  std::span<const PackedBlock> blocks_;
  size_t row_bytes_;
  size_t meta_bytes_;  // of a row of kToken
  size_t block_ = 0;
  size_t row_ = 0;
  size_t taken_ = 0;
};

/// Scales of kToken by group: out[g * stride + r] of row r.
class TokenMeta {
 public:
  explicit TokenMeta(const PackedFormat& format)
      : groups_(format.axis == ScaleAxis::kToken ? static_cast<size_t>(format.groups()) : 1),
        dtype_(format.meta) {
    for (size_t half = 0; half < 2; ++half) {
      for (size_t i = 0; i < 32; ++i) {
        const size_t group = 2 * half + i / 16;
        index_[half][i] = static_cast<uint16_t>(group < groups_ ? i % 16 * groups_ + group : 0);
      }
    }
  }

  /// Reads rows [16 i, 16 i + 16) of the batch; missing rows give 0. Prefetches those of the next
  /// batch.
  template <size_t kMost>
  HWY_NOINLINE void read(const LiveRows<kMost>& batch,
                         const std::array<const std::byte*, kMost>& rows,
                         const LiveRows<kMost>& next,
                         const std::array<const std::byte*, kMost>& next_rows, size_t i, float* out,
                         size_t stride) const {
    if (16 * i < next.count) prefetch_lines(next_rows[16 * i], 16 * groups_ * dtype_bytes(dtype_));
    out += 16 * i;
    if (batch.dense[i] && groups_ <= 4 && dtype_ == DType::kF16) {
      const std::byte* from = rows[16 * i];
      const size_t halves = 16 * groups_;
      const __m512i x0 = _mm512_maskz_loadu_epi16(mask_of(halves), from);
      const __m512i x1 =
          _mm512_maskz_loadu_epi16(mask_of(halves - std::min<size_t>(halves, 32)), from + 64);
      for (size_t g = 0; g < groups_; g += 2) {
        const __m512i two = _mm512_permutex2var_epi16(x0, load(index_[g / 2].data()), x1);
        _mm512_storeu_ps(out + g * stride, _mm512_cvtph_ps(_mm512_castsi512_si256(two)));
        if (g + 1 == groups_) break;
        _mm512_storeu_ps(out + (g + 1) * stride,
                         _mm512_cvtph_ps(_mm512_extracti64x4_epi64(two, 1)));
      }
      return;
    }
    const size_t count = std::min<size_t>(16, batch.count - 16 * i);
    for (size_t g = 0; g < groups_; ++g) {
      for (size_t r = 0; r < 16; ++r) {
        out[g * stride + r] =
            r < count ? stored_number(rows[16 * i + r] + g * dtype_bytes(dtype_), dtype_) : 0;
      }
    }
  }

 private:
  static __mmask32 mask_of(size_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }

  size_t groups_;
  DType dtype_;
  alignas(64) std::array<std::array<uint16_t, 32>, 2> index_;
};

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
