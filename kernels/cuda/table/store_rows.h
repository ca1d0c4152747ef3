#pragma once

#include "kernels/store_rows.h"

namespace kvlm::cuda {

/// kvlm::store_rows on checked arguments.
void store_rows(std::span<const RowDestination> destinations, DType dtype, ConstTensorView x,
                Stream& stream);

}  // namespace kvlm::cuda
