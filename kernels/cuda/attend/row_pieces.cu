#include <algorithm>

#include "kernels/cuda/attend/row_pieces.cuh"
#include "kernels/cuda/device/block_reduce.cuh"
#include "kernels/cuda/device/launch.cuh"

// Decode attention to full rows, in two launches a layer: the softmax state (maximum, sum, output)
// of every piece of every run, then the output of every lane from the states of its pieces. A lane
// is one KV head of one sequence. A DecodeTable has these kernels serve its layers that pack
// nothing, and the full rows behind pictures that were packed once (picture_lanes.cu).
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

/// One block the rows of a part: scores, softmax, values. kLanes lanes read a row, kSize channels
/// each (head_dim <= kLanes * kSize, a multiple of kSize).
template <class T, int kLanes>
__global__ void __launch_bounds__(kPieceThreads) attend_piece(PieceLaunch launch) {
  constexpr int kSize = RowChunk<T>::kSize;
  constexpr int kGroups = kPieceThreads / kLanes;  // rows at a time
  __shared__ float scores[kQueries][kMostPartRows];
  __shared__ float parts[kQueries][kPieceThreads / 32];
  extern __shared__ float sums_out[];  // (kGroups, kQueries, head_dim)

  const PiecePart piece = part_of(launch, sizeof(T));
  constexpr DType kDtype = sizeof(T) == 4              ? DType::kF32
                           : std::is_same_v<T, __half> ? DType::kF16
                                                       : DType::kBF16;
  if (piece.rows < 0 || piece.dtype != kDtype) return;  // another launch serves it
  const int q_per_kv = launch.q_per_kv;
  const int head_dim = launch.head_dim;
  const float scale = launch.scale;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp_lane = thread % kLanes;
  const int group = thread / kLanes;
  const int rows = piece.rows;
  const int channel = warp_lane * kSize;
  const bool reads = channel < head_dim;
  const T* keys = reinterpret_cast<const T*>(piece.keys);
  const T* values = reinterpret_cast<const T*>(piece.values);

  for (int first = 0; first < q_per_kv; first += kQueries) {
    const int queries = min(kQueries, q_per_kv - first);
    const bool last = first + kQueries >= q_per_kv;
    float q[kQueries][kSize];
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        q[j][i] = j < queries && reads ? piece.q[(first + j) * head_dim + channel + i] * scale : 0;
      }
    }
    float maxima[kQueries];
#pragma unroll
    for (float& maximum : maxima) maximum = -INFINITY;
    constexpr int kUnroll = 4;
    for (int base = group; base - group < rows; base += kUnroll * kGroups) {  // a warp as one
      float k[kUnroll][kSize] = {};
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = base + u * kGroups;
        if (at >= rows || !reads) continue;
        RowChunk<T>::load(keys + piece.place(at) * head_dim + channel, last, k[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = base + u * kGroups;
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
          if (at >= rows) continue;
          if (warp_lane == 0) scores[j][at] = dot;
          maxima[j] = fmaxf(maxima[j], dot);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      const float maximum = warp_max(maxima[j]);
      if (thread % 32 == 0) parts[j][thread / 32] = maximum;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      float maximum = parts[j][0];
      for (int i = 1; i < kPieceThreads / 32; ++i) maximum = fmaxf(maximum, parts[j][i]);
      maxima[j] = maximum;
    }
    __syncthreads();
    float sums[kQueries] = {};
    for (int row = thread; row < rows; row += kPieceThreads) {
#pragma unroll
      for (int j = 0; j < kQueries; ++j) {
        if (j >= queries) break;
        if (piece.scores != nullptr) {
          piece.scores[(first + j) * launch.score_stride + row] = scores[j][row];
        }
        const float weight = __expf(scores[j][row] - maxima[j]);
        scores[j][row] = weight;
        sums[j] += weight;
      }
    }
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      const float sum = warp_sum(sums[j]);
      if (thread % 32 == 0) parts[j][thread / 32] = sum;
    }
    __syncthreads();
    float out[kQueries][kSize] = {};
    for (int base = group; base < rows; base += kUnroll * kGroups) {
      float v[kUnroll][kSize] = {};
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = base + u * kGroups;
        if (at >= rows || !reads) continue;
        RowChunk<T>::load(values + piece.place(at) * head_dim + channel, last, v[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = base + u * kGroups;
        if (at >= rows) break;
#pragma unroll
        for (int j = 0; j < kQueries; ++j) {
          if (j >= queries) break;
          const float weight = scores[j][at];
#pragma unroll
          for (int i = 0; i < kSize; ++i) out[j][i] += weight * v[u][i];
        }
      }
    }
    if (reads) {
#pragma unroll
      for (int j = 0; j < kQueries; ++j) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          sums_out[(group * kQueries + j) * head_dim + channel + i] = out[j][i];
        }
      }
    }
    __syncthreads();
    for (int i = thread; i < queries * head_dim; i += kPieceThreads) {
      float sum = 0;
      for (int g = 0; g < kGroups; ++g) sum += sums_out[g * kQueries * head_dim + i];
      piece.state.out[first * head_dim + i] = sum;
    }
    if (thread < queries) {
      float sum = 0;
      for (int i = 0; i < kPieceThreads / 32; ++i) sum += parts[thread][i];
      piece.state.sum[first + thread] = sum;
    }
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      if (thread == 0 && j < queries) piece.state.max[first + j] = maxima[j];
    }
    __syncthreads();
  }
}

constexpr int kJoinThreads = 128;
constexpr int kJoinedParts = 1024;  // weights of so many are held at once
constexpr int kHeldParts = 16;      // asked for before their weights are known
static_assert(kHeldParts <= kJoinThreads && kHeldParts <= kJoinedParts);

/// Merges the softmax states of a lane, of all its runs, with one block of threads for each lane
/// and query. The state of no rows has no weight.
__global__ void __launch_bounds__(kJoinThreads)
    join_lane(PieceLaunch launch, const DeviceRowLane* lanes, int64_t out_moved) {
  __shared__ float weights[kJoinedParts];
  __shared__ float of_warps[kJoinThreads / 32];
  let_next_start();
  const DeviceRowLane lane = lanes[blockIdx.x];  // as attend_tiles() reads pieces
  const int query = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int head_dim = launch.head_dim;
  const auto state = [&](int part) { return state_of(launch, lane.first_part + part); };
  const int64_t stride = launch.state_floats();
  wait_for_earlier();
  // Of part `thread`; and of the first parts, the thread's first channel.
  const SoftmaxState own = state(thread);
  const float own_top = thread < lane.parts ? own.max[query] : -INFINITY;
  const float own_sum = thread < lane.parts ? own.sum[query] : 0;
  float held[kHeldParts] = {};
#pragma unroll
  for (int i = 0; i < kHeldParts; ++i) {
    if (i < lane.parts && thread < head_dim) held[i] = state(i).out[query * head_dim + thread];
  }
  float maximum = own_top;
  for (int i = thread + kJoinThreads; i < lane.parts; i += kJoinThreads) {
    maximum = fmaxf(maximum, state(i).max[query]);
  }
  maximum = block_reduce<kJoinThreads>(maximum, true, of_warps);

  constexpr int kChannels = 8;  // of a thread, at most
  float out[kChannels] = {};
  float sum = 0;
  for (int first = 0; first < lane.parts; first += kJoinedParts) {
    const int count = min(kJoinedParts, lane.parts - first);
    __syncthreads();
    for (int i = thread; i < count; i += kJoinThreads) {
      const bool is_own = first + i == thread;
      const float top = is_own ? own_top : state(first + i).max[query];
      const float weight = top > -INFINITY ? __expf(top - maximum) : 0.0f;
      weights[i] = weight;
      if (weight > 0) sum += weight * (is_own ? own_sum : state(first + i).sum[query]);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      const int channel = thread + j * kJoinThreads;
      if (channel >= head_dim) break;
      const float* from = state(first).out + query * head_dim + channel;
      const bool is_held = first == 0 && j == 0;
      if (is_held) {
#pragma unroll
        for (int i = 0; i < kHeldParts; ++i) {
          if (i < count && weights[i] > 0) out[j] += weights[i] * held[i];
        }
      }
#pragma unroll 8
      for (int i = is_held ? kHeldParts : 0; i < count; ++i) {
        const float weight = weights[i];
        if (weight > 0) out[j] += weight * from[i * stride];
      }
    }
  }
  sum = block_reduce<kJoinThreads>(sum, false, of_warps);
  if (launch.log_sums != nullptr && thread == 0) {
    launch.log_sums[static_cast<int>(blockIdx.x) * launch.q_per_kv + query] = maximum + __logf(sum);
  }
#pragma unroll
  for (int j = 0; j < kChannels; ++j) {
    const int channel = thread + j * kJoinThreads;
    if (channel < head_dim) {
      lane.out[out_moved + query * head_dim + channel] = sum > 0 ? out[j] / sum : 0.0f;
    }
  }
}

template <class T, int kLanes>
void launch_pieces(const PieceLaunch& l, Stream& stream) {
  const size_t shared =
      sizeof(float) * (kPieceThreads / kLanes) * kQueries * static_cast<size_t>(l.head_dim);
  attend_piece<T, kLanes><<<dim3(l.count, l.parts), kPieceThreads, shared, native(stream)>>>(l);
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

void join_parts(const PieceLaunch& launch, const DeviceRowLane* lanes, unsigned count,
                int64_t out_moved, Stream& stream) {
  const dim3 grid(count, static_cast<unsigned>(launch.q_per_kv));
  launch_early("DecodeTable::attend", join_lane, grid, kJoinThreads, stream, launch, lanes,
               out_moved);
}

float* place_states(const PieceLaunch& launch, int64_t parts, Stream& stream) {
  const auto floats = static_cast<size_t>(parts * launch.state_floats());
  return reinterpret_cast<float*>(stream.queue().scratch(kAttentionParts, floats * sizeof(float)));
}

}  // namespace kvlm::cuda
