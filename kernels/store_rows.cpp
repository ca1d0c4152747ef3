#include "kernels/store_rows.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "kernels/cpu/store_rows.h"

namespace kvlm {

void store_rows(std::span<const RowDestination> destinations, DType dtype, ConstTensorView x,
                Stream& stream) {
  if (x.shape().rank() != 3 || x.dtype() != DType::kF32 ||
      x.shape()[1] != static_cast<int64_t>(destinations.size())) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("store_rows: x is {} {}; expected f32 (rows, {}, head_dim)",
                            dtype_name(x.dtype()), x.shape().str(), destinations.size()));
  }
  if (stream.device().kind != DeviceKind::kCpu) {
    throw Error(ErrorCode::kUnsupported, "store_rows: this build has no CUDA; use --device cpu");
  }
  cpu::store_rows(destinations, dtype, x, stream);
}

}  // namespace kvlm
