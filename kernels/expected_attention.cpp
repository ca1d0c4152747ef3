#include "kernels/expected_attention.h"

#include <fmt/format.h>

#include <cmath>
#include <string_view>

#include "kernels/base/error.h"
#include "kernels/check.h"
#include "kernels/cpu/expected_attention.h"
#include "kernels/cuda/expected_attention.h"

namespace kvlm {

namespace {

constexpr std::string_view kOp = "expected_attention";

template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: {}", kOp, fmt::format(format, std::forward<Args>(args)...)));
}

void check_future(const FutureQueries& future, int64_t n, int64_t head_dim) {
  if (future.first_row < 0 || future.first_row >= n) {
    refuse("first_row is {}, expected 0 to {}, so that a row of q is left", future.first_row,
           n - 1);
  }
  if (future.positions < 1) refuse("{} positions, expected at least one", future.positions);
  if (2 * future.frequencies.size() > static_cast<size_t>(head_dim)) {
    refuse("{} frequencies rotate {} channels, expected at most {}", future.frequencies.size(),
           2 * future.frequencies.size(), head_dim);
  }
  if (!std::isfinite(future.scale)) {
    refuse("scale is {}, expected a finite number", future.scale);
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
  const int64_t q_heads = q.shape()[1];
  if (q.elements() == 0 || keys.empty()) {
    refuse("q has shape {} and there are {} kv heads, expected at least one number and one head",
           q.shape().str(), keys.size());
  }
  check_future(future, n, q.shape()[2]);
  if (q_heads % static_cast<int64_t>(keys.size()) != 0) {
    refuse("{} query heads cannot share {} kv heads evenly", q_heads, keys.size());
  }
  for (size_t h = 0; h < keys.size(); ++h) {
    if (keys[h].rows != n || keys[h].data == nullptr) {
      refuse("kv head {} has {} keys, expected {}, one for each row of q", h,
             keys[h].data == nullptr ? 0 : keys[h].rows, n);
    }
    if (keys[h].dtype != DType::kF32 && keys[h].dtype != DType::kF16 &&
        keys[h].dtype != DType::kBF16) {
      refuse("kv head {} holds {}, expected f32, f16 or bf16", h, dtype_name(keys[h].dtype));
    }
  }
  if (weights.size() != keys.size() * static_cast<size_t>(n)) {
    refuse("weights has {} entries, expected {} kv heads times {} rows", weights.size(),
           keys.size(), n);
  }
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::expected_attention(future, q, keys, weights, stream);
  }
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
