#include "kernels/cuda/column_sums.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void column_sums(const ColumnSums&, ConstTensorView, ConstTensorView, std::span<const KeyValueRows>,
                 SummedRows, float, DType, Stream&) {
  refuse("column_sums");
}

void queue_column_sums(const QueuedSums&, ConstTensorView, ConstTensorView,
                       std::span<const KeyValueRows>, SummedRows, float, DType, Stream&) {
  refuse("queue_column_sums");
}

void attend_and_sum(const QueuedSums&, TensorView, ConstTensorView, ConstTensorView,
                    ConstTensorView, std::span<const KeyValueRows>, float, DType, Stream&) {
  refuse("attend_and_sum");
}

void mean_over_heads(const double*, int64_t, int64_t, int64_t, double*, Stream&) {
  refuse("mean_over_heads");
}

}  // namespace kvlm::cuda
