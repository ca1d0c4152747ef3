// Loads and stores of one vector of floats in memory of any of the three float formats. Included
// once per Highway target, after hwy/highway.h.
#if defined(KVLM_KERNELS_CPU_WIDEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVLM_KERNELS_CPU_WIDEN_INL_H_
#undef KVLM_KERNELS_CPU_WIDEN_INL_H_
#else
#define KVLM_KERNELS_CPU_WIDEN_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/base/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::Vec<D> load_wide(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load_wide(D d, const bf16* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

template <class D>
HWY_INLINE hn::Vec<D> load_wide(D d, const f16* from) {
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  // One F16C instruction.
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), bits));
#else
  // Highway's own emulation has neither infinities nor NaN. Scaling by 2^112 corrects the exponent
  // bias, exactly, and makes normal floats of subnormal halves.
  const hn::RebindToSigned<D> d32;  // Highway compares no unsigned numbers on these targets
  const auto wide = hn::PromoteTo(d32, bits);
  const auto sign = hn::ShiftLeft<16>(hn::And(wide, hn::Set(d32, 0x8000)));
  const auto magnitude = hn::And(wide, hn::Set(d32, 0x7fff));
  const auto scaled = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(magnitude)), hn::Set(d, 0x1p112f));
  const auto special = hn::VecFromMask(d32, hn::Gt(magnitude, hn::Set(d32, 0x7bff)));
  const auto exponent = hn::And(special, hn::Set(d32, 0x7f800000));
  return hn::BitCast(d, hn::Or(hn::Or(hn::BitCast(d32, scaled), exponent), sign));
#endif
}

template <class D>
HWY_INLINE void store_narrow(hn::Vec<D> v, D d, float* to) {
  hn::StoreU(v, d, to);
}

/// Rounds to nearest, ties to even; NaN stays NaN.
template <class D>
HWY_INLINE void store_narrow(hn::Vec<D> v, D, bf16* to) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu)));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000u));
  const auto nan = hn::RebindMask(d32, hn::IsNaN(v));
  const auto chosen = hn::IfThenElse(nan, quiet, rounded);
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(chosen)), d16, reinterpret_cast<uint16_t*>(to));
}

template <class D>
HWY_INLINE void store_narrow(hn::Vec<D> v, [[maybe_unused]] D d, f16* to) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  const hn::Rebind<uint16_t, D> d16;
  const auto half = hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v);
  hn::StoreU(hn::BitCast(d16, half), d16, reinterpret_cast<uint16_t*>(to));
#else
  // Highway's own emulation truncates; these targets are too old to matter for speed.
  float lanes[hn::MaxLanes(D())];
  hn::StoreU(v, d, lanes);
  for (size_t i = 0; i < hn::Lanes(d); ++i) to[i] = to_f16(lanes[i]);
#endif
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
