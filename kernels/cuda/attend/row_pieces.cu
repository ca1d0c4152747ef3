#include <algorithm>

#include "kernels/cuda/attend/row_pieces.cuh"
#include "kernels/cuda/device/block_reduce.cuh"
#include "kernels/cuda/device/launch.cuh"

// Decode attention to full rows: the softmax state of every part of every piece, which
// fused_attention.cu merges. A DecodeTable has these kernels serve its layers that pack nothing,
// and the full rows behind pictures that were packed once (picture_lanes.cu).
namespace kvlm::cuda {

namespace {

constexpr int kPieceThreads = 128;
constexpr int kQueries = 4;  // of one pass over a piece's rows

/// A group of threads of a warp reads a row, 16 bytes each.
template <class T>
struct RowChunk {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  ///   last  nobody reads it again: it is the first to leave the second level of cache
  static __device__ void load(const T* from, bool last, float (&to)[kSize]) {
    const auto* at = reinterpret_cast<const uint4*>(from);
    const uint4 x = last ? __ldcs(at) : *at;
    T values[kSize];
    *reinterpret_cast<uint4*>(values) = x;
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = load_float(values[i]);
  }
};

/// What a thread reads of rows: kLanes threads read a row, kSize channels each.
template <class T, int kLanes>
struct PieceThread {
  static constexpr int kSize = RowChunk<T>::kSize;
  static constexpr int kGroups = kPieceThreads / kLanes;  // rows at a time
  static constexpr int kUnroll = 4;                       // rows of a thread at a time
  int warp_lane = static_cast<int>(threadIdx.x) % kLanes;
  int group = static_cast<int>(threadIdx.x) / kLanes;
  int channel = warp_lane * kSize;
  bool reads;  // the row has such channels

  __device__ explicit PieceThread(int head_dim) : reads(channel < head_dim) {}

  /// Rows base, base + kGroups, ... of `rows`, those that are there.
  __device__ __forceinline__ void load(const PiecePart& piece, const std::byte* rows, int base,
                                       int head_dim, bool last, float (&to)[kUnroll][kSize]) const {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = base + u * kGroups;
      if (at >= piece.rows || !reads) continue;
      RowChunk<T>::load(reinterpret_cast<const T*>(rows) + piece.place(at) * head_dim + channel,
                        last, to[u]);
    }
  }
};

/// A number of each warp for each query, on its way to all threads.
using OfWarps = float[kQueries][kPieceThreads / 32];
/// Scores, then weights, of a part.
using PartScores = float[kQueries][kMostPartRows];

/// Scores of the rows of a part, and the greatest of each query.
template <class T, int kLanes>
__device__ __forceinline__ void score_rows(const PieceLaunch& launch, const PiecePart& piece,
                                           int first_query, int queries, bool last,
                                           const PieceThread<T, kLanes>& my, PartScores& scores,
                                           OfWarps& of_warps, float (&maxima)[kQueries]) {
  using Mine = PieceThread<T, kLanes>;
  constexpr int kSize = Mine::kSize;
  float q[kQueries][kSize];
#pragma unroll
  for (int j = 0; j < kQueries; ++j) {
    const float* from = piece.q + (first_query + j) * launch.head_dim + my.channel;
#pragma unroll
    for (int i = 0; i < kSize; ++i) q[j][i] = j < queries && my.reads ? from[i] * launch.scale : 0;
    maxima[j] = -INFINITY;
  }
  constexpr int kStep = Mine::kUnroll * Mine::kGroups;
  for (int base = my.group; base - my.group < piece.rows; base += kStep) {  // a warp as one
    float k[Mine::kUnroll][kSize] = {};
    my.load(piece, piece.keys, base, launch.head_dim, last, k);
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
        if (at >= piece.rows) continue;
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
    for (int i = 1; i < kPieceThreads / 32; ++i) maxima[j] = fmaxf(maxima[j], of_warps[j][i]);
  }
  __syncthreads();
}

/// Makes weights of the scores of a part, and their sums.
__device__ __forceinline__ void weigh_rows(const PieceLaunch& launch, const PiecePart& piece,
                                           int first_query, int queries,
                                           const float (&maxima)[kQueries], PartScores& scores,
                                           OfWarps& of_warps) {
  float sums[kQueries] = {};
  for (int row = static_cast<int>(threadIdx.x); row < piece.rows; row += kPieceThreads) {
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      if (j >= queries) break;
      if (piece.scores != nullptr) {
        piece.scores[(first_query + j) * launch.score_stride + row] = scores[j][row] * kLog2e;
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

/// Adds the values of a part by weight: to `sums_out` (kGroups, kQueries, head_dim), whose groups
/// are the output's terms.
template <class T, int kLanes>
__device__ __forceinline__ void add_values(const PieceLaunch& launch, const PiecePart& piece,
                                           int queries, bool last, const PieceThread<T, kLanes>& my,
                                           const PartScores& weights, float* sums_out) {
  using Mine = PieceThread<T, kLanes>;
  constexpr int kSize = Mine::kSize;
  float out[kQueries][kSize] = {};
  for (int base = my.group; base < piece.rows; base += Mine::kUnroll * Mine::kGroups) {
    float v[Mine::kUnroll][kSize] = {};
    my.load(piece, piece.values, base, launch.head_dim, last, v);
#pragma unroll
    for (int u = 0; u < Mine::kUnroll; ++u) {
      const int at = base + u * Mine::kGroups;
      if (at >= piece.rows) break;
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

/// The rows of a part by a block of threads: scores, softmax, values, for kQueries queries at a
/// time. head_dim <= kLanes * kSize, a multiple of kSize.
template <class T, int kLanes>
__global__ void __launch_bounds__(kPieceThreads) attend_piece(PieceLaunch launch) {
  __shared__ PartScores scores;
  __shared__ OfWarps of_warps;
  extern __shared__ float sums_out[];
  let_next_start();
  const PiecePart piece = part_of(launch, sizeof(T));  // counted before, as in attend_tiles()
  wait_for_earlier();
  constexpr DType kDtype = sizeof(T) == 4              ? DType::kF32
                           : std::is_same_v<T, __half> ? DType::kF16
                                                       : DType::kBF16;
  if (piece.rows < 0 || piece.dtype != kDtype) return;  // another launch serves it
  const int head_dim = launch.head_dim;
  const auto thread = static_cast<int>(threadIdx.x);
  const PieceThread<T, kLanes> my(head_dim);
  for (int first = 0; first < launch.q_per_kv; first += kQueries) {
    const int queries = min(kQueries, launch.q_per_kv - first);
    const bool last = first + kQueries >= launch.q_per_kv;  // nobody reads the rows again
    float maxima[kQueries];
    score_rows(launch, piece, first, queries, last, my, scores, of_warps, maxima);
    weigh_rows(launch, piece, first, queries, maxima, scores, of_warps);
    add_values(launch, piece, queries, last, my, scores, sums_out);
    for (int i = thread; i < queries * head_dim; i += kPieceThreads) {
      float sum = 0;
      for (int g = 0; g < my.kGroups; ++g) sum += sums_out[g * kQueries * head_dim + i];
      piece.outs[first * head_dim + i] = sum;
    }
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      if (thread != j || j >= queries) continue;
      float sum = 0;
      for (int i = 0; i < kPieceThreads / 32; ++i) sum += of_warps[j][i];
      piece.ends[first + j] = {maxima[j] * kLog2e, sum};
    }
    __syncthreads();
  }
}

template <class T, int kLanes>
void launch_pieces(const PieceLaunch& l, Stream& stream) {
  const size_t shared =
      sizeof(float) * (kPieceThreads / kLanes) * kQueries * static_cast<size_t>(l.head_dim);
  launch_early("DecodeTable::attend", attend_piece<T, kLanes>, dim3(l.count, l.parts),
               kPieceThreads, shared, stream, l);
}

template <class T>
void launch_pieces(const PieceLaunch& l, Stream& stream) {
  const int chunks = l.head_dim / RowChunk<T>::kSize;
  if (chunks <= 4) return launch_pieces<T, 4>(l, stream);
  if (chunks <= 8) return launch_pieces<T, 8>(l, stream);
  if (chunks <= 16) return launch_pieces<T, 16>(l, stream);
  launch_pieces<T, 32>(l, stream);
}

}  // namespace

void attend_pieces(const PieceLaunch& launch, DType dtype, Stream& stream) {
  if (dtype == DType::kF32) return launch_pieces<float>(launch, stream);
  if (dtype == DType::kBF16) return launch_pieces<__nv_bfloat16>(launch, stream);
  if (launch.head_dim == 128) return attend_half_rows(launch, stream);
  launch_pieces<__half>(launch, stream);
}

}  // namespace kvlm::cuda
