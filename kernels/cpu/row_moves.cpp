#include "kernels/cpu/row_moves.h"

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/elementwise.h"

namespace kvlm::cpu {

void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream) {
  const auto width = static_cast<size_t>(dim);
  for_blocks(stream, rows.size(), width, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      convert_elements(reinterpret_cast<std::byte*>(out + i * width), DType::kF32, rows[i], dtype,
                       width);
    }
  });
}

void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream) {
  const auto width = static_cast<size_t>(dim);
  for_blocks(stream, rows.size(), width, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      convert_elements(rows[i], dtype, reinterpret_cast<const std::byte*>(x + i * width),
                       DType::kF32, width);
    }
  });
}

}  // namespace kvlm::cpu
