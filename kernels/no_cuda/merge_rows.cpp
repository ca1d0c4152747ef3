#include "kernels/cuda/merge_rows.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void merge_rows(MergeRule, const RowMerge&, Stream&) { refuse("merge_rows"); }

}  // namespace kvlm::cuda
