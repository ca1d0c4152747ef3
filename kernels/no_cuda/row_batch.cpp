#include "kernels/cuda/row_batch.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void attend_row_lanes(std::span<const RowLane>, std::span<const KeyValueRows>, int, int, float,
                      Stream&) {
  refuse("RowBatch");
}

}  // namespace kvlm::cuda
