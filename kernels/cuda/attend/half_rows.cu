#include <cmath>

#include "kernels/cuda/attend/packed_tiles.cuh"
#include "kernels/cuda/attend/row_pieces.cuh"

// Decode attention over f16 rows on the tensor cores: a block takes a part of a piece and
// multiplies the queries of its KV head with keys and then values, so that every row is read once
// for all of them. The result is a softmax state, which row_pieces.cu merges.
namespace kvlm::cuda {

namespace {

using namespace packed;

constexpr int kRowBytes = kDim * 2;

constexpr int kTiles = kMostPartRows / kTileSlots;

/// Reads rows, which up to eight queries do once. What they push out of the second level of cache
/// is to be other rows, not the states of parts, which are written and read again.
template <int kWords>
__device__ void stream_words(const std::byte* from, uint32_t (&to)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from) + i / 4);
    to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
  }
}

/// One block the f16 rows of a part: scores, softmax, values. Every row is read once for
/// all queries.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, 5 - kGroups) attend_tiles(PieceLaunch launch) {
  constexpr int kQueries = kGroups * kGroupQueries;
  __shared__ RaisedQueries<16, kGroups> raised;
  __shared__ float weights[kQueries][kMostPartRows];
  __shared__ ChannelSums<kGroups> sums;

  let_next_start();
  // Pieces are there: the host has sent them, or a DecodeTable has counted them before this kernel
  // could start (count_step()).
  const PiecePart piece = part_of(launch, 2);
  wait_for_earlier();
  if (piece.rows < 0 || piece.dtype != DType::kF16) return;
  const int rows = piece.rows;
  const int tiles = (rows + kTileSlots - 1) / kTileSlots;
  const int first_query = static_cast<int>(blockIdx.z) * kQueries;
  const int queries = min(kQueries, launch.q_per_kv - first_query);
  const OperandThread my;
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  // Scores: a thread has a quarter of the channels of two rows of a tile.
  const auto load_keys = [&](int tile, uint32_t(&words)[2][16]) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = min(tile * kTileSlots + my.row + 8 * side, rows - 1);
      stream_words<16>(piece.keys + piece.place(row) * kRowBytes + my.quarter * (kRowBytes / 4),
                       words[side]);
    }
  };
  // The first keys are on their way while the queries are made ready.
  uint32_t now[2][16];
  if (my.warp < tiles) load_keys(my.warp, now);
  raised.fill(piece.q, launch.q_per_kv, first_query, launch.scale);
  FoldedQueries<16, kGroups> folded;
  folded.fold(raised, my);
  const auto score = [&](int tile, const uint32_t(&words)[2][16]) {
    float products[kGroups][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        mma(products[group], words[0][2 * step], words[1][2 * step], words[0][2 * step + 1],
            words[1][2 * step + 1], folded.b[group][2 * step], folded.b[group][2 * step + 1]);
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float* to = weights[group * kGroupQueries + my.quarter] + tile * kTileSlots + my.row;
      to[0] = (products[group][0] + products[group][1]) * folded.unit[group];
      to[8] = (products[group][2] + products[group][3]) * folded.unit[group];
    }
  };
  if (my.warp < tiles) {
#pragma unroll
    for (int tile = my.warp; tile < kTiles; tile += kWarps) {
      if (tile >= tiles) break;
      uint32_t then[2][16];
      if (tile + kWarps < tiles) load_keys(tile + kWarps, then);
      score(tile, now);
#pragma unroll
      for (int i = 0; i < 32; ++i) now[i / 16][i % 16] = then[i / 16][i % 16];
    }
  }

  // Values: a thread has 16 channels of four slots of a tile. The first are on their way while the
  // weights are made.
  using Codes = SlotCodes<16, false>;
  const auto load_values = [&](int tile, Codes(&codes)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = min(tile * kTileSlots + my.quarter + 4 * i, rows - 1);
      stream_words(piece.values + piece.place(row) * kRowBytes + my.row * 32, codes[i].words);
    }
  };
  Codes codes[4];
  if (my.warp < tiles) load_values(my.warp, codes);
  __syncthreads();
  for (int query = my.warp; query < queries; query += kWarps) {
    float x[kMostPartRows / 32];
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kMostPartRows / 32; ++i) {
      x[i] = i * 32 + warp_lane < rows ? weights[query][i * 32 + warp_lane] : -INFINITY;
      most = fmaxf(most, x[i]);
      if (piece.scores != nullptr && i * 32 + warp_lane < rows) {
        piece.scores[(first_query + query) * launch.score_stride + i * 32 + warp_lane] = x[i];
      }
    }
    most = warp_max(most);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kMostPartRows / 32; ++i) {
      x[i] = rows > 0 ? __expf(x[i] - most) : 0.0f;
      weights[query][i * 32 + warp_lane] = x[i];
      sum += x[i];
    }
    sum = warp_sum(sum);
    if (warp_lane == 0) {
      piece.state.max[first_query + query] = most;
      piece.state.sum[first_query + query] = sum;
    }
  }
  __syncthreads();

  constexpr float kUp = 1 << 15;
  float products[kGroups][kSteps][4] = {};
  for (int tile = my.warp; tile < tiles; tile += kWarps) {
    if (tile != my.warp) load_values(tile, codes);
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
        a[i] = channel_pair(codes[i / 2 * 2], codes[i / 2 * 2 + 1], 2 * step + i % 2);
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
  __syncthreads();
  auto* to = reinterpret_cast<float4*>(piece.state.out + first_query * kDim);
  for (int i = static_cast<int>(threadIdx.x); i < queries * kDim / 4; i += kThreads) {
    to[i] = sums.all(i / (kDim / 4), i % (kDim / 4));
  }
}

}  // namespace

void attend_half_rows(const PieceLaunch& launch, Stream& stream) {
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
