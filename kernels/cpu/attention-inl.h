// The online softmax over tiles of cached rows, a template over who supplies the tiles, and the
// source of full-precision rows. Included once per instruction set by a file that has set up
// Highway's foreach_target; everything lives in kvlm::cpu::HWY_NAMESPACE.

#if defined(KVLM_KERNELS_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVLM_KERNELS_CPU_ATTENTION_INL_H_
#undef KVLM_KERNELS_CPU_ATTENTION_INL_H_
#else
#define KVLM_KERNELS_CPU_ATTENTION_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <limits>

#include "hwy/highway.h"
#include "kernels/attention.h"
#include "kernels/cpu/softmax-inl.h"
#include "kernels/cpu/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using FloatVec = hn::Vec<Floats>;
inline constexpr size_t kLanes = hn::MaxLanes(Floats());

/// Cached rows scored before their values are read. Short, so that a second pass over a tile finds
/// it in the nearest cache, also with four queries' worth of arithmetic between two rows.
inline constexpr size_t kTileRows = 32;
/// Queries that share one pass over a tile in registers; more take further passes.
inline constexpr int kMaxQueries = static_cast<int>(std::min<size_t>(4, kLanes));

/// Scores of one tile, and then its softmax weights: row per query.
struct TileScores {
  alignas(64) float of[static_cast<size_t>(kMaxQueries)][kTileRows];
};

/// Lane i of the result is the sum of the lanes of v[i]. Overwrites v.
HWY_INLINE FloatVec sums_of_lanes(FloatVec (&v)[kLanes]) {
#if HWY_TARGET != HWY_SCALAR
  const Floats d;
  HWY_UNROLL(5)
  for (size_t n = kLanes / 2; n > 0; n /= 2) {
    HWY_UNROLL(16)
    for (size_t i = 0; i < n; ++i) {
      v[i] = hn::Add(hn::ConcatEven(d, v[2 * i + 1], v[2 * i]),
                     hn::ConcatOdd(d, v[2 * i + 1], v[2 * i]));
    }
  }
#endif
  return v[0];
}

/// out[i] = float of x[i] for i < n.
template <class T>
HWY_INLINE void widen(const T* x, size_t n, float* out) {
  const Floats d;
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(load_wide(d, x + i), d, out + i);
  for (; i < n; ++i) out[i] = to_float(x[i]);
}

/// Dense rows of one kv_head as they are stored: the tile source of a full-precision cache.
template <class T>
class RowSource {
 public:
  RowSource(const KeyValueRows& cached, size_t head_dim)
      : keys_(reinterpret_cast<const T*>(cached.keys)),
        values_(reinterpret_cast<const T*>(cached.values)),
        dim_(head_dim) {}

  template <int kQueries>
  HWY_NOINLINE void score_tile(size_t first, size_t rows, const float* q,
                               TileScores& scores) const {
    if (dim_ < kLanes) return score_narrow<kQueries>(first, rows, q, scores);
    constexpr size_t kQ = static_cast<size_t>(kQueries);
    // Rows whose sums fill one vector; they are read a few at a time, which is what registers hold
    // pointers for, and side by side, which is what the prefetcher of the CPU follows.
    constexpr size_t kRows = kLanes / kQ;
    constexpr size_t kStep = kRows <= 5 ? kRows : 4;
    static_assert(kRows % kStep == 0);
    const Floats d;
    const size_t whole = dim_ / kLanes * kLanes;
    // A remainder is read as the last whole vector of the row, its lanes that were read already
    // multiplied by zeros: no masked load, and nothing beyond the row is touched.
    const bool remainder = whole != dim_;
    const size_t last = dim_ - kLanes;
    alignas(64) float q_last[kQ * kLanes];
    if (remainder) {
      const hn::Mask<Floats> seen = hn::FirstN(d, whole - last);
      for (size_t i = 0; i < kQ; ++i) {
        hn::Store(hn::IfThenZeroElse(seen, hn::LoadU(d, q + i * dim_ + last)), d,
                  q_last + i * kLanes);
      }
    }
    for (size_t begin = 0; begin < rows; begin += kRows) {
      FloatVec sum[kLanes];  // of query i and row r at i * kRows + r
      HWY_UNROLL(16)
      for (size_t i = kQ * kRows; i < kLanes; ++i) sum[i] = hn::Zero(d);
      HWY_UNROLL(4)
      for (size_t step = 0; step < kRows; step += kStep) {
        const T* key[kStep];
        FloatVec part[kQ][kStep];
        HWY_UNROLL(5)
        for (size_t r = 0; r < kStep; ++r) {
          // Rows beyond the tile repeat its last one; their scores are dropped.
          key[r] = keys_ + (first + std::min(begin + step + r, rows - 1)) * dim_;
          HWY_UNROLL(8)
          for (size_t i = 0; i < kQ; ++i) part[i][r] = hn::Zero(d);
        }
        for (size_t c = 0; c < whole; c += kLanes) {
          HWY_UNROLL(5)
          for (size_t r = 0; r < kStep; ++r) {
            const FloatVec k = load_wide(d, key[r] + c);
            HWY_UNROLL(8)
            for (size_t i = 0; i < kQ; ++i) {
              part[i][r] = hn::MulAdd(k, hn::LoadU(d, q + i * dim_ + c), part[i][r]);
            }
          }
        }
        if (remainder) {
          HWY_UNROLL(5)
          for (size_t r = 0; r < kStep; ++r) {
            const FloatVec k = load_wide(d, key[r] + last);
            HWY_UNROLL(8)
            for (size_t i = 0; i < kQ; ++i) {
              part[i][r] = hn::MulAdd(k, hn::Load(d, q_last + i * kLanes), part[i][r]);
            }
          }
        }
        HWY_UNROLL(8)
        for (size_t i = 0; i < kQ; ++i) {
          HWY_UNROLL(5)
          for (size_t r = 0; r < kStep; ++r) sum[i * kRows + step + r] = part[i][r];
        }
      }
      alignas(64) float block[kLanes];
      hn::Store(sums_of_lanes(sum), d, block);
      const size_t count = std::min(kRows, rows - begin);
      for (size_t i = 0; i < kQ; ++i) {
        // The usual count is a constant that the compiler turns into one move.
        std::memcpy(&scores.of[i][begin], block + i * kRows,
                    (count == kRows ? kRows : count) * sizeof(float));
      }
    }
  }

  template <int kQueries>
  HWY_NOINLINE void accumulate_tile(size_t first, size_t rows, const TileScores& weights,
                                    const float* rescale, float* out) const {
    if (dim_ < kLanes) return accumulate_narrow<kQueries>(first, rows, weights, rescale, out);
    // A row is best read from end to end, as the CPU's prefetcher follows it: two queries at a time
    // then leave registers for the sums of twice as many columns.
    if constexpr (kQueries > 2) {
      if (dim_ > 4 * kLanes) {
        accumulate<2>(0, first, rows, weights, rescale, out);
        accumulate<kQueries - 2>(2, first, rows, weights, rescale, out);
        return;
      }
    }
    accumulate<kQueries>(0, first, rows, weights, rescale, out);
  }

 private:
  // Queries [query, query + kQueries).
  template <int kQueries>
  HWY_INLINE void accumulate(size_t query, size_t first, size_t rows, const TileScores& weights,
                             const float* rescale, float* out) const {
    const auto* weight = weights.of + query;
    rescale += query;
    out += query * dim_;
    size_t c = 0;
    c = columns<kQueries, 8>(c, first, rows, weight, rescale, out);
    c = columns<kQueries, 4>(c, first, rows, weight, rescale, out);
    c = columns<kQueries, 2>(c, first, rows, weight, rescale, out);
    c = columns<kQueries, 1>(c, first, rows, weight, rescale, out);
    if (c == dim_) return;
    const Floats d;
    const size_t last = dim_ - kLanes;
    const hn::Mask<Floats> fresh = hn::Not(hn::FirstN(d, c - last));
    const T* value = values_ + first * dim_ + last;
    for (size_t i = 0; i < static_cast<size_t>(kQueries); ++i) {
      float* out_last = out + i * dim_ + last;
      FloatVec sum = hn::Mul(hn::LoadU(d, out_last), hn::Set(d, rescale[i]));
      for (size_t r = 0; r < rows; ++r) {
        sum = hn::MulAdd(load_wide(d, value + r * dim_), hn::Set(d, weight[i][r]), sum);
      }
      hn::BlendedStore(sum, fresh, d, out_last);
    }
  }

  // Whole groups of kVectors vectors of columns from column c on; returns the next column.
  template <int kQueries, int kVectors>
  HWY_INLINE size_t columns(size_t c, size_t first, size_t rows, const float (*weight)[kTileRows],
                            const float* rescale, float* out) const {
    constexpr size_t kQ = static_cast<size_t>(kQueries);
    constexpr size_t kV = static_cast<size_t>(kVectors);
    // As many sums as leave registers for a row and a weight (16 registers on AVX2, 32 elsewhere).
    if constexpr (kV == 1 || kQ * kV <= (kLanes == 8 ? 8 : 16)) {
      const Floats d;
      for (; c + kV * kLanes <= dim_; c += kV * kLanes) {
        FloatVec sum[kQ][kV];
        HWY_UNROLL(8)
        for (size_t i = 0; i < kQ; ++i) {
          HWY_UNROLL(8)
          for (size_t v = 0; v < kV; ++v) {
            sum[i][v] =
                hn::Mul(hn::LoadU(d, out + i * dim_ + c + v * kLanes), hn::Set(d, rescale[i]));
          }
        }
        const T* value = values_ + first * dim_ + c;
        for (size_t r = 0; r < rows; ++r, value += dim_) {
          FloatVec x[kV];
          HWY_UNROLL(8)
          for (size_t v = 0; v < kV; ++v) x[v] = load_wide(d, value + v * kLanes);
          HWY_UNROLL(8)
          for (size_t i = 0; i < kQ; ++i) {
            const FloatVec w = hn::Set(d, weight[i][r]);
            HWY_UNROLL(8)
            for (size_t v = 0; v < kV; ++v) sum[i][v] = hn::MulAdd(x[v], w, sum[i][v]);
          }
        }
        HWY_UNROLL(8)
        for (size_t i = 0; i < kQ; ++i) {
          HWY_UNROLL(8)
          for (size_t v = 0; v < kV; ++v) {
            hn::StoreU(sum[i][v], d, out + i * dim_ + c + v * kLanes);
          }
        }
      }
    }
    return c;
  }

  // Rows narrower than a vector: no model has them, so one element at a time is good enough.
  template <int kQueries>
  void score_narrow(size_t first, size_t rows, const float* q, TileScores& scores) const {
    for (size_t i = 0; i < static_cast<size_t>(kQueries); ++i) {
      for (size_t r = 0; r < rows; ++r) {
        float sum = 0;
        for (size_t c = 0; c < dim_; ++c) {
          sum += q[i * dim_ + c] * to_float(keys_[(first + r) * dim_ + c]);
        }
        scores.of[i][r] = sum;
      }
    }
  }
  template <int kQueries>
  void accumulate_narrow(size_t first, size_t rows, const TileScores& weights, const float* rescale,
                         float* out) const {
    for (size_t i = 0; i < static_cast<size_t>(kQueries); ++i) {
      for (size_t c = 0; c < dim_; ++c) {
        float sum = out[i * dim_ + c] * rescale[i];
        for (size_t r = 0; r < rows; ++r) {
          sum += weights.of[i][r] * to_float(values_[(first + r) * dim_ + c]);
        }
        out[i * dim_ + c] = sum;
      }
    }
  }

  const T* keys_;
  const T* values_;
  size_t dim_;
};

/// Turns the scores of one query and tile into weights relative to the new maximum; returns what
/// the output so far is to be multiplied by. scores[rows ... kTileRows) are overwritten.
HWY_INLINE float softmax_tile(float* scores, size_t rows, float scale, float& max, float& sum) {
  const Floats d;
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  for (size_t r = rows; r < hwy::RoundUpTo(rows, kLanes); ++r) scores[r] = kNothing;
  const FloatVec factor = hn::Set(d, scale);
  FloatVec tile_max = hn::Set(d, kNothing);
  for (size_t r = 0; r < rows; r += kLanes) {
    // Padding that became NaN (scale 0) or +inf (scale < 0) must not enter the maximum.
    const FloatVec raw = hn::Load(d, scores + r);
    const FloatVec s = hn::IfThenElse(hn::Eq(raw, hn::Set(d, kNothing)), raw, hn::Mul(raw, factor));
    hn::Store(s, d, scores + r);
    tile_max = hn::Max(tile_max, s);
  }
  const float new_max = std::max(max, hn::GetLane(hn::MaxOfLanes(d, tile_max)));
  if (new_max == kNothing) {  // every row so far is masked: exp(-inf - -inf) would be NaN
    std::fill(scores, scores + rows, 0.0f);
    return 1.0f;
  }
  FloatVec tile_sum = hn::Zero(d);
  for (size_t r = 0; r < rows; r += kLanes) {
    const FloatVec w = softmax_weight(d, hn::Sub(hn::Load(d, scores + r), hn::Set(d, new_max)));
    hn::Store(w, d, scores + r);
    tile_sum = hn::Add(tile_sum, w);
  }
  const float rescale = hn::GetLane(softmax_weight(d, hn::Set(d, max - new_max)));
  sum = sum * rescale + hn::GetLane(hn::SumOfLanes(d, tile_sum));
  max = new_max;
  return rescale;
}

/// The online softmax of kQueries queries over one tile that `source` supplies:
///   source.score_tile<kQueries>(first, rows, q, scores)  scores.of[i][r] = q_i . K_{first+r}, or
///                                                        -inf for a row that is not to be seen
///   source.accumulate_tile<kQueries>(first, rows, weights, rescale, out)
///                                    out_i = out_i * rescale[i] + sum_r weights.of[i][r]
///                                    V_{first+r}
template <int kQueries, class Source>
HWY_NOINLINE void attend_tile(const Source& source, size_t first, size_t rows, const float* q,
                              float scale, const SoftmaxState& state) {
  TileScores scores;
  float rescale[static_cast<size_t>(kQueries)];
  source.template score_tile<kQueries>(first, rows, q, scores);
  for (size_t i = 0; i < static_cast<size_t>(kQueries); ++i) {
    rescale[i] = softmax_tile(scores.of[i], rows, scale, state.max[i], state.sum[i]);
  }
  source.template accumulate_tile<kQueries>(first, rows, scores, rescale, state.out);
}

/// attend_tile() of `queries` queries, at most kQueries.
template <int kQueries, class Source>
HWY_INLINE void attend_some(int queries, const Source& source, size_t first, size_t rows,
                            const float* q, float scale, const SoftmaxState& state) {
  if constexpr (kQueries > 1) {
    if (queries < kQueries) {
      return attend_some<kQueries - 1>(queries, source, first, rows, q, scale, state);
    }
  }
  attend_tile<kQueries>(source, first, rows, q, scale, state);
}

/// Softmax state of `queries` query rows over rows [0, rows) of `source`, overwritten.
template <class Source>
HWY_INLINE void attend(const Source& source, size_t rows, const float* q, int queries,
                       size_t head_dim, float scale, const SoftmaxState& state) {
  const auto count = static_cast<size_t>(queries);
  std::fill(state.max, state.max + count, -std::numeric_limits<float>::infinity());
  std::fill(state.sum, state.sum + count, 0.0f);
  std::fill(state.out, state.out + count * head_dim, 0.0f);
  for (size_t first = 0; first < rows; first += kTileRows) {
    const size_t tile = std::min(kTileRows, rows - first);
    for (int i = 0; i < queries; i += kMaxQueries) {
      const auto at = static_cast<size_t>(i);
      const SoftmaxState some{state.max + at, state.sum + at, state.out + at * head_dim};
      attend_some<kMaxQueries>(std::min(kMaxQueries, queries - i), source, first, tile,
                               q + at * head_dim, scale, some);
    }
  }
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
