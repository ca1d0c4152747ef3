#pragma once

#include "kernels/base/tensor.h"

namespace kvlm {

/// Queries, keys and values of a layer: (rows, heads, head_dim) each.
struct QkvRows {
  ConstTensorView q;  ///< may be empty: no attention is computed
  ConstTensorView k;
  ConstTensorView v;

  QkvRows slice(int64_t first, int64_t rows) const {
    return {q.empty() ? q : q.slice(first, rows), k.slice(first, rows), v.slice(first, rows)};
  }
};

}  // namespace kvlm
