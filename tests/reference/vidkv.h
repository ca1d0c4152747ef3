#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <numeric>
#include <vector>

#include "tests/reference/quantize.h"

// Independent: what VidKV does beside packing (docs/formulas.md, "VidKV"): which channels are
// packed finer, the spectrum of the others, which rows are protected. Not independent in one point:
// the spectrum's sums are in float and in the order of kernels/key_basis.h, because the real parts
// of spectra that were packed before (onebit=zero_mean) are exactly 0 but for rounding, and their
// signs are coded.
namespace kvlm::reference {

enum class Criterion : uint8_t { kRange, kVariance, kOutliers };

/// How hard numbers are to quantize: most minus least; their variance; how many are beyond three
/// times their mean magnitude.
inline double hardness(const std::vector<double>& x, Criterion criterion) {
  const auto n = static_cast<double>(x.size());
  if (criterion == Criterion::kRange) {
    return *std::max_element(x.begin(), x.end()) - *std::min_element(x.begin(), x.end());
  }
  if (criterion == Criterion::kVariance) {
    const double mean = std::accumulate(x.begin(), x.end(), 0.0) / n;
    double sum = 0;
    for (const double number : x) sum += (number - mean) * (number - mean);
    return sum / n;
  }
  double mean = 0;
  for (const double number : x) mean += std::abs(number) / n;
  return static_cast<double>(
      std::count_if(x.begin(), x.end(), [&](double y) { return std::abs(y) > 3 * mean; }));
}

/// Channels in the order in which keys are packed: the `finer` hardest ones (over every given row
/// of every given head, ties to the smaller), then the others, both ascending.
inline std::vector<size_t> channel_order(const std::vector<Rows>& heads, size_t finer,
                                         Criterion criterion) {
  const size_t dim = heads.front().front().size();
  std::vector<double> range;
  for (size_t d = 0; d < dim; ++d) {
    std::vector<double> numbers;
    for (const Rows& rows : heads) {
      for (const std::vector<float>& row : rows) numbers.push_back(static_cast<double>(row[d]));
    }
    range.push_back(hardness(numbers, criterion));
  }
  std::vector<size_t> order(dim);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return range[a] > range[b]; });
  const auto middle = order.begin() + static_cast<std::ptrdiff_t>(finer);
  std::sort(order.begin(), middle);
  std::sort(middle, order.end());
  return order;
}

/// F_k = sum_j x_j e^{-2 pi i j k / n} of n real numbers as n real numbers: Re_0 .. Re_floor(n/2),
/// then Im_1 .. Im_ceil(n/2)-1.
class Spectrum {
 public:
  explicit Spectrum(size_t n) : n_(n), there_(n * n), back_(n * n) {
    for (size_t i = 0; i < n; ++i) {
      const size_t k = i <= n / 2 ? i : i - n / 2;
      const double twice = k > 0 && 2 * k < n ? 2 : 1;  // the frequency n - k is its conjugate
      for (size_t j = 0; j < n; ++j) {
        const double angle =
            2 * std::numbers::pi * static_cast<double>(j * k % n) / static_cast<double>(n);
        const double wave = i <= n / 2 ? std::cos(angle) : -std::sin(angle);
        there_[i * n + j] = static_cast<float>(wave);
        back_[j * n + i] = static_cast<float>(twice * wave / static_cast<double>(n));
      }
    }
  }
  void transform(float* x) const { multiply(there_, x); }
  void restore(float* x) const { multiply(back_, x); }

 private:
  void multiply(const std::vector<float>& matrix, float* x) const {
    const std::vector<float> from(x, x + n_);
    const size_t whole = n_ / 8 * 8;
    for (size_t row = 0; row < n_; ++row) {
      float sum[9] = {};  // the last: what does not fill eight
      for (size_t j = 0; j < n_; ++j) sum[j < whole ? j % 8 : 8] += matrix[row * n_ + j] * from[j];
      x[row] = ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7])) +
               sum[8];
    }
  }

  size_t n_;
  std::vector<float> there_, back_;
};

/// Keys in the order in which they are packed, those behind the finer channels as a spectrum.
inline void to_packed_channels(const std::vector<size_t>& order, const Spectrum* spectrum,
                               size_t finer, Rows& rows) {
  for (std::vector<float>& row : rows) {
    const std::vector<float> from = row;
    for (size_t i = 0; i < row.size(); ++i) row[i] = from[order[i]];
    if (spectrum != nullptr) spectrum->transform(row.data() + finer);
  }
}
inline void from_packed_channels(const std::vector<size_t>& order, const Spectrum* spectrum,
                                 size_t finer, Rows& rows) {
  for (std::vector<float>& row : rows) {
    if (spectrum != nullptr) spectrum->restore(row.data() + finer);
    const std::vector<float> from = row;
    for (size_t i = 0; i < row.size(); ++i) row[order[i]] = from[i];
  }
}

/// For each visual row the mean of its dot products with the text rows behind the last picture.
inline std::vector<double> protection_scores(const Rows& embeddings,
                                             const std::vector<bool>& visual) {
  size_t after = visual.size();
  while (after > 0 && !visual[after - 1]) --after;
  std::vector<double> scores(visual.size());
  for (size_t i = 0; i < after; ++i) {
    for (size_t j = after; j < visual.size() && visual[i]; ++j) {
      double dot = 0;
      for (size_t d = 0; d < embeddings[i].size(); ++d) {
        dot += static_cast<double>(embeddings[i][d]) * static_cast<double>(embeddings[j][d]);
      }
      scores[i] += dot / static_cast<double>(visual.size() - after);
    }
  }
  return scores;
}

/// A number for each row from splitmix64 of the seed and the row (protect_by=random).
inline std::vector<double> chance_scores(uint64_t seed, size_t rows) {
  const auto word = [](uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  std::vector<double> scores;
  for (uint64_t row = 0; row < rows; ++row) {
    scores.push_back(static_cast<double>(word(word(seed) ^ row) >> 11) * 0x1p-53);
  }
  return scores;
}

/// The round(share n) visual rows of highest score, ascending. As the published code counts: whole
/// groups of 32, of which the last is dropped.
inline std::vector<size_t> protected_rows(const std::vector<double>& scores,
                                          const std::vector<bool>& visual, double share,
                                          bool as_published) {
  std::vector<size_t> rows;
  for (size_t i = 0; i < visual.size(); ++i) {
    if (visual[i]) rows.push_back(i);
  }
  const double wanted = share * static_cast<double>(rows.size());
  auto count = static_cast<size_t>(std::round(wanted));
  if (as_published) {
    count = std::min(rows.size(), std::max<size_t>(32, static_cast<size_t>(wanted) / 32 * 32));
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  rows.resize(count);
  std::sort(rows.begin(), rows.end());
  if (as_published) rows.resize(count > 32 ? count - 32 : 0);
  return rows;
}

}  // namespace kvlm::reference
