#include "kernels/cpu/rope.h"

#include "kernels/cpu/blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rope.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Rotates `heads` heads of one row by the same `half` angles.
void rotate_row(float* x, size_t heads, size_t head_dim, const float* cos, const float* sin,
                size_t half) {
  const hn::ScalableTag<float> d;
  for (size_t head = 0; head < heads; ++head) {
    float* low = x + head * head_dim;
    float* high = low + half;
    size_t i = 0;
    for (; i + hn::Lanes(d) <= half; i += hn::Lanes(d)) {
      const auto a = hn::LoadU(d, low + i);
      const auto b = hn::LoadU(d, high + i);
      const auto c = hn::LoadU(d, cos + i);
      const auto s = hn::LoadU(d, sin + i);
      hn::StoreU(hn::NegMulAdd(b, s, hn::Mul(a, c)), d, low + i);
      hn::StoreU(hn::MulAdd(a, s, hn::Mul(b, c)), d, high + i);
    }
    for (; i < half; ++i) {
      const float a = low[i];
      const float b = high[i];
      low[i] = a * cos[i] - b * sin[i];
      high[i] = b * cos[i] + a * sin[i];
    }
  }
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(rotate_row);

void rotate(TensorView x, ConstTensorView cos, ConstTensorView sin, Stream& stream) {
  const auto heads = static_cast<size_t>(x.shape()[1]);
  const auto head_dim = static_cast<size_t>(x.shape()[2]);
  const auto half = static_cast<size_t>(cos.shape()[1]);
  for_blocks(stream, static_cast<size_t>(x.shape()[0]), heads * head_dim,
             [&](size_t begin, size_t end) {
               for (size_t row = begin; row < end; ++row) {
                 HWY_DYNAMIC_DISPATCH(rotate_row)
                 (x.as<float>() + row * heads * head_dim, heads, head_dim,
                  cos.as<float>() + row * half, sin.as<float>() + row * half, half);
               }
             });
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
