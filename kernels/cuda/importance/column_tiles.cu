#include <algorithm>

#include "kernels/cuda/dense/prompt_tiles.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/importance/column_tiles.h"

// Both passes are one product: a block holds some rows in registers as the first operand and
// reduces its scores against tiles of others that stream by. The first pass holds queries and finds
// their softmax over keys, unless attention has found it, the second holds keys and sums their
// weights over queries. Sizes alone decide what a block does and in which order parts are added.
namespace kvlm::cuda {

namespace {

/// How a block divides its work: kWarps warps hold kHeld rows each, against kStreamed rows at a
/// time of which kChunk are multiplied at once. Rows of shared memory are 16 bytes longer than
/// kDim, so that eight of them start in different banks.
template <int kDim_>
struct Tiling {
  static constexpr int kDim = kDim_;
  static constexpr int kRowTiles = kDim > 128 ? 1 : 2;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kHeld = 16 * kRowTiles;
  static constexpr int kBlockRows = kWarps * kHeld;
  static constexpr int kStreamed = kBlockRows / 2;  // two stages take the place of the held rows
  static_assert(kStreamed == columns_at_a_time(kDim));  // keys may be attention's tiles
  static constexpr int kChunk = 32;
  static constexpr int kStride = kDim + 8;
};

/// What both passes read, and what they write.
struct Launch {
  const void* queries;  // (q_heads, query_rows, kDim): scaled so that weights are powers of two
  const void* keys;     // (kv_heads, key_tiles) tiles of kStreamed rows, key_stride elements apart
  int rows, columns;    // of the attention
  int query_rows;       // the same and padding
  int key_tiles, key_stride;
  int before;  // row i sees columns [0, before + i]
  int q_per_kv;
  int splits;                 // of the columns, in the first pass
  SummedRows summed;          // what each row weighs in the sums
  float2* states;             // (q_heads, splits, query_rows): maximum, sum
  float2* softmax;            // (q_heads, query_rows): maximum, weight / sum; padding is not used
  double* parts;              // (kv_heads, splits of the rows, columns)
  unsigned long long* small;  // (q_heads,) or null
};

/// Queues the copy of `kRows` rows, which lie one after the other.
template <class Tiles, int kRows, class T>
__device__ void copy_rows(const T* from, uint32_t to) {
  constexpr int kChunks = Tiles::kDim / 8;  // of a row
#pragma unroll
  for (int i = 0; i < kRows * kChunks; i += Tiles::kThreads) {
    const int chunk = i + static_cast<int>(threadIdx.x);
    copy_16_bytes(
        to + static_cast<uint32_t>(2 * (chunk / kChunks * Tiles::kStride + chunk % kChunks * 8)),
        from + chunk * 8);
  }
}

/// The scores of a block: of a warp's kHeld rows against kChunk streamed ones. Of 16 rows of row
/// tile r, lane l holds rows l / 4 (half 0) and l / 4 + 8 (half 1), of 8 streamed ones 2 * (l % 4)
/// and the next: scores[r][of 8 streamed rows][2 * half + of two].
template <class Tiles>
using Scores = float[Tiles::kRowTiles][Tiles::kChunk / 8][4];

/// Tile `tile` of a kv_head's keys, or the last in the place of one behind it, which no row sees.
template <class Tiles, class T>
__device__ const T* key_tile(const Launch& l, int kv_head, int tile) {
  const int64_t at = int64_t{kv_head} * l.key_tiles + min(tile, l.key_tiles - 1);
  return static_cast<const T*>(l.keys) + at * l.key_stride;
}

/// Multiplies the kBlockRows rows of the two tiles that held_at(half) finds with the tiles first,
/// first + step, ... below count, which tile_at(index) finds. For every chunk that
/// work.wants(index, row) calls work.add(index, row, scores), both the same for all lanes of a
/// warp, and for every tile work.finish(index).
template <class Tiles, class T, class HeldAt, class TileAt, class Work>
__device__ void multiply(const HeldAt& held_at, int first, int count, int step,
                         const TileAt& tile_at, Work& work) {
  constexpr int kSteps = Tiles::kDim / 16;
  constexpr uint32_t kStageBytes = 2 * Tiles::kStreamed * Tiles::kStride;
  __shared__ alignas(16) T shared[Tiles::kBlockRows * Tiles::kStride];
  const auto stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  const int warp_row = static_cast<int>(threadIdx.x / 32) * Tiles::kHeld;
  // Rows of ldmatrix: the first operand by 16 rows, the second by 8 rows and 16 channels.
  const int by_row = warp_lane % 16 * Tiles::kStride + warp_lane / 16 * 8;
  const int by_streamed =
      (warp_lane % 8 + warp_lane / 16 * 8) * Tiles::kStride + warp_lane / 8 % 2 * 8;

  for (const uint32_t half : {0u, 1u}) {
    copy_rows<Tiles, Tiles::kStreamed>(held_at(static_cast<int>(half)),
                                       stages + half * kStageBytes);
  }
  asm volatile("cp.async.commit_group;\ncp.async.wait_all;" ::: "memory");
  __syncthreads();
  uint32_t a[kSteps][Tiles::kRowTiles][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int r = 0; r < Tiles::kRowTiles; ++r) {
      const int at = (warp_row + r * 16) * Tiles::kStride + by_row + k * 16;
      load_matrices(a[k][r], stages + static_cast<uint32_t>(2 * at));
    }
  }
  __syncthreads();

  if (first < count) copy_rows<Tiles, Tiles::kStreamed>(tile_at(first), stages);
  uint32_t stage = 0;
  for (int index = first; index < count; index += step) {
    asm volatile("cp.async.commit_group;\ncp.async.wait_all;" ::: "memory");
    __syncthreads();
    const uint32_t streamed = stages + stage * kStageBytes + static_cast<uint32_t>(2 * by_streamed);
    stage ^= 1;
    if (index + step < count) {
      copy_rows<Tiles, Tiles::kStreamed>(tile_at(index + step), stages + stage * kStageBytes);
    }
    for (int row = 0; row < Tiles::kStreamed; row += Tiles::kChunk) {
      if (!work.wants(index, row)) continue;
      Scores<Tiles> scores = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int j = 0; j < Tiles::kChunk / 8; j += 2) {
          uint32_t b[4];
          load_matrices(
              b, streamed + static_cast<uint32_t>(2 * ((row + j * 8) * Tiles::kStride + k * 16)));
#pragma unroll
          for (int r = 0; r < Tiles::kRowTiles; ++r) {
            Multiplier<T>::mma(scores[r][j], a[k][r], b[0], b[1]);
            Multiplier<T>::mma(scores[r][j + 1], a[k][r], b[2], b[3]);
          }
        }
      }
      work.add(index, row, scores);
    }
    work.finish(index);
  }
}

/// The maximum and the sum of a warp's rows over the columns that stream by.
template <class Tiles>
class RowSoftmax {
 public:
  RowSoftmax(const RowSoftmax&) = delete;
  /// `last_column`: the last one that the warp's row 0 sees.
  explicit __device__ RowSoftmax(int last_column) : last_column_(last_column) {
#pragma unroll
    for (int i = 0; i < kStates; ++i) states_[i] = {-INFINITY, 0};
  }

  __device__ bool wants(int tile, int row) const {
    return tile * Tiles::kStreamed + row < last_column_ + Tiles::kHeld;
  }

  __device__ void add(int tile, int row, Scores<Tiles>& scores) {
    const int first = tile * Tiles::kStreamed + row;
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
    const bool all = first + Tiles::kChunk <= last_column_ + 1;
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      auto& of_tile = scores[i / 2];
      const int half = i % 2;
      if (!all) {
        const int last = last_column_ + i * 8 + warp_lane / 4 - first - warp_lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < Tiles::kChunk / 4; ++j) {
          if (j / 2 * 8 + j % 2 > last) of_tile[j / 2][half * 2 + j % 2] = -INFINITY;
        }
      }
      float2 state = states_[i];
      float largest = state.x;
#pragma unroll
      for (int j = 0; j < Tiles::kChunk / 4; ++j) {
        largest = fmaxf(largest, of_tile[j / 2][half * 2 + j % 2]);
      }
      if (largest == -INFINITY) continue;
      state.y *= exp2_of(state.x - largest);
      state.x = largest;
#pragma unroll
      for (int j = 0; j < Tiles::kChunk / 4; ++j) {
        state.y += exp2_of(of_tile[j / 2][half * 2 + j % 2] - largest);
      }
      states_[i] = state;
    }
  }

  __device__ void finish(int) const {}

  /// Writes the states of the warp's rows.
  __device__ void write(float2* to) const {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      const float largest = quad_max(states_[i].x);
      const float shrink = states_[i].x == -INFINITY ? 0 : exp2_of(states_[i].x - largest);
      const float sum = quad_sum(states_[i].y * shrink);
      if (warp_lane % 4 == 0) to[i * 8 + warp_lane / 4] = {largest, sum};
    }
  }

 private:
  static constexpr int kStates = 2 * Tiles::kRowTiles;  // rows of a lane, 8 apart
  int last_column_;
  float2 states_[kStates];
};

/// The weights of a warp's columns, summed over the rows that stream by.
template <class Tiles>
class ColumnWeights {
 public:
  ColumnWeights(const ColumnWeights&) = delete;
  /// Tile i of those that stream by is tile first_tile + i % tiles of the group's q_head i / tiles.
  __device__ ColumnWeights(const Launch& l, int first_head, int first_tile, int tiles,
                           int first_column)
      : l_(l),
        first_head_(first_head),
        first_tile_(first_tile),
        tiles_(tiles),
        first_column_(first_column) {}

  __device__ bool wants(int index, int row) const {
    const int first = row_of(index, row);
    return first < l_.rows && first_column_ <= l_.before + first + Tiles::kChunk - 1;
  }

  __device__ void add(int index, int row, Scores<Tiles>& scores) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
    const int first = row_of(index, row);
    const int mine = first + warp_lane % 4 * 2;
    const float2* softmax =
        l_.softmax + static_cast<int64_t>(head_of(index)) * l_.query_rows + mine;
    float sums[kColumns] = {};
    const bool all =
        first_column_ + Tiles::kHeld - 1 <= l_.before + first && first + Tiles::kChunk <= l_.rows;
#pragma unroll
    for (int j = 0; j < Tiles::kChunk / 8; ++j) {
      const float4 both = *reinterpret_cast<const float4*>(softmax + j * 8);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int column = first_column_ + i * 8 + warp_lane / 4;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = mine + j * 8 + e;
          if (!all && (at >= l_.rows || column > l_.before + at)) continue;
          const float weight =
              exp2_of(scores[i / 2][j][i % 2 * 2 + e] - (e == 0 ? both.x : both.z));
          sums[i] += weight * (e == 0 ? both.y : both.w);
          small_ += weight < kSmallWeight ? 1 : 0;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums_[i] += static_cast<double>(sums[i]);
  }

  __device__ void finish(int index) {
    if (l_.small == nullptr) return;
    const unsigned found = __reduce_add_sync(0xffffffffu, small_);
    small_ = 0;
    if (threadIdx.x % 32 == 0 && found > 0) {
      atomicAdd(l_.small + head_of(index), static_cast<unsigned long long>(found));
    }
  }

  /// Writes the sums of the warp's columns; `to` is column 0.
  __device__ void write(double* to) const {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      double sum = sums_[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int column = first_column_ + i * 8 + warp_lane / 4;
      if (warp_lane % 4 == 0 && column < l_.columns) to[column] = sum;
    }
  }

 private:
  static constexpr int kColumns = 2 * Tiles::kRowTiles;  // of a lane, 8 apart

  __device__ int head_of(int index) const { return first_head_ + index / tiles_; }
  __device__ int row_of(int index, int row) const {
    return (first_tile_ + index % tiles_) * Tiles::kStreamed + row;
  }

  const Launch& l_;
  int first_head_, first_tile_, tiles_, first_column_;
  double sums_[kColumns] = {};
  unsigned small_ = 0;
};

/// The softmax of kBlockRows rows of a q_head, over every splits-th tile of columns.
template <class Tiles, class T>
__global__ void __launch_bounds__(Tiles::kThreads, 3) find_softmax(Launch l) {
  const int head = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.z);
  // The latest rows see most, and go first.
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Tiles::kBlockRows;
  const int warp_row = first_row + static_cast<int>(threadIdx.x / 32) * Tiles::kHeld;
  const int seen = l.before + min(first_row + Tiles::kBlockRows, l.rows);
  const T* queries = static_cast<const T*>(l.queries) +
                     (static_cast<int64_t>(head) * l.query_rows + first_row) * Tiles::kDim;
  RowSoftmax<Tiles> work(l.before + warp_row);
  multiply<Tiles, T>([&](int half) { return queries + half * Tiles::kStreamed * Tiles::kDim; },
                     split, (seen + Tiles::kStreamed - 1) / Tiles::kStreamed, l.splits,
                     [&](int tile) { return key_tile<Tiles, T>(l, head / l.q_per_kv, tile); },
                     work);
  work.write(l.states + (static_cast<int64_t>(head) * l.splits + split) * l.query_rows + warp_row);
}

/// Joins the parts of every row's softmax.
__global__ void close_softmax(Launch l) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= l.query_rows) return;
  const auto head = static_cast<int64_t>(blockIdx.y);
  const float2* states = l.states + head * l.splits * l.query_rows + row;
  float largest = -INFINITY;
  for (int i = 0; i < l.splits; ++i) largest = fmaxf(largest, states[i * l.query_rows].x);
  float sum = 0;
  for (int i = 0; i < l.splits; ++i) {
    const float2 state = states[i * l.query_rows];
    if (state.x != -INFINITY) sum += state.y * exp2_of(state.x - largest);
  }
  const bool there = row < l.rows;
  const float weight = summed_weight(l.summed, row, l.rows);
  l.softmax[head * l.query_rows + row] = {there ? largest : 0, there ? weight / sum : 0};
}

/// The sums of kBlockRows columns of a kv_head over every gridDim.z-th tile of rows.
template <class Tiles, class T>
__global__ void __launch_bounds__(Tiles::kThreads, 3) add_weights(Launch l) {
  const int kv_head = static_cast<int>(blockIdx.y);
  const int first_column = static_cast<int>(blockIdx.x) * Tiles::kBlockRows;
  const int warp_column = first_column + static_cast<int>(threadIdx.x / 32) * Tiles::kHeld;
  const int first_head = kv_head * l.q_per_kv;
  const int first_tile = max(0, first_column - l.before) / Tiles::kStreamed;
  const int tiles = (l.rows + Tiles::kStreamed - 1) / Tiles::kStreamed - first_tile;
  ColumnWeights<Tiles> work(l, first_head, first_tile, tiles, warp_column);
  multiply<Tiles, T>(
      [&](int half) {
        return key_tile<Tiles, T>(l, kv_head, 2 * static_cast<int>(blockIdx.x) + half);
      },
      static_cast<int>(blockIdx.z), l.q_per_kv * tiles, static_cast<int>(gridDim.z),
      [&](int index) {
        const int64_t row = static_cast<int64_t>(first_head + index / tiles) * l.query_rows +
                            (first_tile + index % tiles) * Tiles::kStreamed;
        return static_cast<const T*>(l.queries) + row * Tiles::kDim;
      },
      work);
  const int64_t part = static_cast<int64_t>(kv_head) * gridDim.z + blockIdx.z;
  work.write(l.parts + part * l.columns);
}

/// Rows [first_row, first_row + rows) of every q_head, scaled and rounded; zeros for padding.
template <class T>
__global__ void round_queries(const float* q, int64_t first_row, int rows, int q_heads,
                              int head_dim, float scale, int query_rows, int padded_dim, T* to) {
  const auto chunk = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int chunks = padded_dim / 8;  // of a row
  const int row = chunk / chunks;
  if (row >= query_rows) return;
  const int channel = chunk % chunks * 8;
  const int head = static_cast<int>(blockIdx.y);
  float x[8] = {};
  if (row < rows) {
    const float* from = q + ((first_row + row) * q_heads + head) * head_dim;
    load_eight({reinterpret_cast<const std::byte*>(from), DType::kF32}, channel, head_dim, x);
  }
#pragma unroll
  for (float& value : x) value *= scale;
  const int64_t at = static_cast<int64_t>(head) * query_rows + row;
  *reinterpret_cast<uint4*>(to + at * padded_dim + channel) = round_eight<T>(x);
}

// -------------------------------------------------------------------------------------- the host

int block_rows(int dim) { return dim > 128 ? Tiling<256>::kBlockRows : Tiling<128>::kBlockRows; }

/// Sizes of a job in blocks of held rows.
struct Sizes {
  explicit Sizes(const ColumnTilesJob& job)
      : dim(padded(job.keys.head_dim)),
        held(block_rows(dim)),
        q_heads(job.q.shape()[1]),
        rows(job.q.shape()[0] - job.rows.first),
        columns(job.keys.past_rows + job.q.shape()[0]),
        row_blocks(ceil_div(rows, held)),
        column_blocks(ceil_div(columns, held)),
        row_splits(sum_splits(2 * row_blocks * (q_heads / job.keys.kv_heads),
                              column_blocks * job.keys.kv_heads)),
        column_splits(sum_splits(2 * column_blocks, row_blocks * q_heads)) {}
  int dim;
  int64_t held, q_heads, rows, columns, row_blocks, column_blocks;
  int row_splits, column_splits;
};

template <int kDim, class T>
void launch_passes(const Launch& l, const Sizes& sizes, int kv_heads, bool softmax_known,
                   Stream& stream) {
  using Tiles = Tiling<kDim>;
  const auto heads = static_cast<unsigned>(sizes.q_heads);
  if (!softmax_known) {
    find_softmax<Tiles, T>
        <<<dim3(static_cast<unsigned>(sizes.row_blocks), heads, static_cast<unsigned>(l.splits)),
           Tiles::kThreads, 0, native(stream)>>>(l);
    close_softmax<<<dim3(static_cast<unsigned>(ceil_div(l.query_rows, 128)), heads), 128, 0,
                    native(stream)>>>(l);
  }
  add_weights<Tiles, T>
      <<<dim3(static_cast<unsigned>(sizes.column_blocks), static_cast<unsigned>(kv_heads),
              static_cast<unsigned>(sizes.row_splits)),
         Tiles::kThreads, 0, native(stream)>>>(l);
  check_launch("column_sums");
}

template <class T>
void sum_as(const ColumnTilesJob& job, double* parts, Stream& stream) {
  const Sizes sizes(job);
  const PromptRows& keys = job.keys;
  Launch l{};
  l.rows = static_cast<int>(sizes.rows);
  l.columns = static_cast<int>(sizes.columns);
  l.query_rows = static_cast<int>(sizes.row_blocks * sizes.held);
  const bool attends = job.attention != nullptr;
  const auto tile_rows = static_cast<int>(sizes.held / 2);
  l.key_tiles = static_cast<int>(ceil_div(sizes.columns, tile_rows));
  l.key_stride = (attends ? 2 : 1) * tile_rows * sizes.dim;  // a tile of values is between
  l.before = static_cast<int>(keys.past_rows + job.rows.first);
  l.q_per_kv = static_cast<int>(sizes.q_heads / keys.kv_heads);
  l.splits = attends ? 0 : sizes.column_splits;
  l.summed = job.rows;
  l.parts = parts;
  l.small = job.small;

  // softmax, its parts, queries, keys
  const int64_t state_count = sizes.q_heads * l.query_rows;
  const int64_t query_count = state_count * sizes.dim;
  const int64_t key_count = attends ? 0 : int64_t{keys.kv_heads} * l.key_tiles * l.key_stride;
  const auto bytes = static_cast<size_t>(state_count * (1 + l.splits)) * sizeof(float2) +
                     static_cast<size_t>(query_count + key_count) * sizeof(T);
  l.softmax = reinterpret_cast<float2*>(stream.queue().scratch(kColumnRows, bytes));
  l.states = l.softmax + state_count;
  T* rounded_queries = reinterpret_cast<T*>(l.states + state_count * l.splits);
  l.queries = rounded_queries;

  constexpr unsigned kThreads = 256;
  const auto blocks = [&](int64_t rows) {
    return static_cast<unsigned>(ceil_div(rows * (sizes.dim / 8), kThreads));
  };
  round_queries<T><<<dim3(blocks(l.query_rows), static_cast<unsigned>(sizes.q_heads)), kThreads, 0,
                     native(stream)>>>(
      job.q.as<float>(), job.rows.first, l.rows, static_cast<int>(sizes.q_heads), keys.head_dim,
      job.scale * kLog2E, l.query_rows, sizes.dim, rounded_queries);
  if (attends) {
    PromptJob attention = *job.attention;
    attention.softmax = l.softmax;
    attention.softmax_rows = l.query_rows;
    l.keys = attend_prompt(attention, stream);
  } else {
    T* rounded_keys = rounded_queries + query_count;
    l.keys = rounded_keys;
    round_rows<T>
        <<<dim3(blocks(int64_t{l.key_tiles} * tile_rows), static_cast<unsigned>(keys.kv_heads), 1),
           kThreads, 0, native(stream)>>>(keys, sizes.columns, l.key_tiles, tile_rows, sizes.dim,
                                          rounded_keys);
  }
  check_launch("column_sums");
  if (sizes.dim == 32) return launch_passes<32, T>(l, sizes, keys.kv_heads, attends, stream);
  if (sizes.dim == 64) return launch_passes<64, T>(l, sizes, keys.kv_heads, attends, stream);
  if (sizes.dim == 96) return launch_passes<96, T>(l, sizes, keys.kv_heads, attends, stream);
  if (sizes.dim == 128) return launch_passes<128, T>(l, sizes, keys.kv_heads, attends, stream);
  launch_passes<256, T>(l, sizes, keys.kv_heads, attends, stream);
}

}  // namespace

int sum_splits(int64_t tiles, int64_t blocks) {
  constexpr int64_t kWantedBlocks = 1024;
  constexpr int64_t kMostSplits = 16;
  return static_cast<int>(
      std::clamp(kWantedBlocks / blocks, int64_t{1}, std::min(tiles, kMostSplits)));
}

int column_tile_parts(const ColumnTilesJob& job) { return Sizes(job).row_splits; }

void sum_column_tiles(const ColumnTilesJob& job, double* parts, Stream& stream) {
  if (job.multiply == DType::kF16) return sum_as<__half>(job, parts, stream);
  sum_as<__nv_bfloat16>(job, parts, stream);
}

}  // namespace kvlm::cuda
