#include "kernels/hadamard.h"

#include <string_view>

#include "kernels/check.h"
#include "kernels/cpu/hadamard.h"
#include "kernels/cuda/pack/hadamard.h"

namespace kvlm {

namespace {

/// `some` are vectors like those of `first`, which the same call transforms.
void check_vectors(const HadamardRows& some, const ConstTensorView& first, Stream& stream) {
  constexpr std::string_view kOp = "hadamard";
  constexpr int64_t kMostDim = 2048;
  const Shape& shape = some.from.shape();
  if (shape.rank() == 0 || shape.back() < 1 || shape.back() > kMostDim ||
      shape.back() != first.shape().back()) {
    check::refuse(
        "hadamard: vectors of {} numbers in a call with vectors of {}; expected 1 to {}, equal in "
        "every tensor of the call",
        shape.rank() == 0 ? 0 : shape.back(), first.shape().rank() == 0 ? 0 : first.shape().back(),
        kMostDim);
  }
  check::activation(kOp, "from", some.from);
  check::dtype(kOp, "from", some.from, first.dtype());
  check::dtype(kOp, "to", some.to, first.dtype());
  check::shape(kOp, "to", some.to, shape, "as from");
  check::on_stream(kOp, "from", some.from, stream);
  check::on_stream(kOp, "to", some.to, stream);
  if (some.to.data() != some.from.data()) check::disjoint(kOp, "to", some.to, "from", some.from);
}

}  // namespace

void hadamard(std::span<const HadamardRows> rows, Stream& stream) {
  if (rows.empty()) return;
  for (const HadamardRows& some : rows) check_vectors(some, rows[0].from, stream);
  if (check::on_gpu(stream)) return cuda::hadamard(rows, stream);
  cpu::hadamard(rows, stream);
}

}  // namespace kvlm
