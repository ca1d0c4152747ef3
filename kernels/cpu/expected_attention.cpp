// The attention that keys can expect, a query head a task: its queries before RoPE, their mean and
// covariance, both turned to the positions behind the prompt, what softmax takes of every key, and
// the softmax; then the mean over the query heads of each kv_head.
#include "kernels/cpu/expected_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/matmul.h"

namespace kvlm::cpu {

namespace {

/// Rows that are multiplied at a time.
constexpr size_t kTile = 64;

/// RoPE, turned back: (n, frequencies) cosines, then sines, of every row's position.
struct Angles {
  size_t half = 0;
  std::vector<float> cosines, sines;

  Angles(std::span<const float> frequencies, size_t n) : half(frequencies.size()) {
    for (size_t i = 0; i < n; ++i) {
      for (const float frequency : frequencies) {
        const double angle = static_cast<double>(i) * static_cast<double>(frequency);
        cosines.push_back(static_cast<float>(std::cos(angle)));
        sines.push_back(static_cast<float>(std::sin(angle)));
      }
    }
  }

  /// The query of row i before RoPE.
  void turn_back(const float* q, size_t i, size_t dim, float* out) const {
    std::copy_n(q, dim, out);
    for (size_t f = 0; f < half; ++f) {
      const float c = cosines[i * half + f];
      const float s = sines[i * half + f];
      out[f] = c * q[f] + s * q[f + half];
      out[f + half] = c * q[f + half] - s * q[f];
    }
  }
};

/// The queries of one head.
struct Queries {
  const float* first;
  size_t stride;  // floats from row to row
  size_t from;    // the first row that counts
  size_t n;
  size_t dim;
};

std::vector<double> mean_of(const Queries& queries, const Angles& angles) {
  std::vector<double> mean(queries.dim);
  std::vector<float> row(queries.dim);
  for (size_t i = queries.from; i < queries.n; ++i) {
    angles.turn_back(queries.first + i * queries.stride, i, queries.dim, row.data());
    for (size_t c = 0; c < queries.dim; ++c) mean[c] += static_cast<double>(row[c]);
  }
  for (double& x : mean) x /= static_cast<double>(queries.n - queries.from);
  return mean;
}

/// (dim, dim).
std::vector<double> covariance_of(const Queries& queries, const Angles& angles,
                                  const std::vector<double>& mean) {
  const size_t dim = queries.dim;
  std::vector<double> sums(dim * dim);
  std::vector<float> row(dim);
  std::vector<float> columns(dim * kTile);  // the rows of a tile less the mean, transposed
  std::vector<float> products(dim * dim);
  for (size_t first = queries.from; first < queries.n; first += kTile) {
    const size_t rows = std::min(kTile, queries.n - first);
    for (size_t r = 0; r < rows; ++r) {
      const size_t i = first + r;
      angles.turn_back(queries.first + i * queries.stride, i, dim, row.data());
      for (size_t c = 0; c < dim; ++c) {
        columns[c * kTile + r] = static_cast<float>(static_cast<double>(row[c]) - mean[c]);
      }
    }
    multiply({products.data(), dim}, {columns.data(), kTile}, {columns.data(), kTile}, dim, dim,
             rows, /*add=*/false);
    for (size_t e = 0; e < sums.size(); ++e) sums[e] += static_cast<double>(products[e]);
  }
  for (double& x : sums) x /= static_cast<double>(queries.n - queries.from);
  return sums;
}

/// Turns the vector whose elements lie `stride` apart.
void turn(const std::vector<double>& rotation, double* x, size_t stride) {
  const size_t half = rotation.size() / 2;
  for (size_t f = 0; f < half; ++f) {
    double& a = x[f * stride];
    double& b = x[(f + half) * stride];
    const double turned = rotation[f] * a - rotation[half + f] * b;
    b = rotation[f] * b + rotation[half + f] * a;
    a = turned;
  }
}

/// What softmax takes of one key. `product`, with the covariance, is null if that does not count.
double logit(const float* key, double scale, const std::vector<double>& mean,
             const float* product) {
  double first_order = 0;
  double second_order = 0;
  for (size_t c = 0; c < mean.size(); ++c) {
    const auto x = static_cast<double>(key[c]);
    first_order += x * mean[c];
    if (product != nullptr) second_order += x * static_cast<double>(product[c]);
  }
  return scale * first_order + scale * scale / 2 * second_order;
}

/// The same of every key. `covariance` is empty if it does not count.
void logits(const StoredRows& keys, double scale, const std::vector<double>& mean,
            const std::vector<double>& covariance, double* out) {
  const size_t dim = mean.size();
  const auto n = static_cast<size_t>(keys.rows);
  const std::vector<float> matrix(covariance.begin(), covariance.end());
  std::vector<float> rows(kTile * dim);
  std::vector<float> products(kTile * dim);
  for (size_t first = 0; first < n; first += kTile) {
    const size_t count = std::min(kTile, n - first);
    convert_elements(reinterpret_cast<std::byte*>(rows.data()), DType::kF32,
                     keys.data + first * dim * dtype_bytes(keys.dtype), keys.dtype, count * dim);
    if (!matrix.empty()) {  // symmetric: its own transpose
      multiply({products.data(), dim}, {rows.data(), dim}, {matrix.data(), dim}, count, dim, dim,
               /*add=*/false);
    }
    for (size_t r = 0; r < count; ++r) {
      const float* product = matrix.empty() ? nullptr : products.data() + r * dim;
      out[first + r] = logit(rows.data() + r * dim, scale, mean, product);
    }
  }
}

void softmax(double* x, size_t n) {
  const double most = *std::max_element(x, x + n);
  double sum = 0;
  for (size_t j = 0; j < n; ++j) sum += x[j] = std::exp(x[j] - most);
  for (size_t j = 0; j < n; ++j) x[j] /= sum;
}

/// What a query head expects of `keys`.
void attend_head(const FutureQueries& future, const Queries& queries, const Angles& angles,
                 const std::vector<double>& rotation, const StoredRows& keys, double* out) {
  const size_t dim = queries.dim;
  std::vector<double> mean = mean_of(queries, angles);
  std::vector<double> covariance;
  if (future.covariance) {
    covariance = covariance_of(queries, angles, mean);
    for (size_t c = 0; c < dim; ++c) turn(rotation, covariance.data() + c, dim);
    for (size_t r = 0; r < dim; ++r) turn(rotation, covariance.data() + r * dim, 1);
  }
  turn(rotation, mean.data(), 1);
  logits(keys, static_cast<double>(future.scale), mean, covariance, out);
  std::fill_n(out, queries.from, 0.0);
  softmax(out + queries.from, queries.n - queries.from);
}

}  // namespace

void expected_attention(const FutureQueries& future, ConstTensorView q,
                        std::span<const StoredRows> keys, std::span<double> weights,
                        Stream& stream) {
  const auto n = static_cast<size_t>(q.shape()[0]);
  const auto q_heads = static_cast<size_t>(q.shape()[1]);
  const auto dim = static_cast<size_t>(q.shape()[2]);
  const size_t q_per_kv = q_heads / keys.size();
  const Angles angles(future.frequencies, n);
  const std::vector<double> rotation = mean_rotation(future, static_cast<int64_t>(n));
  std::vector<double> of_heads(q_heads * n);
  stream.pool().parallel_for(q_heads, [&](size_t head, int) {
    const Queries queries{q.as<float>() + head * dim, q_heads * dim,
                          static_cast<size_t>(future.first_row), n, dim};
    attend_head(future, queries, angles, rotation, keys[head / q_per_kv],
                of_heads.data() + head * n);
  });
  for (size_t head = 0; head < keys.size(); ++head) {
    for (size_t j = 0; j < n; ++j) {
      double sum = 0;
      for (size_t h = 0; h < q_per_kv; ++h) sum += of_heads[(head * q_per_kv + h) * n + j];
      weights[head * n + j] = sum / static_cast<double>(q_per_kv);
    }
  }
}

}  // namespace kvlm::cpu
