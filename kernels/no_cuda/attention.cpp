#include "kernels/attention.h"

#include "kernels/base/error.h"

namespace kvlm::cuda {

namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnsupported,
              "attention on CUDA is not built in; use --device cpu or build with KVLM_CUDA=ON");
}

}  // namespace

void attention(TensorView, ConstTensorView, ConstTensorView, ConstTensorView,
               std::span<const KeyValueRows>, bool, float, Stream&) {
  refuse();
}

void attend_rows(std::span<const DecodePiece>, int, int, float, Stream&) { refuse(); }

}  // namespace kvlm::cuda
