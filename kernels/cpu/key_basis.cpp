#include "kernels/cpu/key_basis.h"

#include <limits>

#include "kernels/cpu/blocks.h"

namespace kvlm::cpu {

namespace {

constexpr size_t kMaxDim = 1024;

/// to = matrix . x, n numbers.
void multiply(const float* matrix, size_t n, const float* x, float* to) noexcept {
  for (size_t row = 0; row < n; ++row) {
    const float* weights = matrix + row * n;
    // Eight sums side by side: the compiler may not reorder one.
    float sum[8] = {};
    size_t j = 0;
    for (; j + 8 <= n; j += 8) {
      for (size_t i = 0; i < 8; ++i) sum[i] += weights[j + i] * x[j + i];
    }
    float rest = 0;
    for (; j < n; ++j) rest += weights[j] * x[j];
    to[row] =
        ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7])) + rest;
  }
}

void change_row(const KeyBasis& basis, BasisChange change, const uint16_t* channels,
                const float* from, float* to) noexcept {
  const auto dim = static_cast<size_t>(basis.dim);
  const auto first = static_cast<size_t>(basis.first);
  const std::vector<float>& matrix = basis.matrix[static_cast<size_t>(change)];
  float row[kMaxDim];
  if (change == BasisChange::kBack) {
    std::copy_n(from, dim, row);
    if (!matrix.empty()) multiply(matrix.data(), dim - first, from + first, row + first);
    for (size_t i = 0; i < dim; ++i) to[channels[i]] = row[i];
    return;
  }
  for (size_t i = 0; i < dim; ++i) row[i] = from[channels[i]];
  std::copy_n(row, dim, to);
  if (!matrix.empty()) multiply(matrix.data(), dim - first, row + first, to + first);
}

}  // namespace

void change_basis(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                  Stream& stream) {
  const auto dim = static_cast<size_t>(basis.dim);
  const size_t cost = dim + basis.matrix[static_cast<size_t>(change)].size();
  for (const BasisJob& job : jobs) {
    for_blocks(stream, static_cast<size_t>(job.rows), cost, [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end; ++row) {
        change_row(basis, change, job.channels, job.from + row * dim, job.to + row * dim);
      }
    });
  }
}

void channel_ends(std::span<const float* const> x, int rows, int dim, std::span<float> low,
                  std::span<float> high, Stream& stream) {
  const auto width = static_cast<size_t>(dim);
  const auto count = static_cast<size_t>(rows);
  for_blocks(stream, x.size(), count * width, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      float* least = low.data() + i * width;
      float* most = high.data() + i * width;
      std::fill_n(least, width, std::numeric_limits<float>::infinity());
      std::fill_n(most, width, -std::numeric_limits<float>::infinity());
      for (size_t row = 0; row < count; ++row) {
        for (size_t d = 0; d < width; ++d) {
          const float value = x[i][row * width + d];
          least[d] = std::min(least[d], value);
          most[d] = std::max(most[d], value);
        }
      }
    }
  });
}

}  // namespace kvlm::cpu
