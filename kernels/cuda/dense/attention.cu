#include <algorithm>
#include <vector>

#include "kernels/cuda/dense/attention.h"
#include "kernels/cuda/dense/prompt_attention.h"
#include "kernels/cuda/dense/prompt_rows.cuh"
#include "kernels/cuda/dense/segment_attention.h"
#include "kernels/cuda/device/launch.cuh"

// Attention of prompt rows and of segments in f32, for what the tensor cores do not take: a block
// holds 64 queries of one head and goes over tiles of 64 keys with an online softmax. Half
// precision goes to prompt_attention.cu, segment_attention.cu and warpgroup_attention.cu.
namespace kvlm::cuda {

namespace {

// ----------------------------------------------------------------------------------- f32 prefill

constexpr int kTile = 64;      // queries, and keys, of a tile
constexpr int kThreads = 256;  // 16 x 16, each of 4 queries by 4 keys
constexpr int kSide = 16;

struct Prompt {
  float* out;
  const float* q;
  PromptRows rows;
  int64_t n;
  int q_heads;
  bool causal;
  float scale;
  const Segments::Tile* tiles;  // one for every blockIdx.x, or null: all rows are one segment
};

/// The rows of a segment as a prompt of their own; `first_query` becomes the tile's.
__device__ void cut_segment(Prompt& p, const Segments::Tile& tile, int64_t& first_query) {
  const int64_t queries = static_cast<int64_t>(tile.first) * p.q_heads * p.rows.head_dim;
  const int64_t rows = static_cast<int64_t>(tile.first) * p.rows.kv_heads * p.rows.head_dim;
  p.q += queries;
  p.out += queries;
  p.rows.k += rows;
  p.rows.v += rows;
  p.n = tile.rows;
  first_query = tile.queries;
}

/// Loads rows [first, first + kTile) of `columns` into tile[kTile][stride]; zeros beyond.
template <int kDim>
__device__ void load_tile(const PromptRows& rows, int kv_head, int64_t first, int64_t columns,
                          bool values, float* tile, int stride) {
  for (int row = static_cast<int>(threadIdx.x / 32); row < kTile; row += kThreads / 32) {
    const bool there = first + row < columns;
    const LocatedRow from = there ? locate(rows, kv_head, first + row, values) : LocatedRow{};
    for (int i = static_cast<int>(threadIdx.x % 32); i < kDim; i += 32) {
      tile[row * stride + i] =
          there && i < rows.head_dim ? element(from.data, from.dtype, i) : 0.0f;
    }
  }
}

/// Online softmax over key tiles, for kTile queries of one head; all in f32.
template <int kDim>
__global__ void __launch_bounds__(kThreads) prompt_attention(Prompt p) {
  constexpr int kStride = kDim + 4;
  constexpr int kChannels = kDim / kSide;  // of the output, a thread
  extern __shared__ float shared[];
  float* q_tile = shared;
  float* kv_tile = q_tile + kTile * kStride;
  float* weights = kv_tile + kTile * kStride;  // (kTile, kTile + 4)
  constexpr int kWeightStride = kTile + 4;

  const int head_dim = p.rows.head_dim;
  const int64_t past_rows = p.rows.past_rows;
  const int head = static_cast<int>(blockIdx.y);
  const int kv_head = head / (p.q_heads / p.rows.kv_heads);
  // The longest tiles first.
  int64_t first_query = static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * kTile;
  if (p.tiles != nullptr) cut_segment(p, p.tiles[blockIdx.x], first_query);
  const int tx = static_cast<int>(threadIdx.x) % kSide;
  const int ty = static_cast<int>(threadIdx.x) / kSide;

  for (int i = static_cast<int>(threadIdx.x); i < kTile * kDim; i += kThreads) {
    const int row = i / kDim;
    const int channel = i % kDim;
    const bool there = first_query + row < p.n && channel < head_dim;
    q_tile[row * kStride + channel] =
        there ? p.q[((first_query + row) * p.q_heads + head) * head_dim + channel] * p.scale : 0.0f;
  }

  float maxima[4];
  float sums[4] = {};
  float out[4][kChannels] = {};
  for (float& maximum : maxima) maximum = -INFINITY;
  const int64_t columns = past_rows + p.n;
  const int64_t seen = p.causal ? min(columns, past_rows + first_query + kTile) : columns;
  for (int64_t first = 0; first < seen; first += kTile) {
    __syncthreads();
    load_tile<kDim>(p.rows, kv_head, first, columns, false, kv_tile, kStride);
    __syncthreads();
    float scores[4][4] = {};
    for (int i = 0; i < kDim; i += 4) {
      float4 a[4];
      float4 b[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        a[j] = *reinterpret_cast<const float4*>(q_tile + (ty * 4 + j) * kStride + i);
        b[j] = *reinterpret_cast<const float4*>(kv_tile + (tx + kSide * j) * kStride + i);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          scores[j][l] += a[j].x * b[l].x + a[j].y * b[l].y + a[j].z * b[l].z + a[j].w * b[l].w;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t query = first_query + ty * 4 + j;
      float maximum = -INFINITY;
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        const int64_t column = first + tx + kSide * l;
        const bool hidden = column >= columns || (p.causal && column > past_rows + query);
        if (hidden) scores[j][l] = -INFINITY;
        maximum = fmaxf(maximum, scores[j][l]);
      }
#pragma unroll
      for (int offset = kSide / 2; offset > 0; offset /= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, offset));
      }
      const float larger = fmaxf(maxima[j], maximum);
      const float shrink = larger == -INFINITY ? 1.0f : expf(maxima[j] - larger);
      maxima[j] = larger;
      float sum = 0;
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        const float weight = scores[j][l] == -INFINITY ? 0.0f : expf(scores[j][l] - larger);
        weights[(ty * 4 + j) * kWeightStride + tx + kSide * l] = weight;
        sum += weight;
      }
#pragma unroll
      for (int offset = kSide / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      sums[j] = sums[j] * shrink + sum;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) out[j][c] *= shrink;
    }
    __syncthreads();
    load_tile<kDim>(p.rows, kv_head, first, columns, true, kv_tile, kStride);
    __syncthreads();
    for (int key = 0; key < kTile; ++key) {
      float w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = weights[(ty * 4 + j) * kWeightStride + key];
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float value = kv_tile[key * kStride + tx + kSide * c];
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j][c] += w[j] * value;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t query = first_query + ty * 4 + j;
    if (query >= p.n) continue;
    float* to = p.out + (query * p.q_heads + head) * head_dim;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const int channel = tx + kSide * c;
      if (channel < head_dim) to[channel] = out[j][c] / sums[j];
    }
  }
}

template <int kDim>
void launch_prompt(const Prompt& p, int64_t tiles, Stream& stream) {
  constexpr size_t kShared = sizeof(float) * (2 * kTile * (kDim + 4) + kTile * (kTile + 4));
  allow_shared("attention", prompt_attention<kDim>, kShared);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(p.q_heads));
  prompt_attention<kDim><<<grid, kThreads, kShared, native(stream)>>>(p);
  check_launch("attention");
}

void launch_prompt(const Prompt& p, int64_t tiles, Stream& stream) {
  const int head_dim = p.rows.head_dim;
  if (head_dim <= 32) return launch_prompt<32>(p, tiles, stream);
  if (head_dim <= 64) return launch_prompt<64>(p, tiles, stream);
  if (head_dim <= 96) return launch_prompt<96>(p, tiles, stream);
  if (head_dim <= 128) return launch_prompt<128>(p, tiles, stream);
  launch_prompt<256>(p, tiles, stream);
}

}  // namespace

void attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
               std::span<const KeyValueRows> past, bool causal, float scale, DType multiply,
               Stream& stream) {
  const PromptRows rows = prompt_rows(k, v, past, stream);
  check_head_dim("attention", rows);
  if (multiply != DType::kF32) {
    attend_prompt({out, q, rows, causal, scale, multiply}, stream);
    return;
  }
  const Prompt p{
      out.as<float>(), q.as<float>(), rows,   q.shape()[0], static_cast<int>(q.shape()[1]),
      causal,          scale,         nullptr};
  launch_prompt(p, ceil_div(p.n, kTile), stream);
}

void segment_attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                       const Segments& segments, float scale, DType multiply, Stream& stream) {
  const PromptRows rows = prompt_rows(k, v, {}, stream);
  check_head_dim("segment_attention", rows);
  if (multiply != DType::kF32) {
    return attend_rounded(out, q, k, v, segments, scale, multiply, stream);
  }
  static_assert(kTile == 64);
  const Prompt p{out.as<float>(),
                 q.as<float>(),
                 rows,
                 q.shape()[0],
                 static_cast<int>(q.shape()[1]),
                 /*causal=*/false,
                 scale,
                 segments.tiles(kTile)};
  launch_prompt(p, segments.tile_count(kTile), stream);
}

}  // namespace kvlm::cuda
