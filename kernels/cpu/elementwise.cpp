#include "kernels/cpu/elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/elementwise.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class From, class To>
HWY_INLINE void convert_typed(const std::byte* from_bytes, std::byte* to_bytes, size_t count) {
  const hn::ScalableTag<float> d;
  const From* from = reinterpret_cast<const From*>(from_bytes);
  To* to = reinterpret_cast<To*>(to_bytes);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    store_narrow(load_wide(d, from + i), d, to + i);
  }
  for (; i < count; ++i) to[i] = from_float<To>(to_float(from[i]));
}

template <class From>
HWY_INLINE void convert_from(const std::byte* from, std::byte* to, DType to_dtype, size_t count) {
  switch (to_dtype) {
    case DType::kF16:
      return convert_typed<From, f16>(from, to, count);
    case DType::kBF16:
      return convert_typed<From, bf16>(from, to, count);
    default:
      return convert_typed<From, float>(from, to, count);
  }
}

void convert_span(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype,
                  size_t count) {
  switch (from_dtype) {
    case DType::kF16:
      return convert_from<f16>(from, to, to_dtype, count);
    case DType::kBF16:
      return convert_from<bf16>(from, to, to_dtype, count);
    default:
      return convert_from<float>(from, to, to_dtype, count);
  }
}

void add_scaled_span(float* y, const float* x, const float* scale, size_t count) {
  const hn::ScalableTag<float> d;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, x + i), hn::LoadU(d, scale + i), hn::LoadU(d, y + i)), d,
               y + i);
  }
  for (; i < count; ++i) y[i] = std::fma(x[i], scale[i], y[i]);
}

void add_span(float* y, const float* x, size_t count) {
  const hn::ScalableTag<float> d;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    hn::StoreU(hn::Add(hn::LoadU(d, y + i), hn::LoadU(d, x + i)), d, y + i);
  }
  for (; i < count; ++i) y[i] += x[i];
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(convert_span);
HWY_EXPORT(add_span);
HWY_EXPORT(add_scaled_span);

void convert_elements(std::byte* to, DType to_dtype, const std::byte* from, DType from_dtype,
                      size_t count) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, count * dtype_bytes(to_dtype));
    return;
  }
  HWY_DYNAMIC_DISPATCH(convert_span)(from, from_dtype, to, to_dtype, count);
}

void gather_rows(TensorView y, ConstTensorView table, std::span<const int32_t> ids,
                 Stream& stream) {
  const auto dim = static_cast<size_t>(table.shape()[1]);
  const size_t table_row = dim * dtype_bytes(table.dtype());
  const size_t y_row = dim * dtype_bytes(y.dtype());
  for_blocks(stream, ids.size(), dim, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      convert_elements(y.data() + row * y_row, y.dtype(),
                       table.data() + static_cast<size_t>(ids[row]) * table_row, table.dtype(),
                       dim);
    }
  });
}

void add(TensorView y, ConstTensorView x, Stream& stream) {
  for_blocks(stream, static_cast<size_t>(y.elements()), 1, [&](size_t begin, size_t end) {
    HWY_DYNAMIC_DISPATCH(add_span)(y.as<float>() + begin, x.as<float>() + begin, end - begin);
  });
}

void add_scaled(TensorView y, ConstTensorView x, ConstTensorView scale, Stream& stream) {
  const auto dim = static_cast<size_t>(y.shape()[1]);
  for_blocks(stream, static_cast<size_t>(y.shape()[0]), dim, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      HWY_DYNAMIC_DISPATCH(add_scaled_span)
      (y.as<float>() + row * dim, x.as<float>() + row * dim, scale.as<float>(), dim);
    }
  });
}

void convert(TensorView y, ConstTensorView x, Stream& stream) {
  for_blocks(stream, static_cast<size_t>(y.elements()), 1, [&](size_t begin, size_t end) {
    convert_elements(y.data() + begin * dtype_bytes(y.dtype()), y.dtype(),
                     x.data() + begin * dtype_bytes(x.dtype()), x.dtype(), end - begin);
  });
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
