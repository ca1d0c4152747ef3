#include "kernels/blend_rows.h"

#include <string_view>

#include "kernels/check.h"
#include "kernels/cpu/blend_rows.h"
#include "kernels/cuda/importance/blend_rows.h"

namespace kvlm {

namespace {

constexpr std::string_view kOp = "blend_rows";

void check_terms(const RowBlend& blend) {
  if (blend.terms < 1 || blend.terms > 4 ||
      blend.indices.size() % static_cast<size_t>(blend.terms) != 0 ||
      blend.weights.size() != blend.indices.size()) {
    check::refuse(
        "blend_rows: {} indices and {} weights are not whole rows of {} terms; expected as many of "
        "each, and 1 to 4 terms",
        blend.indices.size(), blend.weights.size(), blend.terms);
  }
}

/// The terms are rows of an x of so many.
void check_indices(const RowBlend& blend, int64_t x_rows) {
  for (size_t i = 0; i < blend.indices.size(); ++i) {
    if (blend.indices[i] < 0 || blend.indices[i] >= x_rows) {
      check::refuse("blend_rows: index {} in row {} is outside the {} rows of x", blend.indices[i],
                    i / static_cast<size_t>(blend.terms), x_rows);
    }
  }
}

}  // namespace

void blend_rows(TensorView y, ConstTensorView x, const RowBlend& blend, Stream& stream) {
  check_terms(blend);
  check::rank(kOp, "x", x, 2, "(entries, dim)");
  check::f32(kOp, "y", y, {static_cast<int64_t>(blend.rows()), x.shape()[1]},
             "a row of x's width per row of the blend", stream);
  check::f32(kOp, "x", x, stream);
  check::disjoint(kOp, "y", y, "x", x);
  check_indices(blend, x.shape()[0]);
  if (y.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::blend_rows(y, x, blend, stream);
  cpu::blend_rows(y, x, blend, stream);
}

}  // namespace kvlm
