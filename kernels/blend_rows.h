#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/base/tensor.h"

namespace kvlm {

/// Rows, each a weighted sum of the same small number of others: term k of row r is
/// weights[r * terms + k] times row indices[r * terms + k].
struct RowBlend {
  int terms = 1;
  std::vector<int32_t> indices;  // (rows, terms)
  std::vector<float> weights;    // (rows, terms)

  size_t rows() const noexcept {
    return terms > 0 ? indices.size() / static_cast<size_t>(terms) : 0;
  }
};

/// y[r,:] = sum_k blend.weights[r,k] * x[blend.indices[r,k],:], summed in the order of k and
/// rounded after every product and sum, so that a GPU gives the CPU's bits.
///
///   x      (entries, dim)  f32
///   blend  1 to 4 terms, indices in [0, entries)
///   y      (rows, dim)     f32, apart from x
///
/// Throws Error{kInvalidArgument} on a mismatch or an index outside x.
void blend_rows(TensorView y, ConstTensorView x, const RowBlend& blend, Stream& stream);

}  // namespace kvlm
