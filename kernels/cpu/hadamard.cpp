#include "kernels/cpu/hadamard.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/cpu/blocks.h"

namespace kvlm::cpu {

namespace {

/// The transform of n numbers, a power of two.
void transform(float* x, size_t n) noexcept {
  for (size_t distance = 1; distance < n; distance *= 2) {
    for (size_t first = 0; first < n; first += 2 * distance) {
      float* low = x + first;
      float* high = low + distance;
      for (size_t i = 0; i < distance; ++i) {
        const float sum = low[i] + high[i];
        high[i] = low[i] - high[i];
        low[i] = sum;
      }
    }
  }
  const float scale = 1 / std::sqrt(static_cast<float>(n));
  for (size_t i = 0; i < n; ++i) x[i] *= scale;
}

}  // namespace

void hadamard(std::span<const HadamardRows> rows, Stream& stream) {
  for (const HadamardRows& some : rows) {
    const auto dim = static_cast<size_t>(some.from.shape().back());
    const auto count = static_cast<size_t>(some.from.elements()) / dim;
    const float* from = some.from.as<float>();
    float* to = some.to.as<float>();
    for_blocks(stream, count, dim * static_cast<size_t>(std::bit_width(dim)),
               [&](size_t begin, size_t end) {
                 for (size_t vector = begin; vector < end; ++vector) {
                   float* x = to + vector * dim;
                   if (to != from) std::copy_n(from + vector * dim, dim, x);
                   for (size_t left = dim; left > 0;) {
                     const size_t block = std::bit_floor(left);
                     transform(x, block);
                     x += block;
                     left -= block;
                   }
                 }
               });
  }
}

}  // namespace kvlm::cpu
