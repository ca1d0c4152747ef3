#include "kernels/fill.h"

#include <cmath>
#include <string_view>

#include "kernels/check.h"
#include "kernels/cpu/fill.h"
#include "kernels/cuda/device/fill.h"

namespace kvlm {

void fill_random(TensorView out, uint64_t seed, float width, Stream& stream) {
  constexpr std::string_view kOp = "fill_random";
  check::floating(kOp, "out", out, stream);
  if (!std::isfinite(width) || width < 0) {
    check::refuse("{}: width is {}, expected a finite number of at least 0", kOp, width);
  }
  if (out.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::fill_random(out, seed, width, stream);
  cpu::fill_random(out, seed, width, stream);
}

}  // namespace kvlm
