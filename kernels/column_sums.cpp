// Sums of attention over query rows, beside attention or by themselves, and their means over KV
// heads. Arguments are checked here; the sums are made in the files of this name in cpu/ and cuda/,
// and the CPU's means here.
#include "kernels/column_sums.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/base/error.h"
#include "kernels/check.h"
#include "kernels/cpu/column_sums.h"
#include "kernels/cuda/importance/column_sums.h"

namespace kvlm {

namespace {

template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kInvalidArgument,
              "column_sums: " + fmt::format(format, std::forward<Args>(args)...));
}

/// Past rows of one kv_head, the same for all of them.
int64_t check_past(std::span<const KeyValueRows> past, int64_t kv_heads) {
  if (past.size() % static_cast<size_t>(kv_heads) != 0) {
    refuse("{} cached segments cannot be split evenly over {} KV heads", past.size(), kv_heads);
  }
  const size_t runs = past.size() / static_cast<size_t>(kv_heads);
  int64_t first_rows = 0;
  for (size_t head = 0; head < static_cast<size_t>(kv_heads); ++head) {
    int64_t rows = 0;
    for (size_t i = head * runs; i < (head + 1) * runs; ++i) {
      const KeyValueRows& run = past[i];
      if (!check::is_floating(run.dtype)) {
        refuse("segment {} of the cache holds {}, expected f32, f16 or bf16", i,
               dtype_name(run.dtype));
      }
      if (run.rows < 0 || (run.rows > 0 && run.keys == nullptr)) {
        refuse("segment {} claims {} cached tokens but has no keys", i, run.rows);
      }
      rows += run.rows;
    }
    if (head == 0) first_rows = rows;
    if (rows != first_rows) {
      refuse("KV head {} has {} cached tokens, expected {} as in KV head 0", head, rows,
             first_rows);
    }
  }
  return first_rows;
}

/// Returns the columns that there are to sum.
int64_t check_operands(ConstTensorView q, ConstTensorView k, std::span<const KeyValueRows> past,
                       std::span<const double> small_entries, SummedRows rows, float scale,
                       DType multiply, const Stream& stream) {
  check::queries_and_keys("column_sums", q, k, scale, multiply, stream);
  const int64_t n = q.shape()[0];
  const int64_t q_heads = q.shape()[1];
  const int64_t columns = check_past(past, k.shape()[1]) + n;
  if (!small_entries.empty() && small_entries.size() != static_cast<size_t>(q_heads)) {
    refuse("small_entries has {} entries, expected none or {}, the query heads",
           small_entries.size(), q_heads);
  }
  if (rows.first < 0 || rows.first >= n) {
    refuse("first_row is {}, expected 0 to {}, the last row of q", rows.first, n - 1);
  }
  if (!(rows.newest_weight >= 0) || !std::isfinite(rows.newest_weight)) {
    refuse("the weight of the newest token is {}, expected a finite number of at least 0",
           rows.newest_weight);
  }
  return columns;
}

void check_values(std::span<const KeyValueRows> past) {
  for (size_t i = 0; i < past.size(); ++i) {
    if (past[i].rows > 0 && past[i].values == nullptr) {
      refuse("segment {} claims {} cached tokens but has no values", i, past[i].rows);
    }
  }
}

void check_result(const QueuedSums& result, int64_t columns) {
  if (result.sums == nullptr || result.stride < columns || result.held < 0 ||
      result.held > columns) {
    refuse("sums have rows of {}, of which {} are used; expected space for {} columns",
           result.stride, result.held, columns);
  }
}

}  // namespace

void column_sums(const QueuedSums& result, ConstTensorView q, ConstTensorView k,
                 std::span<const KeyValueRows> past, SummedRows rows, float scale, DType multiply,
                 Stream& stream) {
  check_result(result,
               check_operands(q, k, past, result.small_entries, rows, scale, multiply, stream));
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::column_sums(result, q, k, past, rows, scale, multiply, stream);
  }
  cpu::column_sums(result, q, k, past, rows, scale, stream);
}

void attend_and_sum(const QueuedSums& result, TensorView out, ConstTensorView q, ConstTensorView k,
                    ConstTensorView v, std::span<const KeyValueRows> past, SummedRows rows,
                    float scale, DType multiply, Stream& stream) {
  constexpr bool kCausal = true;
  check_result(result,
               check_operands(q, k, past, result.small_entries, rows, scale, multiply, stream));
  check::values_and_outputs("attend_and_sum", v, out, q, k, stream);
  check_values(past);
  const bool alike = rows.first == 0 && rows.newest_weight == 1 && rows.received == nullptr &&
                     result.small_entries.empty();
  if (!alike || multiply == DType::kF32 || stream.device().kind != DeviceKind::kCuda) {
    // In this order: attention may write where the queries are.
    column_sums(result, q, k, past, rows, scale, multiply, stream);
    return attention(out, q, k, v, past, kCausal, scale, multiply, stream);
  }
  cuda::attend_and_sum(result, out, q, k, v, past, scale, multiply, stream);
}

void mean_over_heads(const double* sums, int64_t layers, int64_t kv_heads, int64_t columns,
                     double* means, Stream& stream) {
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::mean_over_heads(sums, layers, kv_heads, columns, means, stream);
  }
  std::fill(means, means + layers * columns, 0.0);
  for (int64_t layer = 0; layer < layers; ++layer) {
    double* to = means + layer * columns;
    for (int64_t head = 0; head < kv_heads; ++head, sums += columns) {
      for (int64_t j = 0; j < columns; ++j) to[j] += sums[j];
    }
    for (int64_t j = 0; j < columns; ++j) to[j] /= static_cast<double>(kv_heads);
  }
}

}  // namespace kvlm
