#include "kernels/cuda/slot_weights.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void add_slot_weights(std::span<const SlotWeights>, int, Stream&) { refuse("add_slot_weights"); }

void mean_arrays(std::span<const float* const>, std::span<const MeanJob>, Stream&) {
  refuse("mean_arrays");
}

}  // namespace kvlm::cuda
