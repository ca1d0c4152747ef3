#include <algorithm>
#include <vector>

#include "kernels/cuda/dense/prompt_rows.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/importance/column_sums.h"
#include "kernels/cuda/importance/column_tiles.h"

namespace kvlm::cuda {

namespace {

// In f32, without matrix units. A row is a (query, head) pair of one kv_head, query by query. The
// first kernel finds the softmax of every row, the second computes the scores again and adds the
// weights to the columns. Sizes alone decide what a block does and in which order parts are added.

constexpr int kTile = 64;      // rows, and columns, of a tile
constexpr int kThreads = 256;  // kSide x kSide, each of 4 rows by 4 columns
constexpr int kSide = 16;
constexpr int kChannels = 32;  // in shared memory at a time
constexpr int kStride = kChannels + 4;

/// Largest score of a row and the sum of exp(score - max), of some columns.
struct RowState {
  float max;
  float sum;
};

struct Job {
  const float* q;  // (n, q_heads, head_dim)
  PromptRows keys;
  int q_per_kv;
  int first_row, columns;
  int rows;       // of a kv_head
  int row_tiles;  // of a kv_head
  int splits;     // of the columns, in the first kernel
  float scale;
  SummedRows summed;          // what each query weighs
  RowState* states;           // (kv_heads, splits, row_tiles * kTile)
  double* parts;              // (kv_heads, splits of the rows, columns)
  unsigned long long* small;  // (q_heads,) or null
};

/// Columns that a row sees; 0 for what is no row.
__device__ int seen_by(const Job& job, int row) {
  const int before = static_cast<int>(job.keys.past_rows) + job.first_row;
  return row < job.rows ? before + row / job.q_per_kv + 1 : 0;
}

struct Operands {
  const float* query_rows[kTile];  // null where there is no row
  LocatedRow key_rows[kTile];      // likewise
  alignas(16) float q[kTile * kStride];
  alignas(16) float k[kTile * kStride];
};

/// Where the rows of a tile's queries and keys begin.
__device__ void locate_operands(const Job& job, int kv_head, int first_row, int first_column,
                                Operands& to) {
  const int i = static_cast<int>(threadIdx.x) % kTile;
  if (threadIdx.x < kTile) {
    const int row = first_row + i;
    const int64_t query = job.first_row + row / job.q_per_kv;
    const int head = kv_head * job.q_per_kv + row % job.q_per_kv;
    const int64_t q_heads = static_cast<int64_t>(job.keys.kv_heads) * job.q_per_kv;
    to.query_rows[i] =
        row < job.rows ? job.q + (query * q_heads + head) * job.keys.head_dim : nullptr;
  } else if (threadIdx.x < 2 * kTile) {
    const int column = first_column + i;
    to.key_rows[i] = column < job.columns ? locate(job.keys, kv_head, column, false) : LocatedRow{};
  }
}

/// Channels [channel, channel + 4) of a row; zeros from head_dim on and where there is no row.
__device__ float4 load_four(const LocatedRow& row, int channel, int head_dim) {
  if (row.data == nullptr) return {};
  const std::byte* from = row.data + channel * size_of(row.dtype);
  const bool whole = channel + 4 <= head_dim && reinterpret_cast<uintptr_t>(from) % 16 == 0;
  if (row.dtype == DType::kF32 && whole) return *reinterpret_cast<const float4*>(from);
  const auto at = [&](int i) {
    return channel + i < head_dim ? element(row.data, row.dtype, channel + i) : 0.0f;
  };
  return {at(0), at(1), at(2), at(3)};
}

/// Loads channels [channel, channel + kChannels) of both sides.
__device__ void load_operands(const Job& job, int channel, Operands& to) {
  constexpr int kFours = kChannels / 4;  // of a row
  const int warp_lane = static_cast<int>(threadIdx.x) % kFours * 4;
  const int head_dim = job.keys.head_dim;
  for (int i = static_cast<int>(threadIdx.x) / kFours; i < kTile; i += kThreads / kFours) {
    const auto* query = reinterpret_cast<const std::byte*>(to.query_rows[i]);
    float4 q = load_four({query, DType::kF32}, channel + warp_lane, head_dim);
    q = {q.x * job.scale, q.y * job.scale, q.z * job.scale, q.w * job.scale};
    *reinterpret_cast<float4*>(to.q + i * kStride + warp_lane) = q;
    *reinterpret_cast<float4*>(to.k + i * kStride + warp_lane) =
        load_four(to.key_rows[i], channel + warp_lane, head_dim);
  }
}

/// scores[j][l] of row first_row + 4 * (thread / kSide) + j and column first_column + thread %
/// kSide + kSide * l; -inf where the row does not see the column. All threads of the block.
__device__ void score_tile(const Job& job, int kv_head, int first_row, int first_column,
                           Operands& shared, float (&scores)[4][4]) {
  const int tx = static_cast<int>(threadIdx.x) % kSide;
  const int ty = static_cast<int>(threadIdx.x) / kSide;
  for (auto& row : scores) {
    for (float& score : row) score = 0;
  }
  locate_operands(job, kv_head, first_row, first_column, shared);
  for (int channel = 0; channel < job.keys.head_dim; channel += kChannels) {
    __syncthreads();
    load_operands(job, channel, shared);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kChannels; c += 4) {
      float4 a[4];
      float4 b[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        a[j] = *reinterpret_cast<const float4*>(shared.q + (ty * 4 + j) * kStride + c);
        b[j] = *reinterpret_cast<const float4*>(shared.k + (tx + kSide * j) * kStride + c);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          scores[j][l] += a[j].x * b[l].x + a[j].y * b[l].y + a[j].z * b[l].z + a[j].w * b[l].w;
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int seen = seen_by(job, first_row + ty * 4 + j);
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      if (first_column + tx + kSide * l >= seen) scores[j][l] = -INFINITY;
    }
  }
}

__device__ RowState joined(RowState a, RowState b) {
  const float max = fmaxf(a.max, b.max);
  if (max == -INFINITY) return {max, 0};
  return {max, a.sum * expf(a.max - max) + b.sum * expf(b.max - max)};
}

__device__ RowState* states_of(const Job& job, int kv_head, int split) {
  return job.states + (static_cast<int64_t>(kv_head) * job.splits + split) * job.row_tiles * kTile;
}

/// The softmax of a tile of rows over every splits-th tile of columns.
__global__ void __launch_bounds__(kThreads, 2) find_states(Job job) {
  __shared__ Operands shared;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.z);
  const int first_row = static_cast<int>(blockIdx.x) * kTile;
  const int seen = seen_by(job, min(first_row + kTile, job.rows) - 1);
  RowState states[4];
  for (RowState& state : states) state = {-INFINITY, 0};
  for (int first = split * kTile; first < seen; first += job.splits * kTile) {
    float scores[4][4];
    score_tile(job, kv_head, first_row, first, shared, scores);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float max = fmaxf(fmaxf(scores[j][0], scores[j][1]), fmaxf(scores[j][2], scores[j][3]));
      if (max == -INFINITY) continue;
      float sum = 0;
#pragma unroll
      for (const float score : scores[j]) sum += expf(score - max);
      states[j] = joined(states[j], {max, sum});
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int offset = kSide / 2; offset > 0; offset /= 2) {
      const RowState other{__shfl_xor_sync(0xffffffffu, states[j].max, offset),
                           __shfl_xor_sync(0xffffffffu, states[j].sum, offset)};
      states[j] = joined(states[j], other);
    }
    if (threadIdx.x % kSide == 0) {
      states_of(job, kv_head, split)[first_row + static_cast<int>(threadIdx.x) / kSide * 4 + j] =
          states[j];
    }
  }
}

/// Adds to the counts of the heads of this thread's four rows what all threads of a row have found.
__device__ void count_small(const Job& job, int kv_head, int first_row, const int (&found)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int count = found[j];
#pragma unroll
    for (int offset = kSide / 2; offset > 0; offset /= 2) {
      count += __shfl_xor_sync(0xffffffffu, count, offset);
    }
    const int row = first_row + static_cast<int>(threadIdx.x) / kSide * 4 + j;
    if (threadIdx.x % kSide == 0 && row < job.rows && count > 0) {
      const int head = kv_head * job.q_per_kv + row % job.q_per_kv;
      atomicAdd(job.small + head, static_cast<unsigned long long>(count));
    }
  }
}

/// The sums of a tile of columns over every gridDim.z-th tile of rows: in f32 over a tile of rows,
/// in f64 over tiles.
__global__ void __launch_bounds__(kThreads, 2) add_columns(Job job) {
  __shared__ Operands shared;
  __shared__ RowState states[kTile];
  __shared__ float added[kSide][kTile];
  const int kv_head = static_cast<int>(blockIdx.y);
  const int tx = static_cast<int>(threadIdx.x) % kSide;
  const int ty = static_cast<int>(threadIdx.x) / kSide;
  const int first_column = static_cast<int>(blockIdx.x) * kTile;
  double total = 0;  // of column threadIdx.x, by the first kTile threads
  for (int tile = static_cast<int>(blockIdx.z); tile < job.row_tiles;
       tile += static_cast<int>(gridDim.z)) {
    const int first_row = tile * kTile;
    if (seen_by(job, min(first_row + kTile, job.rows) - 1) <= first_column) continue;
    float scores[4][4];
    score_tile(job, kv_head, first_row, first_column, shared, scores);
    if (threadIdx.x < kTile) {
      RowState state{-INFINITY, 0};
      for (int split = 0; split < job.splits; ++split) {
        state = joined(state, states_of(job, kv_head, split)[first_row + threadIdx.x]);
      }
      states[threadIdx.x] = state;
    }
    __syncthreads();
    float sums[4] = {};
    int small[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const RowState state = states[ty * 4 + j];
      const int query = (first_row + ty * 4 + j) / job.q_per_kv;
      const float factor = summed_weight(job.summed, query, job.rows / job.q_per_kv) / state.sum;
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        if (scores[j][l] == -INFINITY) continue;
        const float weight = expf(scores[j][l] - state.max);
        small[j] += weight < kSmallWeight ? 1 : 0;
        sums[l] += weight * factor;
      }
    }
#pragma unroll
    for (int l = 0; l < 4; ++l) added[ty][tx + kSide * l] = sums[l];
    if (job.small != nullptr) count_small(job, kv_head, first_row, small);
    __syncthreads();
    if (threadIdx.x < kTile) {
      float sum = 0;
      for (const auto& row : added) sum += row[threadIdx.x];
      total += static_cast<double>(sum);
    }
  }
  const int column = first_column + static_cast<int>(threadIdx.x);
  if (threadIdx.x < kTile && column < job.columns) {
    const int64_t warp_lane = static_cast<int64_t>(kv_head) * gridDim.z + blockIdx.z;
    job.parts[warp_lane * job.columns + column] = total;
  }
}

/// Where sums go: columns below `held` gain, others are overwritten.
struct Totals {
  double* sums;  // (kv_heads, stride)
  int64_t stride, held;
};

/// The sum of column j of kv_head h: its parts in order, divided by its heads.
__global__ void join_parts(const double* parts, int splits, int64_t columns, double share,
                           Totals to) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const int64_t kv_head = blockIdx.y;
  double sum = 0;
  for (int split = 0; split < splits; ++split) {
    sum += parts[(kv_head * splits + split) * columns + column];
  }
  double& total = to.sums[kv_head * to.stride + column];
  total = (column < to.held ? total : 0.0) + __dmul_rn(sum, share);
}

/// Queues the sums; returns where small entries are counted, if they are. `attention` is as
/// ColumnTilesJob has it.
const unsigned long long* queue_sums(const QueuedSums& to, ConstTensorView q,
                                     const PromptRows& keys, SummedRows rows, float scale,
                                     DType multiply, Stream& stream,
                                     const PromptJob* attention = nullptr) {
  const int64_t kv_heads = keys.kv_heads;
  const int64_t n = q.shape()[0];
  const int64_t q_heads = q.shape()[1];
  const int64_t columns = keys.past_rows + n;
  const bool tiles = multiply != DType::kF32 && keys.head_dim <= 256;
  Job job{};
  ColumnTilesJob tiles_job{q, keys, rows, scale, multiply, nullptr, attention};
  int row_splits = 0;
  if (tiles) {
    row_splits = column_tile_parts(tiles_job);
  } else {
    job.q = q.as<float>();
    job.keys = keys;
    job.q_per_kv = static_cast<int>(q_heads / kv_heads);
    job.first_row = static_cast<int>(rows.first);
    job.columns = static_cast<int>(columns);
    job.rows = static_cast<int>((n - rows.first) * job.q_per_kv);
    job.row_tiles = static_cast<int>(ceil_div(job.rows, kTile));
    job.scale = scale;
    job.summed = rows;
    const int64_t column_tiles = ceil_div(columns, kTile);
    job.splits = sum_splits(column_tiles, job.row_tiles * kv_heads);
    row_splits = sum_splits(job.row_tiles, column_tiles * kv_heads);
  }

  // parts, counts, states
  const auto part_count = static_cast<size_t>(kv_heads * columns * row_splits);
  const size_t state_count = static_cast<size_t>(kv_heads * job.splits * job.row_tiles) * kTile;
  const size_t bytes = part_count * sizeof(double) +
                       static_cast<size_t>(q_heads) * sizeof(unsigned long long) +
                       state_count * sizeof(RowState);
  auto* parts = reinterpret_cast<double*>(stream.queue().scratch(kColumnParts, bytes));
  auto* counts = reinterpret_cast<unsigned long long*>(parts + part_count);
  const bool counting = !to.small_entries.empty();
  if (counting) {
    check(
        cudaMemsetAsync(counts, 0, static_cast<size_t>(q_heads) * sizeof(*counts), native(stream)),
        "column_sums");
  }
  const auto heads = static_cast<unsigned>(kv_heads);
  if (tiles) {
    tiles_job.small = counting ? counts : nullptr;
    sum_column_tiles(tiles_job, parts, stream);
  } else {
    job.parts = parts;
    job.small = counting ? counts : nullptr;
    job.states = reinterpret_cast<RowState*>(counts + q_heads);
    find_states<<<dim3(static_cast<unsigned>(job.row_tiles), heads,
                       static_cast<unsigned>(job.splits)),
                  kThreads, 0, native(stream)>>>(job);
    add_columns<<<dim3(static_cast<unsigned>(ceil_div(columns, kTile)), heads,
                       static_cast<unsigned>(row_splits)),
                  kThreads, 0, native(stream)>>>(job);
  }
  join_parts<<<dim3(static_cast<unsigned>(ceil_div(columns, kThreads)), heads), kThreads, 0,
               native(stream)>>>(parts, row_splits, columns,
                                 static_cast<double>(kv_heads) / static_cast<double>(q_heads),
                                 {to.sums, to.stride, to.held});
  check_launch("column_sums");
  return counts;
}

/// A thread a column of a layer: block (columns, layer).
__global__ void __launch_bounds__(kThreads)
    mean_columns(const double* sums, int64_t kv_heads, int64_t columns, double* means) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= columns) return;
  const double* of_layer = sums + int64_t{blockIdx.y} * kv_heads * columns + column;
  double sum = 0;
  for (int64_t head = 0; head < kv_heads; ++head) sum += of_layer[head * columns];
  means[int64_t{blockIdx.y} * columns + column] = sum / static_cast<double>(kv_heads);
}

}  // namespace

void column_sums(const QueuedSums& result, ConstTensorView q, ConstTensorView k,
                 std::span<const KeyValueRows> past, SummedRows rows, float scale, DType multiply,
                 Stream& stream) {
  const unsigned long long* counts =
      queue_sums(result, q, prompt_rows(k, {}, past, stream), rows, scale, multiply, stream);
  if (result.small_entries.empty()) return;
  std::vector<unsigned long long> small(result.small_entries.size());
  stream.queue().copy(small.data(), false, counts, true, small.size() * sizeof(*counts));
  for (size_t head = 0; head < small.size(); ++head) {
    result.small_entries[head] += static_cast<double>(small[head]);
  }
}

void attend_and_sum(const QueuedSums& result, TensorView out, ConstTensorView q, ConstTensorView k,
                    ConstTensorView v, std::span<const KeyValueRows> past, float scale,
                    DType multiply, Stream& stream) {
  const PromptRows rows = prompt_rows(k, v, past, stream);
  check_head_dim("attend_and_sum", rows);
  const PromptJob attention{out, q, rows, /*causal=*/true, scale, multiply};
  queue_sums(result, q, rows, /*rows=*/0, scale, multiply, stream, &attention);
}

void mean_over_heads(const double* sums, int64_t layers, int64_t kv_heads, int64_t columns,
                     double* means, Stream& stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, kThreads)),
                  static_cast<unsigned>(layers));
  mean_columns<<<grid, kThreads, 0, native(stream)>>>(sums, kv_heads, columns, means);
  check_launch("mean_over_heads");
}

}  // namespace kvlm::cuda
