#include "kernels/cpu/row_scores.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/elementwise.h"

namespace kvlm::cpu {

namespace {

/// Rows that are widened at a time.
constexpr size_t kTile = 64;

double dot(const float* a, const float* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

/// Calls body(first row, rows, their floats) for the tiles of a head.
template <class Body>
void for_tiles(const StoredRows& of_head, size_t dim, std::vector<float>& floats,
               const Body& body) {
  const auto n = static_cast<size_t>(of_head.rows);
  floats.resize(std::min(n, kTile) * dim);
  for (size_t first = 0; first < n; first += kTile) {
    const size_t rows = std::min(kTile, n - first);
    convert_elements(reinterpret_cast<std::byte*>(floats.data()), DType::kF32,
                     of_head.data + first * dim * dtype_bytes(of_head.dtype), of_head.dtype,
                     rows * dim);
    body(first, rows, floats.data());
  }
}

/// The direction of the mean of a head's rows, whose norms are known: its length does not matter,
/// so the sum is as good.
std::vector<double> sum_of_directions(const StoredRows& of_head, size_t dim, const double* norms) {
  std::vector<float> floats;
  std::vector<double> sum(dim);
  for_tiles(of_head, dim, floats, [&](size_t first, size_t rows, const float* x) {
    for (size_t r = 0; r < rows; ++r, x += dim) {
      const double norm = norms[first + r];
      for (size_t i = 0; norm > 0 && i < dim; ++i) sum[i] += static_cast<double>(x[i]) / norm;
    }
  });
  return sum;
}

}  // namespace

void row_norms(std::span<const StoredRows> heads, int head_dim, std::span<double> norms,
               Stream& stream) {
  const auto dim = static_cast<size_t>(head_dim);
  const auto n = static_cast<size_t>(heads[0].rows);
  stream.pool().parallel_for(heads.size(), [&](size_t head, int) {
    std::vector<float> floats;
    double* of_head = norms.data() + head * n;
    for_tiles(heads[head], dim, floats, [&](size_t first, size_t rows, const float* x) {
      for (size_t r = 0; r < rows; ++r, x += dim) of_head[first + r] = std::sqrt(dot(x, x, dim));
    });
  });
}

void cosines_to_mean(std::span<const StoredRows> heads, int head_dim, std::span<double> cosines,
                     Stream& stream) {
  cpu::row_norms(heads, head_dim, cosines, stream);
  const auto dim = static_cast<size_t>(head_dim);
  const auto n = static_cast<size_t>(heads[0].rows);
  stream.pool().parallel_for(heads.size(), [&](size_t head, int) {
    std::vector<float> floats;
    double* of_head = cosines.data() + head * n;  // norms, until each becomes a cosine
    const std::vector<double> mean = sum_of_directions(heads[head], dim, of_head);
    double length = 0;
    for (const double x : mean) length += x * x;
    length = std::sqrt(length);
    for_tiles(heads[head], dim, floats, [&](size_t first, size_t rows, const float* x) {
      for (size_t r = 0; r < rows; ++r, x += dim) {
        double product = 0;
        for (size_t i = 0; i < dim; ++i) product += static_cast<double>(x[i]) * mean[i];
        const double size = of_head[first + r] * length;
        of_head[first + r] = size > 0 ? product / size : 0;
      }
    });
  });
}

}  // namespace kvlm::cpu
