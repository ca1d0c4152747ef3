#include "kernels/cuda/attend_packed.h"
#include "kernels/cuda/not_yet.h"

namespace kvlm::cuda {

void attend_packed(std::span<PackedLane>, int, int, float, Stream&) { not_yet("attend_packed"); }

void unpack_blocks(const PackedFormat&, std::span<const PackedBlock>, float*, Stream&) {
  not_yet("unpack_blocks");
}

}  // namespace kvlm::cuda
