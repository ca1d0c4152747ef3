#include "kernels/cpu/byte_values.h"

#include <algorithm>

#include "kernels/cpu/blocks.h"

namespace kvlm::cpu {

namespace {

/// `to` and `from` are the first of a row; a table has `of_table` columns of it.
template <class To>
void place_row(To* to, const uint8_t* from, const float* values, size_t columns, size_t of_table) {
  for (size_t first = 0; first < columns; first += of_table, values += 256) {
    for (size_t i = first; i < first + of_table; ++i) to[i] = from_float<To>(values[from[i]]);
  }
}

template <class To>
void place(TensorView to, ConstTensorView from, ConstTensorView values, Stream& stream) {
  const auto columns = static_cast<size_t>(from.shape()[1]);
  const auto width = static_cast<size_t>(to.shape()[1]);
  const size_t of_table = columns / static_cast<size_t>(values.shape()[0]);
  for_blocks(stream, static_cast<size_t>(to.shape()[0]), width, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      To* out = reinterpret_cast<To*>(to.data()) + row * width;
      if (columns > 0) {
        place_row(out, from.as<uint8_t>() + row * columns, values.as<float>(), columns, of_table);
      }
      std::fill(out + columns, out + width, To{});
    }
  });
}

}  // namespace

void place_bytes(TensorView to, ConstTensorView from, ConstTensorView values, Stream& stream) {
  switch (to.dtype()) {
    case DType::kF16:
      return place<f16>(to, from, values, stream);
    case DType::kBF16:
      return place<bf16>(to, from, values, stream);
    default:
      return place<float>(to, from, values, stream);
  }
}

}  // namespace kvlm::cpu
