#include <vector>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/importance/row_scores.h"

namespace kvlm::cuda {

namespace {

constexpr int kWarps = 4;  // of a block, a row each
constexpr int kThreads = 32 * kWarps;
constexpr int kPartRows = 256;  // whose directions one block adds

struct Rows {
  const StoredRows* heads;  // on the GPU
  int n;
  int dim;
};

/// Row j of a kv_head.
__device__ const std::byte* row_of(const StoredRows& head, int64_t j, int dim) {
  return head.data + j * dim * (head.dtype == DType::kF32 ? 4 : 2);
}

__device__ double sum_of_warp(double x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/// norms[h, j], by a warp.
__global__ void __launch_bounds__(kThreads) find_norms(Rows rows, double* norms) {
  const int j = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);
  if (j >= rows.n) return;
  const StoredRows head = rows.heads[blockIdx.y];
  const std::byte* row = row_of(head, j, rows.dim);
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x % 32); i < rows.dim; i += 32) {
    const auto x = static_cast<double>(element(row, head.dtype, i));
    sum += x * x;
  }
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) norms[static_cast<int64_t>(blockIdx.y) * rows.n + j] = sqrt(sum);
}

/// parts[h, part, :] = the sum of x / |x| over the rows of a part.
__global__ void __launch_bounds__(kThreads)
    add_directions(Rows rows, const double* norms, double* parts) {
  const StoredRows head = rows.heads[blockIdx.y];
  const double* of_head = norms + static_cast<int64_t>(blockIdx.y) * rows.n;
  const int first = static_cast<int>(blockIdx.x) * kPartRows;
  const int last = min(first + kPartRows, rows.n);
  double* part = parts + (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * rows.dim;
  for (int i = static_cast<int>(threadIdx.x); i < rows.dim; i += kThreads) {
    double sum = 0;
    for (int j = first; j < last; ++j) {
      if (!(of_head[j] > 0)) continue;
      sum += static_cast<double>(element(row_of(head, j, rows.dim), head.dtype, i)) / of_head[j];
    }
    part[i] = sum;
  }
}

/// The parts of a kv_head, in order, in the place of the first.
__global__ void __launch_bounds__(kThreads) join_parts(double* parts, int count, int dim) {
  double* mean = parts + static_cast<int64_t>(blockIdx.x) * count * dim;
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) {
    double sum = 0;
    for (int part = 0; part < count; ++part) sum += mean[static_cast<int64_t>(part) * dim + i];
    mean[i] = sum;
  }
}

/// Turns the norm of each row into its cosine with the mean, whose place is that of the first of
/// `count` parts; by a warp.
__global__ void __launch_bounds__(kThreads)
    find_cosines(Rows rows, const double* parts, int count, double* norms) {
  const int j = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);
  if (j >= rows.n) return;
  const StoredRows head = rows.heads[blockIdx.y];
  const std::byte* row = row_of(head, j, rows.dim);
  const double* mean = parts + static_cast<int64_t>(blockIdx.y) * count * rows.dim;
  double product = 0;
  double square = 0;
  for (int i = static_cast<int>(threadIdx.x % 32); i < rows.dim; i += 32) {
    product += static_cast<double>(element(row, head.dtype, i)) * mean[i];
    square += mean[i] * mean[i];
  }
  product = sum_of_warp(product);
  square = sum_of_warp(square);
  if (threadIdx.x % 32 != 0) return;
  double& result = norms[static_cast<int64_t>(blockIdx.y) * rows.n + j];
  const double size = result * sqrt(square);
  result = size > 0 ? product / size : 0;
}

Rows describe(std::span<const StoredRows> heads, int head_dim, Stream& stream) {
  return {
      reinterpret_cast<const StoredRows*>(stream.queue().upload(heads.data(), heads.size_bytes())),
      static_cast<int>(heads[0].rows), head_dim};
}

dim3 warp_grid(std::span<const StoredRows> heads) {
  return {static_cast<unsigned>(ceil_div(heads[0].rows, kWarps)),
          static_cast<unsigned>(heads.size())};
}

}  // namespace

void row_norms(std::span<const StoredRows> heads, int head_dim, std::span<double> norms,
               Stream& stream) {
  auto* found = reinterpret_cast<double*>(stream.queue().scratch(kRowScores, norms.size_bytes()));
  find_norms<<<warp_grid(heads), kThreads, 0, native(stream)>>>(describe(heads, head_dim, stream),
                                                                found);
  check_launch("row_norms");
  stream.queue().copy(norms.data(), false, found, true, norms.size_bytes());
}

void cosines_to_mean(std::span<const StoredRows> heads, int head_dim, std::span<double> cosines,
                     Stream& stream) {
  const auto parts = static_cast<unsigned>(ceil_div(heads[0].rows, kPartRows));
  const size_t sums = heads.size() * parts * static_cast<size_t>(head_dim);
  auto* found = reinterpret_cast<double*>(
      stream.queue().scratch(kRowScores, cosines.size_bytes() + sums * sizeof(double)));
  double* of_parts = found + cosines.size();
  const Rows rows = describe(heads, head_dim, stream);
  const auto kv_heads = static_cast<unsigned>(heads.size());
  find_norms<<<warp_grid(heads), kThreads, 0, native(stream)>>>(rows, found);
  add_directions<<<dim3(parts, kv_heads), kThreads, 0, native(stream)>>>(rows, found, of_parts);
  join_parts<<<kv_heads, kThreads, 0, native(stream)>>>(of_parts, static_cast<int>(parts),
                                                        head_dim);
  find_cosines<<<warp_grid(heads), kThreads, 0, native(stream)>>>(rows, of_parts,
                                                                  static_cast<int>(parts), found);
  check_launch("cosines_to_mean");
  stream.queue().copy(cosines.data(), false, found, true, cosines.size_bytes());
}

}  // namespace kvlm::cuda
