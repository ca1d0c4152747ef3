#include "kernels/expected_attention.h"

#include <cmath>
#include <string_view>

#include "kernels/check.h"
#include "kernels/cpu/expected_attention.h"
#include "kernels/cuda/importance/expected_attention.h"

namespace kvlm {

namespace {

constexpr std::string_view kOp = "expected_attention";

using check::refuse;

void check_future(const FutureQueries& future, int64_t n, int64_t head_dim) {
  if (future.first_row < 0 || future.first_row >= n) {
    refuse(
        "expected_attention: first_row is {}, expected 0 to {}, so that at least one row of q "
        "remains",
        future.first_row, n - 1);
  }
  if (future.positions < 1)
    refuse("expected_attention: {} positions, expected at least one", future.positions);
  if (2 * future.frequencies.size() > static_cast<size_t>(head_dim)) {
    refuse("expected_attention: {} frequencies rotate {} channels, expected at most {}",
           future.frequencies.size(), 2 * future.frequencies.size(), head_dim);
  }
  if (!std::isfinite(future.scale)) {
    refuse("expected_attention: scale is {}, expected a finite number", future.scale);
  }
}

/// Every row of q has a key in each of the heads that share its query heads.
void check_keys(std::span<const StoredRows> keys, int64_t n, int64_t q_heads) {
  if (q_heads % static_cast<int64_t>(keys.size()) != 0) {
    refuse("expected_attention: {} query heads are not a multiple of {} KV heads", q_heads,
           keys.size());
  }
  for (size_t h = 0; h < keys.size(); ++h) {
    if (keys[h].rows != n || keys[h].data == nullptr) {
      refuse("expected_attention: KV head {} has {} keys, expected {}, one for each row of q", h,
             keys[h].data == nullptr ? 0 : keys[h].rows, n);
    }
    if (!check::is_floating(keys[h].dtype)) {
      refuse("expected_attention: KV head {} holds {}, expected f32, f16 or bf16", h,
             dtype_name(keys[h].dtype));
    }
  }
}

}  // namespace

void expected_attention(const FutureQueries& future, ConstTensorView q,
                        std::span<const StoredRows> keys, std::span<double> weights,
                        Stream& stream) {
  check::rank(kOp, "q", q, 3, "(n, q_heads, head_dim)");
  check::activation(kOp, "q", q);
  check::on_stream(kOp, "q", q, stream);
  const int64_t n = q.shape()[0];
  if (q.elements() == 0 || keys.empty()) {
    refuse(
        "expected_attention: q has shape {} and there are {} KV heads; expected non-empty "
        "dimensions and at least one head",
        q.shape().str(), keys.size());
  }
  check_future(future, n, q.shape()[2]);
  check_keys(keys, n, q.shape()[1]);
  if (weights.size() != keys.size() * static_cast<size_t>(n)) {
    refuse("expected_attention: weights has {} entries, expected {} KV heads times {} rows",
           weights.size(), keys.size(), n);
  }
  if (check::on_gpu(stream)) return cuda::expected_attention(future, q, keys, weights, stream);
  cpu::expected_attention(future, q, keys, weights, stream);
}

std::vector<double> mean_rotation(const FutureQueries& future, int64_t first_position) {
  std::vector<double> means;
  for (const bool sine : {false, true}) {
    for (const float frequency : future.frequencies) {
      double sum = 0;
      for (int p = 0; p < future.positions; ++p) {
        const double angle =
            static_cast<double>(first_position + p) * static_cast<double>(frequency);
        sum += sine ? std::sin(angle) : std::cos(angle);
      }
      means.push_back(sum / future.positions);
    }
  }
  return means;
}

}  // namespace kvlm
