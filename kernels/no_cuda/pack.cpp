#include "kernels/cuda/pack.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void pack(const PackedFormat&, const std::array<PackRule, 2>&, std::span<const PackJob>, DType,
          Stream&) {
  refuse("pack");
}

}  // namespace kvlm::cuda
