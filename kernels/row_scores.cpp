#include "kernels/row_scores.h"

#include <fmt/format.h>

#include <string_view>

#include "kernels/base/error.h"
#include "kernels/cpu/row_scores.h"
#include "kernels/cuda/row_scores.h"

namespace kvlm {

namespace {

template <class... Args>
[[noreturn]] void refuse(std::string_view op, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: {}", op, fmt::format(format, std::forward<Args>(args)...)));
}

void check_rows(std::string_view op, std::span<const StoredRows> heads, int head_dim,
                std::span<const double> result) {
  if (heads.empty() || head_dim < 1) {
    refuse(op, "{} kv heads of {} channels, expected at least one of each", heads.size(), head_dim);
  }
  for (size_t h = 0; h < heads.size(); ++h) {
    const StoredRows& of_head = heads[h];
    if (of_head.dtype != DType::kF32 && of_head.dtype != DType::kF16 &&
        of_head.dtype != DType::kBF16) {
      refuse(op, "kv head {} holds {}, expected f32, f16 or bf16", h, dtype_name(of_head.dtype));
    }
    if (of_head.rows < 1 || of_head.data == nullptr) {
      refuse(op, "kv head {} states {} rows{}, expected at least one and where they are", h,
             of_head.rows, of_head.data == nullptr ? " but not where they are" : "");
    }
    if (of_head.rows != heads[0].rows) {
      refuse(op, "kv head {} has {} rows, expected {} as kv head 0", h, of_head.rows,
             heads[0].rows);
    }
  }
  const size_t expected = heads.size() * static_cast<size_t>(heads[0].rows);
  if (result.size() != expected) {
    refuse(op, "the result has {} entries, expected {}: {} kv heads times {} rows", result.size(),
           expected, heads.size(), heads[0].rows);
  }
}

}  // namespace

void row_norms(std::span<const StoredRows> heads, int head_dim, std::span<double> norms,
               Stream& stream) {
  check_rows("row_norms", heads, head_dim, norms);
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::row_norms(heads, head_dim, norms, stream);
  }
  cpu::row_norms(heads, head_dim, norms, stream);
}

void cosines_to_mean(std::span<const StoredRows> heads, int head_dim, std::span<double> cosines,
                     Stream& stream) {
  check_rows("cosines_to_mean", heads, head_dim, cosines);
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::cosines_to_mean(heads, head_dim, cosines, stream);
  }
  cpu::cosines_to_mean(heads, head_dim, cosines, stream);
}

}  // namespace kvlm
