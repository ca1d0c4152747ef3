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
constexpr size_t kWantedTasks = 64;

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

/// A call, and how it is divided.
struct SumJob {
  ConstTensorView q, k;
  std::span<const KeyValueRows> past;
  SummedRows summed;
  float scale;

  size_t n() const { return static_cast<size_t>(q.shape()[0]); }
  size_t dim() const { return static_cast<size_t>(q.shape()[2]); }
  size_t q_heads() const { return static_cast<size_t>(q.shape()[1]); }
  size_t kv_heads() const { return static_cast<size_t>(k.shape()[1]); }
  size_t q_per_kv() const { return q_heads() / kv_heads(); }
  size_t first() const { return static_cast<size_t>(summed.first); }
  size_t runs() const { return past.size() / kv_heads(); }  // of a kv_head
  size_t past_rows() const {
    size_t rows = 0;
    for (const KeyValueRows& run : past.first(runs())) rows += static_cast<size_t>(run.rows);
    return rows;
  }
  size_t columns() const { return past_rows() + n(); }
  size_t pairs() const { return (n() - first()) * q_per_kv(); }  // (query, head), of a kv_head
  size_t tiles() const { return divide_up(pairs(), kSumRows); }
  /// A task takes every tasks-th tile of a head, early (short) and late (long) ones alike, and sums
  /// them for itself. Sizes alone decide how many there are, hence the order of all sums.
  size_t tasks() const { return std::min(tiles(), divide_up(kWantedTasks, kv_heads())); }
  size_t stride() const { return divide_up(columns(), kSumAlign) * kSumAlign; }
  size_t scratch_bytes() const {
    return ((kSumRows + 1) * stride() + (kSumRows + kConvertedKeys) * dim()) * sizeof(float);
  }
};

/// Sums of one kv_head over the tiles of one task.
struct Partial {
  std::vector<double> sums;   // (columns,)
  std::vector<size_t> small;  // (q_per_kv,)
};

/// What a worker has for itself.
struct TileSpace {
  float* scores;   // (kSumRows, stride)
  float* sums;     // (stride,)
  float* queries;  // (kSumRows, dim), scaled
  float* keys;     // (kConvertedKeys, dim)

  TileSpace(const SumJob& job, std::byte* scratch)
      : scores(reinterpret_cast<float*>(scratch)),
        sums(scores + kSumRows * job.stride()),
        queries(sums + job.stride()),
        keys(queries + kSumRows * job.dim()) {}
};

/// Pairs [begin, begin + rows) of a kv_head.
struct PairTile {
  size_t begin;
  size_t rows;
  size_t seen[kSumRows];  // columns
  float weight[kSumRows];
};

PairTile load_tile(const SumJob& job, size_t head, size_t number, float* queries) {
  PairTile tile;
  tile.begin = number * kSumRows;
  tile.rows = std::min(kSumRows, job.pairs() - tile.begin);
  const size_t first = job.first();
  const size_t per_kv = job.q_per_kv();
  const size_t dim = job.dim();
  for (size_t r = 0; r < tile.rows; ++r) {
    const size_t query = first + (tile.begin + r) / per_kv;
    const size_t q_head = head * per_kv + (tile.begin + r) % per_kv;
    const float* from = job.q.as<float>() + (query * job.q_heads() + q_head) * dim;
    for (size_t c = 0; c < dim; ++c) queries[r * dim + c] = from[c] * job.scale;
    tile.seen[r] = job.past_rows() + query + 1;
    tile.weight[r] = summed_weight(job.summed, static_cast<int64_t>(query - first),
                                   static_cast<int64_t>(job.n() - first));
  }
  return tile;
}

/// Scores of the columns that a tile sees.
void score_tile(const SumJob& job, size_t head, const PairTile& tile, const TileSpace& space) {
  const auto score = [&](size_t column, const float* keys, size_t key_stride, size_t count) {
    multiply({space.scores + column, job.stride()}, {space.queries, job.dim()}, {keys, key_stride},
             tile.rows, count, job.dim(), /*add=*/false);
  };
  const size_t runs = job.runs();
  size_t column = 0;
  for (const KeyValueRows& run : job.past.subspan(head * runs, runs)) {
    const auto run_rows = static_cast<size_t>(run.rows);
    if (run.dtype == DType::kF32 && run_rows > 0) {
      score(column, reinterpret_cast<const float*>(run.keys), job.dim(), run_rows);
    } else {
      for (size_t i = 0; i < run_rows; i += kConvertedKeys) {
        const size_t count = std::min(kConvertedKeys, run_rows - i);
        convert_elements(reinterpret_cast<std::byte*>(space.keys), DType::kF32,
                         run.keys + i * job.dim() * dtype_bytes(run.dtype), run.dtype,
                         count * job.dim());
        score(column + i, space.keys, job.dim(), count);
      }
    }
    column += run_rows;
  }
  score(column, job.k.as<float>() + head * job.dim(), job.kv_heads() * job.dim(),
        tile.seen[tile.rows - 1] - job.past_rows());
}

/// Adds the weights of a tile that has been scored.
void add_tile(const SumJob& job, const PairTile& tile, const TileSpace& space, bool count_small,
              Partial& partial) {
  const size_t last = tile.seen[tile.rows - 1];
  size_t small[kSumRows] = {};
  HWY_DYNAMIC_DISPATCH(sum_tile)
  (space.scores, job.stride(), tile.seen, tile.weight, tile.rows,
   divide_up(last, kSumAlign) * kSumAlign, space.sums, count_small ? small : nullptr);
  for (size_t j = 0; j < last; ++j) partial.sums[j] += static_cast<double>(space.sums[j]);
  for (size_t r = 0; r < tile.rows; ++r)
    partial.small[(tile.begin + r) % job.q_per_kv()] += small[r];
}

/// Adds what the tasks of a head have summed.
void add_partials(const SumJob& job, size_t head, std::span<const Partial> partials,
                  const QueuedSums& result) {
  const double share = 1 / static_cast<double>(job.q_per_kv());
  const size_t columns = job.columns();
  double* to = result.sums + head * static_cast<size_t>(result.stride);
  std::fill(to + result.held, to + columns, 0.0);
  for (size_t j = 0; j < columns; ++j) {
    double sum = 0;
    for (const Partial& partial : partials) sum += partial.sums[j];
    to[j] += sum * share;
  }
  if (result.small_entries.empty()) return;
  for (size_t h = 0; h < job.q_per_kv(); ++h) {
    double& entries = result.small_entries[head * job.q_per_kv() + h];
    for (const Partial& partial : partials) entries += static_cast<double>(partial.small[h]);
  }
}

}  // namespace

void column_sums(const QueuedSums& result, ConstTensorView q, ConstTensorView k,
                 std::span<const KeyValueRows> past, SummedRows summed, float scale,
                 Stream& stream) {
  const SumJob job{q, k, past, summed, scale};
  const size_t kv_heads = job.kv_heads();
  const size_t tasks = job.tasks();
  std::vector<Partial> partials(kv_heads * tasks);
  stream.pool().parallel_for(partials.size(), [&](size_t task, int worker) {
    const size_t head = task / tasks;
    Partial& partial = partials[task];
    partial.sums.assign(job.columns(), 0.0);
    partial.small.assign(job.q_per_kv(), 0);
    const TileSpace space(job, stream.scratch(worker, job.scratch_bytes()));
    for (size_t number = task % tasks; number < job.tiles(); number += tasks) {
      const PairTile tile = load_tile(job, head, number, space.queries);
      score_tile(job, head, tile, space);
      add_tile(job, tile, space, !result.small_entries.empty(), partial);
    }
  });
  for (size_t head = 0; head < kv_heads; ++head) {
    add_partials(job, head, std::span(partials).subspan(head * tasks, tasks), result);
  }
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
