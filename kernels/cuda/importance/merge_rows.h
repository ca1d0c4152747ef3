#pragma once

#include "kernels/merge_rows.h"

// CUDA's implementation of kernels/merge_rows.h, which has checked the arguments.
namespace kvlm::cuda {

void merge_rows(MergeRule rule, const RowMerge& merge, Stream& stream);

}  // namespace kvlm::cuda
