#include <algorithm>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/prompt_attention.h"
#include "kernels/cuda/prompt_rows.cuh"
#include "kernels/cuda/row_pieces.cuh"

namespace kvlm::cuda {

namespace {

[[noreturn]] void refuse_dim(const char* op, int head_dim) {
  throw Error(ErrorCode::kUnsupported,
              std::string(op) + ": head_dim " + std::to_string(head_dim) +
                  " is not served on CUDA, which takes 1 to 256; use --device cpu");
}

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
};

/// Loads rows [first, first + kTile) of `columns` into tile[kTile][stride]; zeros beyond.
template <int kDim>
__device__ void load_tile(const PromptRows& rows, int kv_head, int64_t first, int64_t columns,
                          bool values, float* tile, int stride) {
  for (int row = static_cast<int>(threadIdx.x) / 32; row < kTile; row += kThreads / 32) {
    const bool there = first + row < columns;
    const LocatedRow from = there ? locate(rows, kv_head, first + row, values) : LocatedRow{};
    for (int i = static_cast<int>(threadIdx.x) % 32; i < kDim; i += 32) {
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
  const int64_t first_query = static_cast<int64_t>(gridDim.x - 1 - blockIdx.x) * kTile;
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
void launch_prompt(const Prompt& p, Stream& stream) {
  constexpr size_t kShared = sizeof(float) * (2 * kTile * (kDim + 4) + kTile * (kTile + 4));
  check(cudaFuncSetAttribute(prompt_attention<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kShared)),
        "attention");
  const dim3 grid(static_cast<unsigned>(ceil_div(p.n, kTile)), static_cast<unsigned>(p.q_heads));
  prompt_attention<kDim><<<grid, kThreads, kShared, native(stream)>>>(p);
  check_launch("attention");
}

// ------------------------------------------------------------------------------ decode over rows

constexpr int kPieceThreads = 128;
constexpr int kQueries = 4;  // of one pass over a piece's rows

/// A group of lanes reads a row, 16 bytes each.
template <class T>
struct RowChunk {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  static __device__ void load(const T* from, float (&to)[kSize]) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    T values[kSize];
    *reinterpret_cast<uint4*>(values) = x;
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = load_float(values[i]);
  }
};

/// Joins the parts of each piece in its state, one block a piece and query.
__global__ void join_splits(const DecodePiece* pieces, float* states, unsigned splits, int q_per_kv,
                            int head_dim) {
  const DecodePiece piece = pieces[blockIdx.x];
  const int query = static_cast<int>(blockIdx.y);
  const auto held = static_cast<unsigned>(
      max(int64_t{1}, (piece.cached.rows + kMaxPieceRows - 1) / kMaxPieceRows));
  const auto state = [&](unsigned split) {
    return split_state(states, blockIdx.x, split, splits, q_per_kv, head_dim);
  };
  float maximum = -INFINITY;
  for (unsigned i = 0; i < held; ++i) maximum = fmaxf(maximum, state(i).max[query]);
  float sum = 0;
  for (unsigned i = 0; i < held && maximum > -INFINITY; ++i) {
    sum += __expf(state(i).max[query] - maximum) * state(i).sum[query];
  }
  for (int c = static_cast<int>(threadIdx.x); c < head_dim; c += static_cast<int>(blockDim.x)) {
    float out = 0;
    for (unsigned i = 0; i < held && maximum > -INFINITY; ++i) {
      out += __expf(state(i).max[query] - maximum) * state(i).out[query * head_dim + c];
    }
    piece.state.out[query * head_dim + c] = out;
  }
  if (threadIdx.x == 0) {
    piece.state.max[query] = maximum;
    piece.state.sum[query] = sum;
  }
}

/// One block kMaxPieceRows rows of a piece: scores, softmax, values. kLanes lanes read a
/// row, kSize channels each (head_dim <= kLanes * kSize, a multiple of kSize).
template <class T, int kLanes>
__global__ void __launch_bounds__(kPieceThreads) attend_piece(PieceLaunch launch) {
  constexpr int kSize = RowChunk<T>::kSize;
  constexpr int kGroups = kPieceThreads / kLanes;  // rows at a time
  __shared__ float scores[kQueries][kMaxPieceRows];
  __shared__ float parts[kQueries][kPieceThreads / 32];
  extern __shared__ float sums_out[];  // (kGroups, kQueries, head_dim)

  const DecodePiece piece = part_of(launch, sizeof(T));
  constexpr DType kDtype = sizeof(T) == 4              ? DType::kF32
                           : std::is_same_v<T, __half> ? DType::kF16
                                                       : DType::kBF16;
  if (piece.cached.rows < 0 || piece.cached.dtype != kDtype) return;  // another launch serves it
  const int q_per_kv = launch.q_per_kv;
  const int head_dim = launch.head_dim;
  const float scale = launch.scale;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes;
  const int group = thread / kLanes;
  const int rows = static_cast<int>(piece.cached.rows);
  const int channel = lane * kSize;
  const bool reads = channel < head_dim;
  const T* keys = reinterpret_cast<const T*>(piece.cached.keys);
  const T* values = reinterpret_cast<const T*>(piece.cached.values);

  for (int first = 0; first < q_per_kv; first += kQueries) {
    const int queries = min(kQueries, q_per_kv - first);
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
        if (at < rows && reads) RowChunk<T>::load(keys + at * head_dim + channel, k[u]);
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
          if (lane == 0) scores[j][at] = dot;
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
        if (at < rows && reads) RowChunk<T>::load(values + at * head_dim + channel, v[u]);
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

/// Pieces of odd shapes: any head_dim, any alignment, any number of rows. One warp a query.
__global__ void attend_odd_piece(const DecodePiece* pieces, int q_per_kv, int head_dim,
                                 float scale) {
  const DecodePiece piece = pieces[blockIdx.x];
  const int query = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (query >= q_per_kv) return;
  const float* q = piece.q + query * head_dim;
  const int64_t row_bytes = static_cast<int64_t>(head_dim) * size_of(piece.cached.dtype);
  float maximum = -INFINITY;
  float sum = 0;
  float* out = piece.state.out + query * head_dim;
  for (int i = lane; i < head_dim; i += 32) out[i] = 0;
  for (int64_t row = 0; row < piece.cached.rows; ++row) {
    float dot = 0;
    for (int i = lane; i < head_dim; i += 32) {
      dot += q[i] * element(piece.cached.keys + row * row_bytes, piece.cached.dtype, i);
    }
    const float score = warp_sum(dot) * scale;
    const float larger = fmaxf(maximum, score);
    const float shrink = maximum == -INFINITY ? 0.0f : expf(maximum - larger);
    const float weight = expf(score - larger);
    sum = sum * shrink + weight;
    maximum = larger;
    for (int i = lane; i < head_dim; i += 32) {
      out[i] = out[i] * shrink +
               weight * element(piece.cached.values + row * row_bytes, piece.cached.dtype, i);
    }
  }
  if (lane == 0) {
    piece.state.max[query] = maximum;
    piece.state.sum[query] = sum;
  }
}

struct DeviceMerge {
  float* out;
  int first;
  int parts;
};

__global__ void merge(const DeviceMerge* jobs, const SoftmaxState* states, int head_dim) {
  const DeviceMerge job = jobs[blockIdx.x];
  const int query = static_cast<int>(blockIdx.y);
  const SoftmaxState* parts = states + job.first;
  float maximum = -INFINITY;
  for (int i = 0; i < job.parts; ++i) maximum = fmaxf(maximum, parts[i].max[query]);
  float sum = 0;
  for (int i = 0; i < job.parts; ++i) {
    const float part = parts[i].max[query];
    if (part != -INFINITY) sum += __expf(part - maximum) * parts[i].sum[query];
  }
  for (int c = static_cast<int>(threadIdx.x); c < head_dim; c += static_cast<int>(blockDim.x)) {
    float out = 0;
    for (int i = 0; i < job.parts; ++i) {
      const float part = parts[i].max[query];
      if (part != -INFINITY) out += __expf(part - maximum) * parts[i].out[query * head_dim + c];
    }
    job.out[query * head_dim + c] = sum > 0 ? out / sum : 0.0f;
  }
}

template <class T, int kLanes>
void launch_pieces(const PieceLaunch& l, Stream& stream) {
  const size_t shared =
      sizeof(float) * (kPieceThreads / kLanes) * kQueries * static_cast<size_t>(l.head_dim);
  attend_piece<T, kLanes><<<dim3(l.count, l.splits), kPieceThreads, shared, native(stream)>>>(l);
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

void attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
               std::span<const KeyValueRows> past, bool causal, float scale, DType multiply,
               Stream& stream) {
  const PromptRows rows = prompt_rows(k, v, past, stream);
  const int head_dim = rows.head_dim;
  if (head_dim > 256) refuse_dim("attention", head_dim);
  if (multiply != DType::kF32) {
    return attend_prompt({out, q, rows, causal, scale, multiply}, stream);
  }
  const Prompt p{out.as<float>(), q.as<float>(), rows, q.shape()[0], static_cast<int>(q.shape()[1]),
                 causal,          scale};
  if (head_dim <= 32) return launch_prompt<32>(p, stream);
  if (head_dim <= 64) return launch_prompt<64>(p, stream);
  if (head_dim <= 96) return launch_prompt<96>(p, stream);
  if (head_dim <= 128) return launch_prompt<128>(p, stream);
  launch_prompt<256>(p, stream);
}

void attend_rows(std::span<const DecodePiece> pieces, int q_per_kv, int head_dim, float scale,
                 Stream& stream) {
  if (pieces.empty()) return;
  const auto* on_device = reinterpret_cast<const DecodePiece*>(
      stream.queue().upload(pieces.data(), pieces.size_bytes()));
  bool types[3] = {};
  int64_t most = 1;  // rows of a piece
  bool odd = head_dim % 8 != 0 || head_dim > 256;
  for (const DecodePiece& piece : pieces) {
    types[static_cast<int>(piece.cached.dtype)] = true;
    const auto address = reinterpret_cast<uintptr_t>(piece.cached.keys) |
                         reinterpret_cast<uintptr_t>(piece.cached.values);
    odd = odd || address % 16 != 0;
    most = std::max(most, piece.cached.rows);
  }
  types[0] = types[0] && head_dim <= 128;
  const bool wide_f32 = head_dim > 128 && std::any_of(pieces.begin(), pieces.end(), [](auto& p) {
                          return p.cached.dtype == DType::kF32;
                        });
  if (odd || wide_f32) {
    if (q_per_kv > 32) refuse_dim("attend_rows", head_dim);
    attend_odd_piece<<<static_cast<unsigned>(pieces.size()), static_cast<unsigned>(32 * q_per_kv),
                       0, native(stream)>>>(on_device, q_per_kv, head_dim, scale);
    return check_launch("attend_rows");
  }
  PieceLaunch launch{on_device,
                     static_cast<unsigned>(pieces.size()),
                     static_cast<unsigned>(ceil_div(most, kMaxPieceRows)),
                     q_per_kv,
                     head_dim,
                     scale,
                     nullptr};
  if (launch.splits > 1) {
    const size_t floats = pieces.size() * launch.splits * static_cast<size_t>(q_per_kv) *
                          (2 + static_cast<size_t>(head_dim));
    launch.split_states =
        reinterpret_cast<float*>(stream.queue().scratch(kAttentionParts, floats * sizeof(float)));
  }
  if (types[0]) launch_pieces<float>(launch, stream);
  if (types[1] && head_dim == 128) {
    attend_half_rows(launch, stream);
  } else if (types[1]) {
    launch_pieces<__half>(launch, stream);
  }
  if (types[2]) launch_pieces<__nv_bfloat16>(launch, stream);
  if (launch.splits > 1) {
    join_splits<<<dim3(launch.count, static_cast<unsigned>(q_per_kv)), 128, 0, native(stream)>>>(
        on_device, launch.split_states, launch.splits, q_per_kv, head_dim);
  }
  check_launch("attend_rows");
}

void merge_states(std::span<const MergeJob> jobs, int queries, int head_dim, Stream& stream) {
  if (jobs.empty()) return;
  // The jobs, then all their parts, in one copy.
  static thread_local std::vector<std::byte> packet;
  size_t parts = 0;
  for (const MergeJob& job : jobs) parts += job.parts.size();
  const size_t head = (jobs.size() * sizeof(DeviceMerge) + 15) / 16 * 16;
  packet.resize(head + parts * sizeof(SoftmaxState));
  auto* to = reinterpret_cast<DeviceMerge*>(packet.data());
  auto* states = reinterpret_cast<SoftmaxState*>(packet.data() + head);
  int first = 0;
  for (const MergeJob& job : jobs) {
    *to++ = {job.out, first, static_cast<int>(job.parts.size())};
    states = std::copy(job.parts.begin(), job.parts.end(), states);
    first += static_cast<int>(job.parts.size());
  }
  const std::byte* on_device = stream.queue().upload(packet.data(), packet.size());
  const dim3 grid(static_cast<unsigned>(jobs.size()), static_cast<unsigned>(queries));
  merge<<<grid, 128, 0, native(stream)>>>(reinterpret_cast<const DeviceMerge*>(on_device),
                                          reinterpret_cast<const SoftmaxState*>(on_device + head),
                                          head_dim);
  check_launch("merge_states");
}

}  // namespace kvlm::cuda
