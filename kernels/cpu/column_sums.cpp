#include "kernels/cpu/column_sums.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/matmul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/column_sums.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/softmax-inl.h"

#ifndef KVLM_KERNELS_CPU_COLUMN_SUMS_CPP_ONCE_
#define KVLM_KERNELS_CPU_COLUMN_SUMS_CPP_ONCE_
namespace kvlm::cpu {

/// Rows of a tile: (query, head) pairs of one kv_head. A tile's scores over a few thousand columns
/// then stay in the second-level cache, and the matrix product has rows enough to be fast.
constexpr size_t kSumRows = 64;
/// Rows of scores start at multiples of the longest vector.
constexpr size_t kSumAlign = 16;
/// Rows that are added to the columns side by side; divides kSumRows.
constexpr size_t kAddRows = 4;
static_assert(kSumRows % kAddRows == 0);

}  // namespace kvlm::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Turns scores[0, seen) into exp(score - max) and zeroes the rest up to `padded`; returns the
/// reciprocal of their sum and counts in `small` those below 0.01, the weight of the maximum being
/// 1.
HWY_INLINE float weigh_row(float* HWY_RESTRICT scores, size_t seen, size_t padded, size_t* small) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const size_t whole = hwy::RoundUpTo(seen, lanes);
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  std::fill(scores + seen, scores + whole, kNothing);
  std::fill(scores + whole, scores + padded, 0.0f);
  auto max = hn::Set(d, kNothing);
  for (size_t j = 0; j < whole; j += lanes) max = hn::Max(max, hn::Load(d, scores + j));
  max = hn::MaxOfLanes(d, max);
  auto sum = hn::Zero(d);
  const auto threshold = hn::Set(d, 0.01f);
  size_t below = 0;
  for (size_t j = 0; j < whole; j += lanes) {
    const auto w = softmax_weight(d, hn::Sub(hn::Load(d, scores + j), max));
    hn::Store(w, d, scores + j);
    sum = hn::Add(sum, w);
    if (small != nullptr) below += hn::CountTrue(d, hn::Lt(w, threshold));
  }
  if (small != nullptr) *small += below - (whole - seen);
  return 1 / hn::GetLane(hn::SumOfLanes(d, sum));
}

/// sums[j] += sum_r factor[r] * weights[r * stride + j] over `rows`, a multiple of kAddRows, rows
/// and `columns`, a multiple of kSumAlign.
HWY_INLINE void add_rows(const float* HWY_RESTRICT weights, size_t stride,
                         const float* HWY_RESTRICT factor, size_t rows, size_t columns,
                         float* HWY_RESTRICT sums) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  for (size_t r = 0; r < rows; r += kAddRows, weights += kAddRows * stride) {
    const auto f0 = hn::Set(d, factor[r]);
    const auto f1 = hn::Set(d, factor[r + 1]);
    const auto f2 = hn::Set(d, factor[r + 2]);
    const auto f3 = hn::Set(d, factor[r + 3]);
    for (size_t j = 0; j < columns; j += lanes) {
      auto sum = hn::MulAdd(f0, hn::Load(d, weights + j), hn::Load(d, sums + j));
      sum = hn::MulAdd(f1, hn::Load(d, weights + stride + j), sum);
      sum = hn::MulAdd(f2, hn::Load(d, weights + 2 * stride + j), sum);
      hn::Store(hn::MulAdd(f3, hn::Load(d, weights + 3 * stride + j), sum), d, sums + j);
    }
  }
}

/// What a tile of scores adds to the columns: sums[0, columns) overwritten. Row r sees seen[r]
/// columns and counts weight[r] times; small[r] counts its small entries, small may be null.
void sum_tile(float* scores, size_t stride, const size_t* seen, const float* weight, size_t rows,
              size_t columns, float* sums, size_t* small) {
  float factor[kSumRows] = {};
  for (size_t r = 0; r < rows; ++r) {
    factor[r] = weight[r] * weigh_row(scores + r * stride, seen[r], columns,
                                      small == nullptr ? nullptr : small + r);
  }
  const size_t whole = hwy::RoundUpTo(rows, kAddRows);
  for (size_t r = rows; r < whole; ++r) std::fill_n(scores + r * stride, columns, 0.0f);
  std::fill_n(sums, columns, 0.0f);
  add_rows(scores, stride, factor, whole, columns, sums);
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(sum_tile);

namespace {

constexpr size_t kConvertedKeys = 256;

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

/// Sums of one kv_head over the tiles of one task.
struct Partial {
  std::vector<double> sums;   // (columns,)
  std::vector<size_t> small;  // (q_per_kv,)
};

}  // namespace

void column_sums(const QueuedSums& result, ConstTensorView q, ConstTensorView k,
                 std::span<const KeyValueRows> past, SummedRows summed, float scale,
                 Stream& stream) {
  const auto n = static_cast<size_t>(q.shape()[0]);
  const auto q_heads = static_cast<size_t>(q.shape()[1]);
  const auto dim = static_cast<size_t>(q.shape()[2]);
  const auto kv_heads = static_cast<size_t>(k.shape()[1]);
  const auto first = static_cast<size_t>(summed.first);
  const size_t q_per_kv = q_heads / kv_heads;
  const size_t runs = past.size() / kv_heads;
  size_t past_rows = 0;
  for (const KeyValueRows& run : past.first(runs)) past_rows += static_cast<size_t>(run.rows);
  const size_t columns = past_rows + n;
  const size_t pairs = (n - first) * q_per_kv;  // (query, head) pairs of one kv_head
  const size_t tiles = divide_up(pairs, kSumRows);
  // A task takes every tasks-th tile of a head, early (short) and late (long) ones alike, and sums
  // them for itself. Sizes alone decide how many tasks there are, hence the order of all sums.
  constexpr size_t kWantedTasks = 64;
  const size_t tasks = std::min(tiles, divide_up(kWantedTasks, kv_heads));
  const size_t stride = divide_up(columns, kSumAlign) * kSumAlign;
  const bool count_small = !result.small_entries.empty();
  const size_t scratch_floats = (kSumRows + 1) * stride + (kSumRows + kConvertedKeys) * dim;

  std::vector<Partial> partials(kv_heads * tasks);
  stream.pool().parallel_for(partials.size(), [&](size_t task, int worker) {
    const size_t head = task / tasks;
    Partial& partial = partials[task];
    partial.sums.assign(columns, 0.0);
    partial.small.assign(q_per_kv, 0);
    auto* scores = reinterpret_cast<float*>(stream.scratch(worker, scratch_floats * sizeof(float)));
    float* sums = scores + kSumRows * stride;
    float* queries = sums + stride;
    float* keys = queries + kSumRows * dim;
    for (size_t tile = task % tasks; tile < tiles; tile += tasks) {
      const size_t begin = tile * kSumRows;
      const size_t rows = std::min(kSumRows, pairs - begin);
      size_t seen[kSumRows];
      float weight[kSumRows];
      for (size_t r = 0; r < rows; ++r) {
        const size_t query = first + (begin + r) / q_per_kv;
        const size_t q_head = head * q_per_kv + (begin + r) % q_per_kv;
        const float* from = q.as<float>() + (query * q_heads + q_head) * dim;
        for (size_t c = 0; c < dim; ++c) queries[r * dim + c] = from[c] * scale;
        seen[r] = past_rows + query + 1;
        weight[r] = summed_weight(summed.newest_weight, static_cast<int64_t>(query - first),
                                  static_cast<int64_t>(n - first));
      }
      const auto score = [&](size_t column, const float* rows_of_keys, size_t key_stride,
                             size_t count) {
        multiply({scores + column, stride}, {queries, dim}, {rows_of_keys, key_stride}, rows, count,
                 dim, /*add=*/false);
      };
      size_t column = 0;
      for (const KeyValueRows& run : past.subspan(head * runs, runs)) {
        const auto run_rows = static_cast<size_t>(run.rows);
        if (run.dtype == DType::kF32 && run_rows > 0) {
          score(column, reinterpret_cast<const float*>(run.keys), dim, run_rows);
        } else {
          for (size_t i = 0; i < run_rows; i += kConvertedKeys) {
            const size_t count = std::min(kConvertedKeys, run_rows - i);
            convert_elements(reinterpret_cast<std::byte*>(keys), DType::kF32,
                             run.keys + i * dim * dtype_bytes(run.dtype), run.dtype, count * dim);
            score(column + i, keys, dim, count);
          }
        }
        column += run_rows;
      }
      const size_t last = seen[rows - 1];
      score(column, k.as<float>() + head * dim, kv_heads * dim, last - past_rows);
      size_t small[kSumRows] = {};
      HWY_DYNAMIC_DISPATCH(sum_tile)
      (scores, stride, seen, weight, rows, divide_up(last, kSumAlign) * kSumAlign, sums,
       count_small ? small : nullptr);
      for (size_t j = 0; j < last; ++j) partial.sums[j] += static_cast<double>(sums[j]);
      for (size_t r = 0; r < rows; ++r) partial.small[(begin + r) % q_per_kv] += small[r];
    }
  });

  const double share = 1 / static_cast<double>(q_per_kv);
  for (size_t head = 0; head < kv_heads; ++head) {
    double* to = result.sums + head * static_cast<size_t>(result.stride);
    std::fill(to + result.held, to + columns, 0.0);
    for (size_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (size_t task = 0; task < tasks; ++task) sum += partials[head * tasks + task].sums[j];
      to[j] += sum * share;
    }
    for (size_t h = 0; count_small && h < q_per_kv; ++h) {
      for (size_t task = 0; task < tasks; ++task) {
        result.small_entries[head * q_per_kv + h] +=
            static_cast<double>(partials[head * tasks + task].small[h]);
      }
    }
  }
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
