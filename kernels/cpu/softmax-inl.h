// The weights of a softmax. Included once per Highway target, after hwy/highway.h.
#if defined(KVLM_KERNELS_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVLM_KERNELS_CPU_SOFTMAX_INL_H_
#undef KVLM_KERNELS_CPU_SOFTMAX_INL_H_
#else
#define KVLM_KERNELS_CPU_SOFTMAX_INL_H_
#endif

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// exp(x) for x <= 0, the weight of a score that is -x below the highest; 0 where exp(x) would be
/// subnormal. No output can show such a weight beside that of the highest, 1, but a product with a
/// subnormal number takes some processors a hundred cycles, and a trained head has many of them.
template <class D>
HWY_INLINE hn::Vec<D> softmax_weight(D d, hn::Vec<D> x) {
  constexpr float kSmallest = -87.33654f;  // exp of it is the smallest normal number, 2^-126
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, kSmallest)), hn::Exp(d, x));  // NaN stays NaN
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
