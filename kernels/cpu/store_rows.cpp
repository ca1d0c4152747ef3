#include "kernels/cpu/store_rows.h"

#include "kernels/base/thread_pool.h"
#include "kernels/cpu/elementwise.h"

namespace kvlm::cpu {

void store_rows(std::span<const RowDestination> destinations, DType dtype, ConstTensorView x,
                Stream& stream) {
  const auto rows = static_cast<size_t>(x.shape()[0]);
  const auto dim = static_cast<size_t>(x.shape()[2]);
  const size_t heads = destinations.size();
  const size_t row_bytes = dim * dtype_bytes(dtype);
  const auto store_head = [&](size_t head, int) {
    std::byte* out = destinations[head].data;
    for (size_t row = 0; row < rows; ++row) {
      convert_elements(out + row * row_bytes, dtype,
                       x.data() + (row * heads + head) * dim * sizeof(float), DType::kF32, dim);
    }
  };
  if (rows < 8) {  // a decode step: waking threads would cost more than the copy
    for (size_t head = 0; head < heads; ++head) store_head(head, 0);
  } else {
    stream.pool().parallel_for(heads, store_head);
  }
}

}  // namespace kvlm::cpu
