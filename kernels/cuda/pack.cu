#include "kernels/cuda/not_yet.h"
#include "kernels/cuda/pack.h"

namespace kvlm::cuda {

void pack(const PackedFormat&, const std::array<PackRule, 2>&, std::span<const PackJob>, Stream&) {
  not_yet("pack");
}

}  // namespace kvlm::cuda
