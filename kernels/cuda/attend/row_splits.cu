#include <algorithm>

#include "kernels/cuda/attend/row_splits.cuh"
#include "kernels/cuda/device/block_reduce.cuh"
#include "kernels/cuda/device/launch.cuh"

// Decode attention over unpacked tokens: a softmax state for each part of a KV head's tokens
// (row_splits.cuh). Used by layers that pack nothing, whose states fused_join.cuh merges, and for
// the tokens after an image packed as one block, which image_block.cuh merges with the image's.
// f16 at a head_dim of 128 uses half_rows.cu instead.
namespace kvlm::cuda {

namespace {

constexpr int kRowSplitThreads = 128;
constexpr int kQueries = 4;  // for each time that tokens are read

/// 16 bytes of a token, as floats.
template <class T>
struct RowChunk {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  ///   last  it is not read again: evict it from L2 first
  static __device__ void load(const T* from, bool last, float (&to)[kSize]) {
    const auto* at = reinterpret_cast<const uint4*>(from);
    const uint4 x = last ? __ldcs(at) : *at;
    T values[kSize];
    *reinterpret_cast<uint4*>(values) = x;
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = load_float(values[i]);
  }
};

/// A thread's share of tokens: kLanes threads read a token, kSize channels each.
template <class T, int kLanes>
struct RowSplitThread {
  static constexpr int kSize = RowChunk<T>::kSize;
  static constexpr int kGroups = kRowSplitThreads / kLanes;  // rows at a time
  static constexpr int kUnroll = 4;                          // rows of a thread at a time
  int warp_lane = static_cast<int>(threadIdx.x) % kLanes;
  int group = static_cast<int>(threadIdx.x) / kLanes;
  int channel = warp_lane * kSize;
  bool reads;  // `channel` exists

  __device__ explicit RowSplitThread(int head_dim) : reads(channel < head_dim) {}

  /// Loads rows base, base + kGroups, ... of the part, as far as they exist.
  __device__ __forceinline__ void load(const SplitPart& row_split, const std::byte* rows, int base,
                                       int head_dim, bool last, float (&to)[kUnroll][kSize]) const {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + u * kGroups;
      if (at >= row_split.rows || !reads) continue;
      RowChunk<T>::load(reinterpret_cast<const T*>(rows) + row_split.place(at) * head_dim + channel,
                        last, to[u]);
    }
  }
};

/// A number of each warp for each query, in shared memory for a reduction.
using OfWarps = float[kQueries][kRowSplitThreads / 32];
/// Scores, then weights, of a part.
using PartScores = float[kQueries][kMostPartRows];

/// Scores of a part, and the greatest of each query.
template <class T, int kLanes>
__device__ __forceinline__ void score_rows(const RowSplitLaunch& launch, const SplitPart& row_split,
                                           int first_query, int queries, bool last,
                                           const RowSplitThread<T, kLanes>& my, PartScores& scores,
                                           OfWarps& of_warps, float (&maxima)[kQueries]) {
  using Mine = RowSplitThread<T, kLanes>;
  constexpr int kSize = Mine::kSize;
  float q[kQueries][kSize];
#pragma unroll
  for (int j = 0; j < kQueries; ++j) {
    const float* from = row_split.q + (first_query + j) * launch.head_dim + my.channel;
#pragma unroll
    for (int i = 0; i < kSize; ++i) q[j][i] = j < queries && my.reads ? from[i] * launch.scale : 0;
    maxima[j] = -INFINITY;
  }
  constexpr int kStep = Mine::kUnroll * Mine::kGroups;
  for (int base = my.group; base - my.group < row_split.rows; base += kStep) {  // uniform in a warp
    float k[Mine::kUnroll][kSize] = {};
    my.load(row_split, row_split.keys, base, launch.head_dim, last, k);
#pragma unroll
    for (int u = 0; u < Mine::kUnroll; ++u) {
      const int at = base + u * Mine::kGroups;
#pragma unroll
      for (int j = 0; j < kQueries; ++j) {
        if (j >= queries) break;
        float dot = 0;
#pragma unroll
        for (int i = 0; i < kSize; ++i) dot += q[j][i] * k[u][i];
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) {
          dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        }
        if (at >= row_split.rows) continue;
        if (my.warp_lane == 0) scores[j][at] = dot;
        maxima[j] = fmaxf(maxima[j], dot);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kQueries; ++j) {
    const float maximum = warp_max(maxima[j]);
    if (threadIdx.x % 32 == 0) of_warps[j][threadIdx.x / 32] = maximum;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kQueries; ++j) {
    maxima[j] = of_warps[j][0];
    for (int i = 1; i < kRowSplitThreads / 32; ++i) maxima[j] = fmaxf(maxima[j], of_warps[j][i]);
  }
  __syncthreads();
}

/// Replaces the scores of a part by weights, and sums them by warp.
__device__ __forceinline__ void weigh_rows(const RowSplitLaunch& launch, const SplitPart& row_split,
                                           int first_query, int queries,
                                           const float (&maxima)[kQueries], PartScores& scores,
                                           OfWarps& of_warps) {
  float sums[kQueries] = {};
  for (int row = static_cast<int>(threadIdx.x); row < row_split.rows; row += kRowSplitThreads) {
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      if (j >= queries) break;
      if (row_split.scores != nullptr) {
        row_split.scores[(first_query + j) * launch.score_stride + row] = scores[j][row] * kLog2e;
      }
      const float weight = __expf(scores[j][row] - maxima[j]);
      scores[j][row] = weight;
      sums[j] += weight;
    }
  }
#pragma unroll
  for (int j = 0; j < kQueries; ++j) {
    const float sum = warp_sum(sums[j]);
    if (threadIdx.x % 32 == 0) of_warps[j][threadIdx.x / 32] = sum;
  }
  __syncthreads();
}

/// Adds the values of a part by weight, to `sums_out` (kGroups, kQueries, head_dim). The output is
/// the sum over groups.
template <class T, int kLanes>
__device__ __forceinline__ void add_values(const RowSplitLaunch& launch, const SplitPart& row_split,
                                           int queries, bool last,
                                           const RowSplitThread<T, kLanes>& my,
                                           const PartScores& weights, float* sums_out) {
  using Mine = RowSplitThread<T, kLanes>;
  constexpr int kSize = Mine::kSize;
  float out[kQueries][kSize] = {};
  for (int base = my.group; base < row_split.rows; base += Mine::kUnroll * Mine::kGroups) {
    float v[Mine::kUnroll][kSize] = {};
    my.load(row_split, row_split.values, base, launch.head_dim, last, v);
#pragma unroll
    for (int u = 0; u < Mine::kUnroll; ++u) {
      const int at = base + u * Mine::kGroups;
      if (at >= row_split.rows) break;
#pragma unroll
      for (int j = 0; j < kQueries; ++j) {
        if (j >= queries) break;
        const float weight = weights[j][at];
#pragma unroll
        for (int i = 0; i < kSize; ++i) out[j][i] += weight * v[u][i];
      }
    }
  }
  if (my.reads) {
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        sums_out[(my.group * kQueries + j) * launch.head_dim + my.channel + i] = out[j][i];
      }
    }
  }
  __syncthreads();
}

/// One part by a thread block: scores, softmax, values, for kQueries queries at a time. head_dim is
/// a multiple of kSize, at most kLanes * kSize.
template <class T, int kLanes>
__global__ void __launch_bounds__(kRowSplitThreads) attend_row_split(RowSplitLaunch launch) {
  __shared__ PartScores scores;
  __shared__ OfWarps of_warps;
  extern __shared__ float sums_out[];
  let_next_start();
  const SplitPart row_split = part_of(launch, sizeof(T));  // counted: see attend_tiles()
  wait_for_earlier();
  constexpr DType kDtype = sizeof(T) == 4              ? DType::kF32
                           : std::is_same_v<T, __half> ? DType::kF16
                                                       : DType::kBF16;
  if (row_split.rows < 0 || row_split.dtype != kDtype) return;  // another launch reads it
  const int head_dim = launch.head_dim;
  const auto thread = static_cast<int>(threadIdx.x);
  const RowSplitThread<T, kLanes> my(head_dim);
  for (int first = 0; first < launch.q_per_kv; first += kQueries) {
    const int queries = min(kQueries, launch.q_per_kv - first);
    const bool last = first + kQueries >= launch.q_per_kv;  // not read again
    float maxima[kQueries];
    score_rows(launch, row_split, first, queries, last, my, scores, of_warps, maxima);
    weigh_rows(launch, row_split, first, queries, maxima, scores, of_warps);
    add_values(launch, row_split, queries, last, my, scores, sums_out);
    for (int i = thread; i < queries * head_dim; i += kRowSplitThreads) {
      float sum = 0;
      for (int g = 0; g < my.kGroups; ++g) sum += sums_out[g * kQueries * head_dim + i];
      row_split.outs[first * head_dim + i] = sum;
    }
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      if (thread != j || j >= queries) continue;
      float sum = 0;
      for (int i = 0; i < kRowSplitThreads / 32; ++i) sum += of_warps[j][i];
      row_split.ends[first + j] = {maxima[j] * kLog2e, sum};
    }
    __syncthreads();
  }
}

template <class T, int kLanes>
void launch_row_splits(const RowSplitLaunch& l, Stream& stream) {
  const size_t shared =
      sizeof(float) * (kRowSplitThreads / kLanes) * kQueries * static_cast<size_t>(l.head_dim);
  launch_early("DecodeTable::attend", attend_row_split<T, kLanes>, dim3(l.count, l.parts),
               kRowSplitThreads, shared, stream, l);
}

template <class T>
void launch_row_splits(const RowSplitLaunch& l, Stream& stream) {
  const int chunks = l.head_dim / RowChunk<T>::kSize;
  if (chunks <= 4) return launch_row_splits<T, 4>(l, stream);
  if (chunks <= 8) return launch_row_splits<T, 8>(l, stream);
  if (chunks <= 16) return launch_row_splits<T, 16>(l, stream);
  launch_row_splits<T, 32>(l, stream);
}

}  // namespace

void attend_row_splits(const RowSplitLaunch& launch, DType dtype, Stream& stream) {
  if (dtype == DType::kF32) return launch_row_splits<float>(launch, stream);
  if (dtype == DType::kBF16) return launch_row_splits<__nv_bfloat16>(launch, stream);
  if (launch.head_dim == 128) return attend_half_rows(launch, stream);
  launch_row_splits<__half>(launch, stream);
}

}  // namespace kvlm::cuda
