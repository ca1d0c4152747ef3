#include "kernels/row_scores.h"

#include <algorithm>
#include <string_view>

#include "kernels/check.h"
#include "kernels/cpu/row_scores.h"
#include "kernels/cuda/importance/row_scores.h"
#include "kernels/elementwise.h"

namespace kvlm {

namespace {

using check::refuse;

/// KV head `h` has `rows` rows, as the first one.
void check_head(std::string_view op, const StoredRows& of_head, size_t h, int64_t rows) {
  if (!check::is_floating(of_head.dtype)) {
    refuse("{}: KV head {} holds {}, expected f32, f16 or bf16", op, h, dtype_name(of_head.dtype));
  }
  if (of_head.rows < 1 || of_head.data == nullptr) {
    refuse("{}: KV head {} claims {} rows{}; expected at least one, and its data", op, h,
           of_head.rows, of_head.data == nullptr ? " but has no data" : "");
  }
  if (of_head.rows != rows) {
    refuse("{}: KV head {} has {} rows, expected {} as in KV head 0", op, h, of_head.rows, rows);
  }
}

void check_rows(std::string_view op, std::span<const StoredRows> heads, int head_dim,
                std::span<const double> result) {
  if (heads.empty() || head_dim < 1) {
    refuse("{}: {} KV heads of {} channels; expected at least one of each", op, heads.size(),
           head_dim);
  }
  for (size_t h = 0; h < heads.size(); ++h) check_head(op, heads[h], h, heads[0].rows);
  const size_t expected = heads.size() * static_cast<size_t>(heads[0].rows);
  if (result.size() != expected) {
    refuse("{}: the result has {} entries, expected {}: {} KV heads times {} rows", op,
           result.size(), expected, heads.size(), heads[0].rows);
  }
}

}  // namespace

void row_norms(std::span<const StoredRows> heads, int head_dim, std::span<double> norms,
               Stream& stream) {
  check_rows("row_norms", heads, head_dim, norms);
  if (check::on_gpu(stream)) return cuda::row_norms(heads, head_dim, norms, stream);
  cpu::row_norms(heads, head_dim, norms, stream);
}

void cosines_to_mean(std::span<const StoredRows> heads, int head_dim, std::span<double> cosines,
                     Stream& stream) {
  check_rows("cosines_to_mean", heads, head_dim, cosines);
  if (check::on_gpu(stream)) return cuda::cosines_to_mean(heads, head_dim, cosines, stream);
  cpu::cosines_to_mean(heads, head_dim, cosines, stream);
}

std::vector<float> rows_on_host(const StoredRows& head, int head_dim, Stream& stream) {
  if (head_dim < 1) refuse("rows_on_host: {} channels, expected at least one", head_dim);
  check_head("rows_on_host", head, 0, head.rows);
  const Shape shape{head.rows, head_dim};
  Tensor rows(head.dtype, shape);
  copy(rows, ConstTensorView(head.data, head.dtype, shape, stream.device()), stream);
  std::vector<float> floats(static_cast<size_t>(shape.elements()));
  const auto widen = [&](const auto* x) {
    std::transform(x, x + floats.size(), floats.begin(),
                   [](auto value) { return to_float(value); });
  };
  if (head.dtype == DType::kF32) widen(rows.as<float>());
  if (head.dtype == DType::kF16) widen(rows.as<f16>());
  if (head.dtype == DType::kBF16) widen(rows.as<bf16>());
  return floats;
}

}  // namespace kvlm
