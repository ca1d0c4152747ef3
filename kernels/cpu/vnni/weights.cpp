#include <hwy/base.h>

#if HWY_ARCH_X86_64

#include <algorithm>
#include <cstring>

#include "kernels/cpu/vnni/bytes-inl.h"
#include "kernels/cpu/vnni/weights.h"

// Two passes over the weights of a tile: the first finds the largest magnitude and adds to the
// totals of zero points, the second rounds to levels and splits.

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

SplitWeights::SplitWeights(const PackedFormat& format, const SlotWeights& weights,
                           BumpAllocator& memory)
    : weights_(weights),
      per_token_(format.axis == ScaleAxis::kToken),
      groups_(per_token_ ? static_cast<size_t>(format.groups()) : 1),
      totals_(memory.take<float>(weights.queries * groups_ * 16)),
      gathered_(memory.take<float>(weights.queries * kValueRows)),
      bytes_(memory.take<int32_t>(groups_ * kMostQueries * kValueRows)),
      step_(memory.take<float>(groups_ * kMostQueries)) {
  clear();
}

void SplitWeights::clear() { std::fill(totals_, totals_ + weights_.queries * groups_ * 16, 0.0f); }

void SplitWeights::gather(SlotWalk& walk, size_t count) {
  count_ = round_up(count, 16);
  if (walk.dense()) {
    const size_t slot = walk.next();
    walk.skip(count - 1);
    for (size_t i = 0; i < weights_.queries; ++i) {
      float* to = gathered_ + i * kValueRows;
      std::memcpy(to, weights_.of + i * weights_.stride + slot, count * sizeof(float));
      std::fill(to + count, to + count_, 0.0f);
    }
    return;
  }
  for (size_t r = 0; r < count; ++r) {
    const size_t slot = walk.next();
    for (size_t i = 0; i < weights_.queries; ++i) {
      gathered_[i * kValueRows + r] = weights_.of[i * weights_.stride + slot];
    }
  }
  for (size_t i = 0; i < weights_.queries; ++i) {
    std::fill(gathered_ + i * kValueRows + count, gathered_ + i * kValueRows + count_, 0.0f);
  }
}

/// Adds to the totals, and finds the factor from weights to levels.
template <size_t kQueries, bool kToken>
HWY_INLINE void SplitWeights::measure(size_t first, size_t group, const float* scales,
                                      const float* zeros, float* factor) {
  const float* weights = gathered_ + first * kValueRows;
  float* totals = totals_ + (first * groups_ + group) * 16;
  __m512 most[4];
  __m512 sum[kQueries];
  repeat<4>([&](auto q) __attribute__((always_inline)) { most[q] = _mm512_setzero_ps(); });
  repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
    sum[q] = _mm512_load_ps(totals + q * groups_ * 16);
  });
  for (size_t i = 0; i < count_; i += 16) {
    const __m512 s = kToken ? _mm512_load_ps(scales + i) : _mm512_setzero_ps();
    const __m512 z = kToken ? _mm512_load_ps(zeros + i) : _mm512_setzero_ps();
    repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
      const __m512 w = _mm512_load_ps(weights + q * kValueRows + i);
      sum[q] = kToken ? _mm512_fmadd_ps(w, z, sum[q]) : _mm512_add_ps(w, sum[q]);
      most[q] = larger(most[q], kToken ? _mm512_mul_ps(w, s) : w);
    });
  }
  repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
    _mm512_store_ps(totals + q * groups_ * 16, sum[q]);
  });
  set_step_sizes(largest_lanes(most[0], most[1], most[2], most[3]), step_ + group * kMostQueries,
                 factor);
}

template <size_t kQueries, bool kToken>
HWY_NOINLINE void SplitWeights::split(size_t first, size_t group, const float* scales,
                                      const float* zeros) {
  static constexpr std::array<Bytes64, 2> kIndex = quad_bytes<1>();
  float factor[4];
  measure<kQueries, kToken>(first, group, scales, zeros, factor);
  const __m512i index = load(kIndex[0].data());
  const float* weights = gathered_ + first * kValueRows;
  int32_t* out = bytes_ + group * kMostQueries * kValueRows;
  for (size_t i = 0; i < count_; i += 16) {
    const __m512 s = kToken ? _mm512_load_ps(scales + i) : _mm512_setzero_ps();
    repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
      __m512 w = _mm512_load_ps(weights + q * kValueRows + i);
      if constexpr (kToken) w = _mm512_mul_ps(w, s);
      const __m512i bytes = to_bytes(w, _mm512_set1_ps(factor[q]));
      _mm512_store_si512(out + q * kValueRows + i, _mm512_permutexvar_epi8(index, bytes));
    });
  }
}

template <bool kToken>
void SplitWeights::split(size_t first, size_t group, const float* scales, const float* zeros) {
  switch (std::min(kMostQueries, weights_.queries - first)) {
    case 1:
      return split<1, kToken>(first, group, scales, zeros);
    case 2:
      return split<2, kToken>(first, group, scales, zeros);
    case 3:
      return split<3, kToken>(first, group, scales, zeros);
    default:
      return split<4, kToken>(first, group, scales, zeros);
  }
}

void SplitWeights::split(size_t first, const float* scales, const float* zeros) {
  if (!per_token_) return split<false>(first, 0, nullptr, nullptr);
  for (size_t g = 0; g < groups_; ++g) {
    split<true>(first, g, scales + g * kValueRows, zeros + g * kValueRows);
  }
}

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()

#endif
