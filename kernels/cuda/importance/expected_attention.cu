// The attention that keys can expect, one step a kernel: queries before RoPE, their mean and
// covariance, both turned to the positions behind the prompt, what softmax takes of every key, and
// the softmax. All of it is written for any head_dim; the two matrix products run in f32.
#include <vector>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/importance/expected_attention.h"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kSide = 16;       // of a square of the covariance
constexpr int kKeyRows = 8;     // that a block multiplies by the covariance
constexpr int kPartRows = 256;  // whose mean a block adds

struct Job {
  const std::byte* q;  // (n, q_heads, dim), after RoPE
  DType q_dtype;
  const StoredRows* keys;    // (kv_heads,) on the GPU
  const float* frequencies;  // (half,) on the GPU
  const double* rotation;    // (2, half) on the GPU: mean_rotation()
  int n, q_heads, q_per_kv, dim, half;
  int first_row;
  bool covariance;
  double scale;
  float* queries;  // (q_heads, n, dim) before RoPE
  double* parts;   // (q_heads, part_count, dim) sums
  int part_count;
  double* means;    // (q_heads, dim)
  double* squares;  // (q_heads, dim, dim)
  double* logits;   // (q_heads, n)
  double* weights;  // (kv_heads, n)
};

__device__ float query(const Job& job, int64_t row, int64_t head, int channel) {
  const int64_t at = (row * job.q_heads + head) * job.dim + channel;
  switch (job.q_dtype) {
    case DType::kF16:
      return load_float(reinterpret_cast<const __half*>(job.q)[at]);
    case DType::kBF16:
      return load_float(reinterpret_cast<const __nv_bfloat16*>(job.q)[at]);
    default:
      return reinterpret_cast<const float*>(job.q)[at];
  }
}

/// A row of a head, by a block.
__global__ void __launch_bounds__(kThreads) turn_back(Job job) {
  const int64_t row = blockIdx.x;
  const int64_t head = blockIdx.y;
  float* out = job.queries + (head * job.n + row) * job.dim;
  for (int c = static_cast<int>(threadIdx.x); c < job.dim; c += kThreads) {
    float x = query(job, row, head, c);
    if (c < 2 * job.half) {
      const int f = c % job.half;
      double sine = 0;
      double cosine = 0;
      sincos(static_cast<double>(row) * static_cast<double>(job.frequencies[f]), &sine, &cosine);
      const bool upper = c >= job.half;
      const float other = query(job, row, head, upper ? f : c + job.half);
      const auto s = static_cast<float>(sine);
      x = static_cast<float>(cosine) * x + (upper ? -s : s) * other;
    }
    out[c] = x;
  }
}

/// parts[head, part, :] = the sum of the rows of a part that count.
__global__ void __launch_bounds__(kThreads) add_queries(Job job) {
  const int64_t head = blockIdx.y;
  const int first = job.first_row + static_cast<int>(blockIdx.x) * kPartRows;
  const int last = min(first + kPartRows, job.n);
  double* part = job.parts + (head * job.part_count + blockIdx.x) * job.dim;
  for (int c = static_cast<int>(threadIdx.x); c < job.dim; c += kThreads) {
    double sum = 0;
    for (int i = first; i < last; ++i) {
      sum += static_cast<double>(job.queries[(head * job.n + i) * job.dim + c]);
    }
    part[c] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) find_means(Job job) {
  const int64_t head = blockIdx.x;
  for (int c = static_cast<int>(threadIdx.x); c < job.dim; c += kThreads) {
    double sum = 0;
    for (int part = 0; part < job.part_count; ++part) {
      sum += job.parts[(head * job.part_count + part) * job.dim + c];
    }
    job.means[head * job.dim + c] = sum / (job.n - job.first_row);
  }
}

/// A square of a head's covariance, an element a thread: products of kSide rows in f32, their sums
/// in f64.
__global__ void __launch_bounds__(kSide* kSide) find_squares(Job job) {
  __shared__ float left[kSide][kSide + 1];
  __shared__ float right[kSide][kSide + 1];
  const int64_t head = blockIdx.z;
  const auto tx = static_cast<int>(threadIdx.x);
  const auto ty = static_cast<int>(threadIdx.y);
  const int row = static_cast<int>(blockIdx.y) * kSide + ty;
  const int column = static_cast<int>(blockIdx.x) * kSide + tx;
  const double* mean = job.means + head * job.dim;
  const auto centred = [&](int i, int c) {
    if (i >= job.n || c >= job.dim) return 0.0f;
    const float x = job.queries[(head * job.n + i) * job.dim + c];
    return static_cast<float>(static_cast<double>(x) - mean[c]);
  };
  double sum = 0;
  for (int first = job.first_row; first < job.n; first += kSide) {
    left[ty][tx] = centred(first + ty, static_cast<int>(blockIdx.y) * kSide + tx);
    right[ty][tx] = centred(first + ty, column);
    __syncthreads();
    float products = 0;
#pragma unroll
    for (int r = 0; r < kSide; ++r) products += left[r][ty] * right[r][tx];
    sum += static_cast<double>(products);
    __syncthreads();
  }
  if (row >= job.dim || column >= job.dim) return;
  job.squares[(head * job.dim + row) * job.dim + column] = sum / (job.n - job.first_row);
}

/// Channels f and f + half of a vector whose elements lie `stride` apart.
__device__ void turn_pair(const Job& job, double* x, int64_t stride, int f) {
  double& a = x[f * stride];
  double& b = x[(f + job.half) * stride];
  const double cosine = job.rotation[f];
  const double sine = job.rotation[job.half + f];
  const double turned = cosine * a - sine * b;
  b = cosine * b + sine * a;
  a = turned;
}

/// The mean and the covariance of a head, in place, by a block.
__global__ void __launch_bounds__(kThreads) turn_statistics(Job job) {
  const int64_t head = blockIdx.x;
  double* square = job.squares + head * job.dim * job.dim;
  const int pairs = job.half * job.dim;
  if (job.covariance) {
    for (int i = static_cast<int>(threadIdx.x); i < pairs; i += kThreads) {
      turn_pair(job, square + i % job.dim, job.dim, i / job.dim);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < pairs; i += kThreads) {
      turn_pair(job, square + static_cast<int64_t>(i % job.dim) * job.dim, 1, i / job.dim);
    }
  }
  for (int f = static_cast<int>(threadIdx.x); f < job.half; f += kThreads) {
    turn_pair(job, job.means + head * job.dim, 1, f);
  }
}

/// Keys from `first` on of a head, zeros behind the last, as floats. By a block.
__device__ __forceinline__ void load_keys(const Job& job, int64_t head, int first, float* keys) {
  const StoredRows stored = job.keys[head / job.q_per_kv];
  const int width = stored.dtype == DType::kF32 ? 4 : 2;
  for (int i = static_cast<int>(threadIdx.x); i < kKeyRows * job.dim; i += kThreads) {
    const int64_t row = first + i / job.dim;
    keys[i] = row < job.n ? element(stored.data + row * job.dim * width, stored.dtype, i % job.dim)
                          : 0.0f;
  }
}

/// Products of the keys with a column of a head's covariance.
__device__ __forceinline__ void multiply_column(const Job& job, int64_t head, int c,
                                                const float* keys, float (&products)[kKeyRows]) {
  const double* column = job.squares + head * job.dim * job.dim + c;
  for (int a = 0; a < job.dim; ++a) {
    const auto s = static_cast<float>(column[static_cast<int64_t>(a) * job.dim]);
#pragma unroll
    for (int r = 0; r < kKeyRows; ++r) products[r] += keys[r * job.dim + a] * s;
  }
}

/// What softmax takes of kKeyRows keys, by a block: a thread has a column of the covariance, or
/// some.
__global__ void __launch_bounds__(kThreads) find_logits(Job job) {
  extern __shared__ float keys[];  // (kKeyRows, dim)
  __shared__ double sums[kKeyRows][kThreads];
  const int64_t head = blockIdx.y;
  const int first = static_cast<int>(blockIdx.x) * kKeyRows;
  const auto thread = static_cast<int>(threadIdx.x);
  load_keys(job, head, first, keys);
  __syncthreads();
  double own[kKeyRows] = {};
  for (int c = thread; c < job.dim; c += kThreads) {
    float products[kKeyRows] = {};
    if (job.covariance) multiply_column(job, head, c, keys, products);
    const double mean = job.means[head * job.dim + c];
#pragma unroll
    for (int r = 0; r < kKeyRows; ++r) {
      const auto x = static_cast<double>(keys[r * job.dim + c]);
      own[r] +=
          job.scale * x * mean + job.scale * job.scale / 2 * x * static_cast<double>(products[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kKeyRows; ++r) sums[r][thread] = own[r];
  __syncthreads();
  if (thread >= kKeyRows || first + thread >= job.n) return;
  double sum = 0;
  for (int i = 0; i < kThreads; ++i) sum += sums[thread][i];
  job.logits[head * job.n + first + thread] = sum;
}

/// The softmax of a head's keys, in place, by a block; those that get nothing become 0.
__global__ void __launch_bounds__(kThreads) soften(Job job) {
  __shared__ double found[kThreads];
  double* x = job.logits + static_cast<int64_t>(blockIdx.x) * job.n;
  const auto thread = static_cast<int>(threadIdx.x);
  double most = -INFINITY;
  for (int j = thread; j < job.first_row; j += kThreads) x[j] = 0;
  for (int j = job.first_row + thread; j < job.n; j += kThreads) most = fmax(most, x[j]);
  found[thread] = most;
  __syncthreads();
  for (int i = 0; i < kThreads; ++i) most = fmax(most, found[i]);
  __syncthreads();
  double sum = 0;
  for (int j = job.first_row + thread; j < job.n; j += kThreads) {
    x[j] = exp(x[j] - most);
    sum += x[j];
  }
  found[thread] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < kThreads; ++i) sum += found[i];
  for (int j = job.first_row + thread; j < job.n; j += kThreads) x[j] /= sum;
}

/// The mean over the query heads of a kv_head.
__global__ void __launch_bounds__(kThreads) average_heads(Job job) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= job.n) return;
  double sum = 0;
  for (int h = 0; h < job.q_per_kv; ++h) {
    sum += job.logits[(static_cast<int64_t>(blockIdx.y) * job.q_per_kv + h) * job.n + j];
  }
  job.weights[static_cast<int64_t>(blockIdx.y) * job.n + j] = sum / job.q_per_kv;
}

/// Uploads `values`; null for none.
template <class T>
const T* uploaded(std::span<const T> values, Stream& stream) {
  if (values.empty()) return nullptr;
  return reinterpret_cast<const T*>(stream.queue().upload(values.data(), values.size_bytes()));
}

/// What is known on the host.
Job job_of(const FutureQueries& future, ConstTensorView q, size_t kv_heads) {
  Job job{};
  job.q = q.data();
  job.q_dtype = q.dtype();
  job.n = static_cast<int>(q.shape()[0]);
  job.q_heads = static_cast<int>(q.shape()[1]);
  job.q_per_kv = job.q_heads / static_cast<int>(kv_heads);
  job.dim = static_cast<int>(q.shape()[2]);
  job.half = static_cast<int>(future.frequencies.size());
  job.first_row = future.first_row;
  job.covariance = future.covariance;
  job.scale = static_cast<double>(future.scale);
  job.part_count = static_cast<int>(ceil_div(job.n - job.first_row, kPartRows));
  return job;
}

void place_workspace(Job& job, size_t weights, Stream& stream) {
  const auto heads = static_cast<size_t>(job.q_heads);
  const auto n = static_cast<size_t>(job.n);
  const auto dim = static_cast<size_t>(job.dim);
  const size_t part_sums = heads * static_cast<size_t>(job.part_count) * dim;
  const size_t squares = job.covariance ? heads * dim * dim : 0;
  const size_t doubles = part_sums + heads * dim + squares + heads * n + weights;
  std::byte* scratch = stream.queue().scratch(
      kRowScores, doubles * sizeof(double) + heads * n * dim * sizeof(float));
  job.parts = reinterpret_cast<double*>(scratch);
  job.means = job.parts + part_sums;
  job.squares = job.means + heads * dim;
  job.logits = job.squares + squares;
  job.weights = job.logits + heads * n;
  job.queries = reinterpret_cast<float*>(job.weights + weights);
}

void launch_all(const Job& job, unsigned kv_heads, Stream& stream) {
  const auto blocks = [](int64_t count, int size) {
    return static_cast<unsigned>(ceil_div(count, size));
  };
  const auto of_heads = static_cast<unsigned>(job.q_heads);
  turn_back<<<dim3(static_cast<unsigned>(job.n), of_heads), kThreads, 0, native(stream)>>>(job);
  add_queries<<<dim3(static_cast<unsigned>(job.part_count), of_heads), kThreads, 0,
                native(stream)>>>(job);
  find_means<<<of_heads, kThreads, 0, native(stream)>>>(job);
  if (job.covariance) {
    find_squares<<<dim3(blocks(job.dim, kSide), blocks(job.dim, kSide), of_heads),
                   dim3(kSide, kSide), 0, native(stream)>>>(job);
  }
  if (job.half > 0) turn_statistics<<<of_heads, kThreads, 0, native(stream)>>>(job);
  find_logits<<<dim3(blocks(job.n, kKeyRows), of_heads), kThreads,
                kKeyRows* static_cast<size_t>(job.dim) * sizeof(float), native(stream)>>>(job);
  soften<<<of_heads, kThreads, 0, native(stream)>>>(job);
  average_heads<<<dim3(blocks(job.n, kThreads), kv_heads), kThreads, 0, native(stream)>>>(job);
  check_launch("expected_attention");
}

}  // namespace

void expected_attention(const FutureQueries& future, ConstTensorView q,
                        std::span<const StoredRows> keys, std::span<double> weights,
                        Stream& stream) {
  Job job = job_of(future, q, keys.size());
  const std::vector<double> rotation = mean_rotation(future, job.n);
  job.keys = uploaded(keys, stream);
  job.frequencies = uploaded(future.frequencies, stream);
  job.rotation = uploaded(std::span<const double>(rotation), stream);
  place_workspace(job, weights.size(), stream);
  launch_all(job, static_cast<unsigned>(keys.size()), stream);
  stream.queue().copy(weights.data(), false, job.weights, true, weights.size_bytes());
}

}  // namespace kvlm::cuda
