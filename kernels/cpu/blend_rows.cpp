#include "kernels/cpu/blend_rows.h"

#include "kernels/cpu/blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/blend_rows.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void blend_row(float* y, const float* x, const int32_t* indices, const float* weights, size_t terms,
               size_t dim) {
  const hn::ScalableTag<float> d;
  const auto row = [&](size_t term) { return x + static_cast<size_t>(indices[term]) * dim; };
  size_t i = 0;
  for (; i + hn::Lanes(d) <= dim; i += hn::Lanes(d)) {
    auto sum = hn::Mul(hn::Set(d, weights[0]), hn::LoadU(d, row(0) + i));
    for (size_t term = 1; term < terms; ++term) {
      sum = hn::Add(sum, hn::Mul(hn::Set(d, weights[term]), hn::LoadU(d, row(term) + i)));
    }
    hn::StoreU(sum, d, y + i);
  }
  for (; i < dim; ++i) {
    float sum = weights[0] * row(0)[i];
    for (size_t term = 1; term < terms; ++term) sum += weights[term] * row(term)[i];
    y[i] = sum;
  }
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(blend_row);

void blend_rows(TensorView y, ConstTensorView x, const RowBlend& blend, Stream& stream) {
  const auto dim = static_cast<size_t>(x.shape()[1]);
  const auto terms = static_cast<size_t>(blend.terms);
  for_blocks(stream, blend.rows(), dim * terms, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      HWY_DYNAMIC_DISPATCH(blend_row)
      (y.as<float>() + row * dim, x.as<float>(), blend.indices.data() + row * terms,
       blend.weights.data() + row * terms, terms, dim);
    }
  });
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
