#include "kernels/cuda/attend_packed.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void unpack_blocks(const PackedFormat&, std::span<const PackedBlock>, float*, Stream&) {
  refuse("unpack_blocks");
}

}  // namespace kvlm::cuda
