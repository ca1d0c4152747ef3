#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/base/device.h"
#include "kernels/base/dtype.h"

namespace kvlm {

/// The rows that one kv_head has stored, side by side in memory.
struct StoredRows {
  const std::byte* data = nullptr;  ///< (rows, head_dim) dense, on the stream's device
  DType dtype = DType::kF32;        ///< f32 | f16 | bf16
  int64_t rows = 0;
};

/// norms[h, j] = |x_hj|, the Euclidean norm of row j of kv_head h.
///
///   heads  equally many rows each, at least one
///   norms  (heads, rows) on the host
///
/// In f64. Waits for the result on CUDA. Throws Error{kInvalidArgument} for rows that are missing,
/// of unequal number or of another type, and if `norms` has another size.
void row_norms(std::span<const StoredRows> heads, int head_dim, std::span<double> norms,
               Stream& stream);

/// cosines[h, j] = cos(x_hj, m_h), where m_h is the mean of x_hi / |x_hi| over the rows i of
/// kv_head h. A row of zeros has no direction: it adds nothing to the mean, and its cosine is 0.
/// Otherwise as row_norms().
/// Source: Park et al. 2025, "KeyDiff".
void cosines_to_mean(std::span<const StoredRows> heads, int head_dim, std::span<double> cosines,
                     Stream& stream);

/// (rows, head_dim) of one kv_head on the host, widened to float: for scores that no kernel
/// computes.
///
/// Waits for the copy on CUDA. Throws Error{kInvalidArgument} as row_norms() does.
std::vector<float> rows_on_host(const StoredRows& head, int head_dim, Stream& stream);

}  // namespace kvlm
