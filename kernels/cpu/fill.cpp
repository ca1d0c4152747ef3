#include "kernels/cpu/fill.h"

#include "kernels/cpu/blocks.h"
#include "kernels/fill.h"

namespace kvlm::cpu {

namespace {

template <class T>
void fill(T* out, uint64_t seed, float width, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) out[i] = from_float<T>(random_value(seed, i, width));
}

}  // namespace

void fill_random(TensorView out, uint64_t seed, float width, Stream& stream) {
  for_blocks(stream, static_cast<size_t>(out.elements()), 1, [&](size_t begin, size_t end) {
    switch (out.dtype()) {
      case DType::kF16:
        return fill(out.as<f16>(), seed, width, begin, end);
      case DType::kBF16:
        return fill(out.as<bf16>(), seed, width, begin, end);
      default:
        return fill(out.as<float>(), seed, width, begin, end);
    }
  });
}

}  // namespace kvlm::cpu
