#include "kernels/row_moves.h"

#include <fmt/format.h>

#include <cmath>

#include "kernels/base/error.h"
#include "kernels/cpu/row_moves.h"
#include "kernels/cuda/row_moves.h"

namespace kvlm {

namespace {

void check(const char* op, DType dtype, int dim, bool has_floats) {
  const bool floating = dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
  if (!floating || dim < 1 || !has_floats) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: rows of {} numbers of {}, expected f32, f16 or bf16 and memory "
                            "for the floats",
                            op, dim, dtype_name(dtype)));
  }
}

}  // namespace

void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream) {
  if (rows.empty()) return;
  check("widen_rows", dtype, dim, out != nullptr);
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::widen_rows(rows, dtype, dim, out, stream);
  }
  cpu::widen_rows(rows, dtype, dim, out, stream);
}

void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream) {
  if (rows.empty()) return;
  check("narrow_rows", dtype, dim, x != nullptr);
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::narrow_rows(rows, dtype, dim, x, stream);
  }
  cpu::narrow_rows(rows, dtype, dim, x, stream);
}

}  // namespace kvlm
