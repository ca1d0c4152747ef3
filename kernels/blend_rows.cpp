#include "kernels/blend_rows.h"

#include <fmt/format.h>

#include <string_view>

#include "kernels/base/error.h"
#include "kernels/check.h"
#include "kernels/cpu/blend_rows.h"
#include "kernels/cuda/blend_rows.h"

namespace kvlm {

void blend_rows(TensorView y, ConstTensorView x, const RowBlend& blend, Stream& stream) {
  constexpr std::string_view kOp = "blend_rows";
  const auto terms = static_cast<size_t>(blend.terms);
  if (blend.terms < 1 || blend.terms > 4 || blend.indices.size() % terms != 0 ||
      blend.weights.size() != blend.indices.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("blend_rows: {} indices and {} weights are not whole rows of {} terms; "
                            "expected as many of each, and 1 to 4 terms",
                            blend.indices.size(), blend.weights.size(), blend.terms));
  }
  check::rank(kOp, "x", x, 2, "(entries, dim)");
  check::shape(kOp, "y", y, {static_cast<int64_t>(blend.rows()), x.shape()[1]},
               "a row of x's width per row of the blend");
  check::dtype(kOp, "x", x, DType::kF32);
  check::dtype(kOp, "y", y, DType::kF32);
  check::on_stream(kOp, "x", x, stream);
  check::on_stream(kOp, "y", y, stream);
  check::disjoint(kOp, "y", y, "x", x);
  for (size_t i = 0; i < blend.indices.size(); ++i) {
    if (blend.indices[i] < 0 || blend.indices[i] >= x.shape()[0]) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("blend_rows: index {} in row {} is outside the {} rows of x",
                              blend.indices[i], i / terms, x.shape()[0]));
    }
  }
  if (y.elements() == 0) return;
  if (stream.device().kind == DeviceKind::kCuda) return cuda::blend_rows(y, x, blend, stream);
  cpu::blend_rows(y, x, blend, stream);
}

}  // namespace kvlm
