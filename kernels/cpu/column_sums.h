#pragma once

#include "kernels/column_sums.h"

namespace kvlm::cpu {

/// kvlm::column_sums on checked arguments.
void column_sums(const QueuedSums& result, ConstTensorView q, ConstTensorView k,
                 std::span<const KeyValueRows> past, SummedRows rows, float scale, Stream& stream);

}  // namespace kvlm::cpu
