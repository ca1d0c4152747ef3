#include <cmath>

#include "kernels/cuda/attend/packed_tiles.cuh"
#include "kernels/cuda/attend/row_splits.cuh"

// Decode attention over unpacked f16 tokens of 128 channels, on the tensor cores; row_splits.cu
// takes other types and sizes. A block takes a part of a KV head's tokens (row_splits.cuh), in
// tiles of 16 by warp, and up to eight of its queries, for which every token is read once. Scores
// of the whole part are stored before its values are added. The result is a softmax state.
namespace kvlm::cuda {

namespace {

using namespace packed;

constexpr int kRowBytes = kDim * 2;

constexpr int kTiles = kMostPartRows / kTileSlots;
constexpr int kSteps = kDim / 16;

/// Queries of a block in shared memory, scaled by powers of two to the range of halves.
template <int kGroups>
struct RaisedQueries {
  static constexpr int kQueries = kGroups * kGroupQueries;
  /// [group][four channels of a quarter][query of the group][quarter]
  float4 q[kGroups][8][kGroupQueries][4];
  float down[kQueries];  // inverse of the query's scale

  __device__ void fill(const float* queries, int q_per_kv, int first_query, float scale) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
    for (int i = static_cast<int>(threadIdx.x / 32); i < kQueries; i += kWarps) {
      float4 x{};
      if (first_query + i < q_per_kv) {
        x = __ldg(reinterpret_cast<const float4*>(queries + (first_query + i) * kDim) + warp_lane);
        x = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
      }
      const float most =
          warp_max(fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
      const Raise raise = raise_of(most);
      x = {x.x * raise.up, x.y * raise.up, x.z * raise.up, x.w * raise.up};
      q[i / kGroupQueries][warp_lane % 8][i % kGroupQueries][warp_lane / 8] = x;
      if (warp_lane == 0) down[i] = raise.down;
    }
    __syncthreads();
  }
};

/// Queries as columns of an operand, and the inverse of the scale of query `quarter`.
template <int kGroups>
struct QueryColumns {
  uint32_t b[kGroups][2 * kSteps];
  float unit[kGroups];

  __device__ QueryColumns(const RaisedQueries<kGroups>& raised, const OperandThread& my) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 x = raised.q[group][i][my.asked][my.quarter];
        b[group][2 * i] = half_parts(x.x, x.y, my.lower);
        b[group][2 * i + 1] = half_parts(x.z, x.w, my.lower);
      }
      unit[group] = raised.down[group * kGroupQueries + my.quarter];
    }
  }
};

/// Output sums of every thread, for 16 channels of query `quarter` of each group. Vectors of the
/// threads of a warp are neighbours, in different banks.
template <int kGroups>
struct ChannelSums {
  float4 of[kWarps][kGroups][4][32];

  /// Of this thread: its channels [4 vector, 4 vector + 4).
  __device__ float4& mine(int group, int vector) {
    return of[threadIdx.x / 32][group][vector][threadIdx.x % 32];
  }
  /// Over all warps: channels [4 four, 4 four + 4) of a query.
  __device__ float4 all(int query, int four) const {
    float4 sum{};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float4 x =
          of[warp][query / kGroupQueries][four % 4][four / 4 * 4 + query % kGroupQueries];
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    return sum;
  }
};

/// Loads part of a token, which is read once. In L2 it should replace other tokens, not the states,
/// which are read again.
template <int kWords>
__device__ void stream_words(const std::byte* from, uint32_t (&to)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from) + i / 4);
    to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
  }
}

/// A quarter of the channels of two tokens of a tile.
using KeyWords = uint32_t[2][16];
/// 16 channels of four tokens of a tile.
using ValueWords = uint32_t[4][8];

__device__ __forceinline__ void load_keys(const SplitPart& row_split, int tile,
                                          const OperandThread& my, KeyWords& words) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int row = min(tile * kTileSlots + my.row + 8 * side, row_split.rows - 1);
    stream_words<16>(
        row_split.keys + row_split.place(row) * kRowBytes + my.quarter * (kRowBytes / 4),
        words[side]);
  }
}

__device__ __forceinline__ void load_values(const SplitPart& row_split, int tile,
                                            const OperandThread& my, ValueWords& words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = min(tile * kTileSlots + my.quarter + 4 * i, row_split.rows - 1);
    stream_words(row_split.values + row_split.place(row) * kRowBytes + my.row * 32, words[i]);
  }
}

/// Scores, then weights, of a part by query.
template <int kGroups>
using PartWeights = float[kGroups * kGroupQueries][kMostPartRows];

/// Scores of a tile.
template <int kGroups>
__device__ __forceinline__ void score_tile(const QueryColumns<kGroups>& columns,
                                           const KeyWords& words, int tile, const OperandThread& my,
                                           PartWeights<kGroups>& scores) {
  float products[kGroups][4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      mma(products[group], words[0][2 * step], words[1][2 * step], words[0][2 * step + 1],
          words[1][2 * step + 1], columns.b[group][2 * step], columns.b[group][2 * step + 1]);
    }
  }
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float* to = scores[group * kGroupQueries + my.quarter] + tile * kTileSlots + my.row;
    to[0] = (products[group][0] + products[group][1]) * columns.unit[group];
    to[8] = (products[group][2] + products[group][3]) * columns.unit[group];
  }
}

/// Scores of a warp's tiles. `words` has the keys of the first; those of the next are prefetched.
template <int kGroups>
__device__ __forceinline__ void score_tiles(const SplitPart& row_split, int tiles,
                                            const QueryColumns<kGroups>& columns, KeyWords& words,
                                            const OperandThread& my, PartWeights<kGroups>& scores) {
  if (my.warp >= tiles) return;
#pragma unroll
  for (int tile = my.warp; tile < kTiles; tile += kWarps) {
    if (tile >= tiles) break;
    KeyWords then;
    if (tile + kWarps < tiles) load_keys(row_split, tile + kWarps, my, then);
    score_tile(columns, words, tile, my, scores);
#pragma unroll
    for (int i = 0; i < 32; ++i) words[i / 16][i % 16] = then[i / 16][i % 16];
  }
}

/// Replaces scores by weights, a warp per query, and writes maximum and sum of the state.
template <int kGroups>
__device__ __forceinline__ void weigh_rows(const RowSplitLaunch& launch, const SplitPart& row_split,
                                           int first_query, const OperandThread& my,
                                           PartWeights<kGroups>& weights) {
  const int queries = min(kGroups * kGroupQueries, launch.q_per_kv - first_query);
  const auto warp_lane = static_cast<int>(threadIdx.x % 32);
  for (int query = my.warp; query < queries; query += kWarps) {
    float x[kMostPartRows / 32];
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kMostPartRows / 32; ++i) {
      const int row = i * 32 + warp_lane;
      x[i] = row < row_split.rows ? weights[query][row] : -INFINITY;
      most = fmaxf(most, x[i]);
      if (row_split.scores != nullptr && row < row_split.rows) {
        row_split.scores[(first_query + query) * launch.score_stride + row] = x[i] * kLog2e;
      }
    }
    most = warp_max(most);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kMostPartRows / 32; ++i) {
      x[i] = row_split.rows > 0 ? __expf(x[i] - most) : 0.0f;
      weights[query][i * 32 + warp_lane] = x[i];
      sum += x[i];
    }
    sum = warp_sum(sum);
    if (warp_lane == 0) row_split.ends[first_query + query] = {most * kLog2e, sum};
  }
}

/// Adds the values of a warp's tiles, by weight. `values` has those of the first.
template <int kGroups>
__device__ __forceinline__ void add_tiles(const SplitPart& row_split, int tiles, ValueWords& values,
                                          const OperandThread& my,
                                          const PartWeights<kGroups>& weights,
                                          ChannelSums<kGroups>& sums) {
  constexpr float kUp = 1 << 15;
  float products[kGroups][kSteps][4] = {};
  for (int tile = my.warp; tile < tiles; tile += kWarps) {
    if (tile != my.warp) load_values(row_split, tile, my, values);
    uint32_t b[kGroups][2];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float* of = weights[group * kGroupQueries + my.asked] + tile * kTileSlots;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        b[group][i] =
            half_parts(of[my.quarter + 8 * i] * kUp, of[my.quarter + 8 * i + 4] * kUp, my.lower);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = __byte_perm(values[i / 2 * 2][step], values[i / 2 * 2 + 1][step],
                           i % 2 == 1 ? 0x7632 : 0x5410);
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        mma(products[group][step], a[0], a[1], a[2], a[3], b[group][0], b[group][1]);
      }
    }
  }
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int vector = 0; vector < 4; ++vector) {
      const float(&low)[4] = products[group][2 * vector];
      const float(&high)[4] = products[group][2 * vector + 1];
      sums.mine(group, vector) = {(low[0] + low[1]) / kUp, (low[2] + low[3]) / kUp,
                                  (high[0] + high[1]) / kUp, (high[2] + high[3]) / kUp};
    }
  }
}

/// One part by a thread block: scores, softmax, values. The first keys are loaded while the queries
/// are prepared, the first values while the weights are computed.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, 5 - kGroups) attend_tiles(RowSplitLaunch launch) {
  constexpr int kQueries = kGroups * kGroupQueries;
  __shared__ RaisedQueries<kGroups> raised;
  __shared__ PartWeights<kGroups> weights;
  __shared__ ChannelSums<kGroups> sums;

  let_next_start();
  // The DeviceRowSplits are final: count_step() has written them before this kernel could start.
  const SplitPart row_split = part_of(launch, 2);
  wait_for_earlier();
  if (row_split.rows < 0 || row_split.dtype != DType::kF16) return;
  const int tiles = (row_split.rows + kTileSlots - 1) / kTileSlots;
  const int first_query = static_cast<int>(blockIdx.z) * kQueries;
  const OperandThread my;
  KeyWords keys;
  if (my.warp < tiles) load_keys(row_split, my.warp, my, keys);
  raised.fill(row_split.q, launch.q_per_kv, first_query, launch.scale);
  score_tiles(row_split, tiles, QueryColumns<kGroups>(raised, my), keys, my, weights);
  ValueWords values;
  if (my.warp < tiles) load_values(row_split, my.warp, my, values);
  __syncthreads();
  weigh_rows<kGroups>(launch, row_split, first_query, my, weights);
  __syncthreads();
  add_tiles<kGroups>(row_split, tiles, values, my, weights, sums);
  __syncthreads();
  const int queries = min(kQueries, launch.q_per_kv - first_query);
  auto* to = reinterpret_cast<float4*>(row_split.outs + first_query * kDim);
  for (int i = static_cast<int>(threadIdx.x); i < queries * kDim / 4; i += kThreads) {
    to[i] = sums.all(i / (kDim / 4), i % (kDim / 4));
  }
}

}  // namespace

void attend_half_rows(const RowSplitLaunch& launch, Stream& stream) {
  const int groups = launch.q_per_kv <= kGroupQueries ? 1 : 2;
  const dim3 grid(launch.count, launch.parts,
                  static_cast<unsigned>(ceil_div(launch.q_per_kv, groups * kGroupQueries)));
  if (groups == 1) {
    launch_early("DecodeTable::attend", attend_tiles<1>, grid, kThreads, stream, launch);
  } else {
    launch_early("DecodeTable::attend", attend_tiles<2>, grid, kThreads, stream, launch);
  }
}

}  // namespace kvlm::cuda
