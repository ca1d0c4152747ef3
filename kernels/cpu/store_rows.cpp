#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/store_rows.cpp"
#include <hwy/foreach_target.h>
// Highway must come after its target loop.
#include <hwy/highway.h>

#include <cstring>

#include "kernels/cpu/store_rows.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void to_f16_row(const float* HWY_RESTRICT from, f16* HWY_RESTRICT to, size_t count) {
  const hn::ScalableTag<float> df;
  const hn::Rebind<hwy::float16_t, decltype(df)> dh;
  auto* out = reinterpret_cast<hwy::float16_t*>(to);
  const size_t lanes = hn::Lanes(df);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::DemoteTo(dh, hn::LoadU(df, from + i)), dh, out + i);
  }
  for (; i < count; ++i) to[i] = kvlm::to_f16(from[i]);
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(to_f16_row);

namespace {

void store_row(const float* from, std::byte* to, DType dtype, size_t count) {
  switch (dtype) {
    case DType::kF16:
      HWY_DYNAMIC_DISPATCH(to_f16_row)(from, reinterpret_cast<f16*>(to), count);
      return;
    case DType::kBF16: {
      auto* out = reinterpret_cast<bf16*>(to);
      for (size_t i = 0; i < count; ++i) out[i] = to_bf16(from[i]);
      return;
    }
    default:
      std::memcpy(to, from, count * sizeof(float));
  }
}

}  // namespace

void store_rows(std::span<const RowDestination> destinations, DType dtype, ConstTensorView x,
                Stream& stream) {
  const auto rows = static_cast<size_t>(x.shape()[0]);
  const auto dim = static_cast<size_t>(x.shape()[2]);
  const size_t heads = destinations.size();
  const size_t row_bytes = dim * dtype_bytes(dtype);
  const float* in = x.as<float>();
  const auto store_head = [&](size_t head, int) {
    std::byte* out = destinations[head].data;
    for (size_t row = 0; row < rows; ++row) {
      store_row(in + (row * heads + head) * dim, out + row * row_bytes, dtype, dim);
    }
  };
  if (rows < 8) {  // a decode step: waking threads would cost more than the copy
    for (size_t head = 0; head < heads; ++head) store_head(head, 0);
  } else {
    stream.pool().parallel_for(heads, store_head);
  }
}

}  // namespace kvlm::cpu
#endif
