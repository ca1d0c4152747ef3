#include "kernels/cpu/activation.h"

#include "kernels/cpu/blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/activation.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

/// x / (1 + exp(-z)), that is x * sigmoid(z). A NaN in x gives NaN.
HWY_INLINE V times_sigmoid(V x, V z) {
  const D d;
  // Highway's Exp is not defined far beyond its overflow; exp(89) is infinite in float already.
  const V e = hn::Exp(d, hn::Min(hn::Neg(z), hn::Set(d, 89.0f)));
  return hn::Div(x, hn::Add(hn::Set(d, 1.0f), e));
}

struct QuickGelu {
  HWY_INLINE V operator()(V x) const { return times_sigmoid(x, hn::Mul(x, hn::Set(D(), 1.702f))); }
};

struct Silu {
  HWY_INLINE V operator()(V x) const { return times_sigmoid(x, x); }
};

/// x/2 (1 + tanh u) = x sigmoid(2u), which does not cancel for negative u.
struct GeluTanh {
  HWY_INLINE V operator()(V x) const {
    const D d;
    const V cubic = hn::MulAdd(hn::Mul(x, x), hn::Set(d, 0.044715f), hn::Set(d, 1.0f));
    return times_sigmoid(x, hn::Mul(hn::Mul(x, hn::Set(d, 1.5957691216f)), cubic));
  }
};

/// x Phi(x), Phi the normal distribution. With a = |x|, Phi(-a) = exp(-a^2/2) Q(a), where Q falls
/// slowly and smoothly from 1/2 as 1/(a sqrt(2 pi)); so t P(t) with t = 1/(1 + 0.35 a) and P of
/// degree 8 fits it to 3.2e-8 relative for a <= 14.5, beyond which the result is zero in float. (P:
/// least squares with Lawson's weights on Chebyshev nodes, against erfc in 40 digits.)
struct Gelu {
  HWY_INLINE V operator()(V x) const {
    const D d;
    const V one = hn::Set(d, 1.0f);
    // Beyond 15 the lower tail is zero in float; the bound keeps the square finite.
    const V a = hn::Min(hn::Abs(x), hn::Set(d, 15.0f));
    const V t = hn::Div(one, hn::MulAdd(a, hn::Set(d, 0.35f), one));
    V p = hn::Set(d, -0.02915803f);
    p = hn::MulAdd(p, t, hn::Set(d, 0.14403161f));
    p = hn::MulAdd(p, t, hn::Set(d, -0.25584042f));
    p = hn::MulAdd(p, t, hn::Set(d, 0.1593213f));
    p = hn::MulAdd(p, t, hn::Set(d, -0.02321341f));
    p = hn::MulAdd(p, t, hn::Set(d, 0.105552934f));
    p = hn::MulAdd(p, t, hn::Set(d, 0.11982118f));
    p = hn::MulAdd(p, t, hn::Set(d, 0.13986352f));
    p = hn::MulAdd(p, t, hn::Set(d, 0.1396213f));
    // exp(-a^2/2) from the rounded square and its rounding error: in the tail the exponent is large
    // and half an ulp of it would show.
    const V square = hn::Mul(a, a);
    const V error = hn::MulSub(a, a, square);
    const V half = hn::Set(d, 0.5f);
    const V gauss = hn::Exp(d, hn::Neg(hn::Mul(square, half)));
    const V corrected = hn::NegMulAdd(gauss, hn::Mul(error, half), gauss);
    const V lower = hn::Mul(hn::Mul(p, t), corrected);
    const V phi = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), lower, hn::Sub(one, lower));
    return hn::Mul(x, phi);
  }
};

template <class F>
HWY_INLINE void apply(float* y, const float* x, size_t count, const F& f) {
  const D d;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    hn::StoreU(f(hn::LoadU(d, x + i)), d, y + i);
  }
  if (i == count) return;
  float last[hn::MaxLanes(d)] = {};
  for (size_t j = i; j < count; ++j) last[j - i] = x[j];
  hn::StoreU(f(hn::LoadU(d, last)), d, last);
  for (size_t j = i; j < count; ++j) y[j] = last[j - i];
}

template <class F>
HWY_INLINE void apply_gate(float* y, const float* gate, const float* up, size_t count, const F& f) {
  const D d;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    hn::StoreU(hn::Mul(f(hn::LoadU(d, gate + i)), hn::LoadU(d, up + i)), d, y + i);
  }
  if (i == count) return;
  float last[hn::MaxLanes(d)] = {};
  for (size_t j = i; j < count; ++j) last[j - i] = gate[j];
  hn::StoreU(f(hn::LoadU(d, last)), d, last);
  for (size_t j = i; j < count; ++j) y[j] = last[j - i] * up[j];
}

void activate_span(float* y, const float* x, size_t count, Activation activation) {
  switch (activation) {
    case Activation::kQuickGelu:
      return apply(y, x, count, QuickGelu());
    case Activation::kGelu:
      return apply(y, x, count, Gelu());
    case Activation::kGeluTanh:
      return apply(y, x, count, GeluTanh());
    case Activation::kSilu:
      return apply(y, x, count, Silu());
  }
}

void activate_gate_span(float* y, const float* gate, const float* up, size_t count,
                        Activation activation) {
  switch (activation) {
    case Activation::kQuickGelu:
      return apply_gate(y, gate, up, count, QuickGelu());
    case Activation::kGelu:
      return apply_gate(y, gate, up, count, Gelu());
    case Activation::kGeluTanh:
      return apply_gate(y, gate, up, count, GeluTanh());
    case Activation::kSilu:
      return apply_gate(y, gate, up, count, Silu());
  }
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(activate_span);
HWY_EXPORT(activate_gate_span);

void activate(TensorView y, ConstTensorView x, Activation activation, Stream& stream) {
  constexpr size_t kCost = 2;  // elements of an addition that one activation is worth
  for_blocks(stream, static_cast<size_t>(x.elements()), kCost, [&](size_t begin, size_t end) {
    HWY_DYNAMIC_DISPATCH(activate_span)
    (y.as<float>() + begin, x.as<float>() + begin, end - begin, activation);
  });
}

void activate_gate(TensorView y, ConstTensorView gate, ConstTensorView up, Activation activation,
                   Stream& stream) {
  constexpr size_t kCost = 2;
  for_blocks(stream, static_cast<size_t>(gate.elements()), kCost, [&](size_t begin, size_t end) {
    HWY_DYNAMIC_DISPATCH(activate_gate_span)
    (y.as<float>() + begin, gate.as<float>() + begin, up.as<float>() + begin, end - begin,
     activation);
  });
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
