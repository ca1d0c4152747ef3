#include "kernels/rope.h"

#include "kernels/check.h"
#include "kernels/cpu/rope.h"
#include "kernels/cuda/model/rope.h"

namespace kvlm {

namespace {

void check_rotate(TensorView x, ConstTensorView cos, ConstTensorView sin, Stream& stream) {
  constexpr std::string_view kOp = "rotate";
  check::rank(kOp, "x", x, 3, "(rows, heads, head_dim)");
  check::rank(kOp, "cos", cos, 2, "(rows, rotary / 2)");
  check::shape(kOp, "cos", cos, {x.shape()[0], cos.shape()[1]}, "one row of angles per row of x");
  check::shape(kOp, "sin", sin, cos.shape(), "the shape of cos");
  check::f32(kOp, "x", x, stream);
  check::f32(kOp, "cos", cos, stream);
  check::f32(kOp, "sin", sin, stream);
  if (2 * cos.shape()[1] > x.shape()[2]) {
    check::refuse(
        "rotate: {} angles per row rotate {} channels, but a head of x has {}; give at most "
        "head_dim / 2 angles",
        cos.shape()[1], 2 * cos.shape()[1], x.shape()[2]);
  }
}

}  // namespace

void rotate(std::span<const TensorView> xs, ConstTensorView cos, ConstTensorView sin,
            Stream& stream) {
  for (const TensorView& x : xs) check_rotate(x, cos, sin, stream);
  if (cos.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::rotate(xs, cos, sin, stream);
  for (const TensorView& x : xs) {
    if (x.elements() > 0) cpu::rotate(x, cos, sin, stream);
  }
}

}  // namespace kvlm
