#include "kernels/cuda/attend_packed.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void attend_packed(std::span<PackedLane>, int, int, float, std::byte*, Stream&) {
  refuse("attend_packed");
}

void unpack_blocks(const PackedFormat&, std::span<const PackedBlock>, float*, Stream&) {
  refuse("unpack_blocks");
}

}  // namespace kvlm::cuda
