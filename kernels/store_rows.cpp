#include "kernels/store_rows.h"

#include "kernels/check.h"
#include "kernels/cpu/store_rows.h"
#include "kernels/cuda/table/store_rows.h"

namespace kvlm {

void store_rows(std::span<const RowDestination> destinations, DType dtype, ConstTensorView x,
                Stream& stream) {
  constexpr std::string_view kOp = "store_rows";
  check::rank(kOp, "x", x, 3, "(rows, heads, head_dim)");
  check::f32(kOp, "x", x, {x.shape()[0], static_cast<int64_t>(destinations.size()), x.shape()[2]},
             "one destination per head", stream);
  if (check::on_gpu(stream)) return cuda::store_rows(destinations, dtype, x, stream);
  cpu::store_rows(destinations, dtype, x, stream);
}

}  // namespace kvlm
