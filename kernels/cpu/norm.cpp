#include "kernels/cpu/norm.h"

#include "kernels/cpu/blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// The sum over i of term(x[i]); `term` takes a vector, a short last one is padded with `pad`,
/// whose term is zero.
template <class Term>
HWY_INLINE float sum_terms(const float* x, size_t dim, float pad, const Term& term) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  auto even = hn::Zero(d);
  auto odd = hn::Zero(d);
  size_t i = 0;
  for (; i + 2 * lanes <= dim; i += 2 * lanes) {
    even = hn::Add(even, term(hn::LoadU(d, x + i)));
    odd = hn::Add(odd, term(hn::LoadU(d, x + i + lanes)));
  }
  for (; i < dim; i += lanes) {
    float last[hn::MaxLanes(d)];
    hn::StoreU(hn::Set(d, pad), d, last);
    for (size_t j = 0; j < lanes && i + j < dim; ++j) last[j] = x[i + j];
    even = hn::Add(even, term(hn::LoadU(d, last)));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
}

void rms_norm_row(float* y, const float* x, const float* weight, size_t dim, float eps) {
  const hn::ScalableTag<float> d;
  const float squares = sum_terms(x, dim, 0.0f, [](auto v) HWY_ATTR { return hn::Mul(v, v); });
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(dim) + eps);
  const auto scales = hn::Set(d, scale);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= dim; i += hn::Lanes(d)) {
    const auto normed = hn::Mul(hn::LoadU(d, x + i), scales);
    hn::StoreU(hn::Mul(normed, hn::LoadU(d, weight + i)), d, y + i);
  }
  for (; i < dim; ++i) y[i] = x[i] * scale * weight[i];
}

void layer_norm_row(float* y, const float* x, const float* weight, const float* bias, size_t dim,
                    float eps) {
  const hn::ScalableTag<float> d;
  const float mean =
      sum_terms(x, dim, 0.0f, [](auto v) HWY_ATTR { return v; }) / static_cast<float>(dim);
  const auto means = hn::Set(d, mean);
  const float squares = sum_terms(x, dim, mean, [means](auto v) HWY_ATTR {
    const auto centred = hn::Sub(v, means);
    return hn::Mul(centred, centred);
  });
  const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(dim) + eps);
  const auto scales = hn::Set(d, scale);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= dim; i += hn::Lanes(d)) {
    const auto normed = hn::Mul(hn::Sub(hn::LoadU(d, x + i), means), scales);
    hn::StoreU(hn::MulAdd(normed, hn::LoadU(d, weight + i), hn::LoadU(d, bias + i)), d, y + i);
  }
  for (; i < dim; ++i) y[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(rms_norm_row);
HWY_EXPORT(layer_norm_row);

void rms_norm(TensorView y, ConstTensorView x, ConstTensorView weight, float eps, Stream& stream) {
  const auto dim = static_cast<size_t>(x.shape()[1]);
  for_blocks(stream, static_cast<size_t>(x.shape()[0]), dim, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      HWY_DYNAMIC_DISPATCH(rms_norm_row)
      (y.as<float>() + row * dim, x.as<float>() + row * dim, weight.as<float>(), dim, eps);
    }
  });
}

void layer_norm(TensorView y, ConstTensorView x, ConstTensorView weight, ConstTensorView bias,
                float eps, Stream& stream) {
  const auto dim = static_cast<size_t>(x.shape()[1]);
  for_blocks(stream, static_cast<size_t>(x.shape()[0]), dim, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      HWY_DYNAMIC_DISPATCH(layer_norm_row)
      (y.as<float>() + row * dim, x.as<float>() + row * dim, weight.as<float>(), bias.as<float>(),
       dim, eps);
    }
  });
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
