#include "kernels/sample.h"

#include <cassert>
#include <cmath>
#include <string_view>

#include "kernels/check.h"
#include "kernels/cpu/sample.h"
#include "kernels/cuda/model/sample.h"

namespace kvlm {

namespace {

constexpr std::string_view kOp = "sample_rows";
constexpr int64_t kMaxVocab = 1 << 30;  // ids and what is added to them stay within an int

void check_count(std::string_view name, size_t count, int64_t rows) {
  if (count != static_cast<size_t>(rows)) {
    check::refuse("{}: {} has {} entries, expected {}, the rows of logits", kOp, name, count, rows);
  }
}

void check_row(size_t index, const RowSampling& row) {
  const auto refuse = [&](std::string_view name, double value, std::string_view expected) {
    check::refuse("{}: {} of row {} is {}, expected {}", kOp, name, index, value, expected);
  };
  if (!std::isfinite(row.temperature)) refuse("temperature", row.temperature, "a finite number");
  if (row.top_k < 0) refuse("top_k", row.top_k, "0 or more");
  if (std::isnan(row.top_p)) refuse("top_p", row.top_p, "a number");
  if (!(row.uniform >= 0 && row.uniform < 1)) refuse("uniform", row.uniform, "0 to below 1");
  if (!(row.repetition_penalty > 0 && std::isfinite(row.repetition_penalty))) {
    refuse("repetition_penalty", static_cast<double>(row.repetition_penalty),
           "a finite number above 0");
  }
}

}  // namespace

void sample_rows(std::span<int32_t> ids, TensorView logits, std::span<const RowSampling> rows,
                 Stream& stream) {
  check::rank(kOp, "logits", logits, 2, "(rows, vocab)");
  check::f32(kOp, "logits", logits, stream);
  check_count("ids", ids.size(), logits.shape()[0]);
  check_count("rows", rows.size(), logits.shape()[0]);
  for (size_t i = 0; i < rows.size(); ++i) check_row(i, rows[i]);
  if (rows.empty()) return;
  const int64_t vocab = logits.shape()[1];
  if (vocab < 1 || vocab > kMaxVocab) {
    check::refuse("{}: logits has shape {}, expected 1 to {} logits a row", kOp,
                  logits.shape().str(), kMaxVocab);
  }
  if (check::on_gpu(stream)) return cuda::sample_rows(ids, logits, rows, stream);
  cpu::sample_rows(ids, logits, rows, stream);
}

int32_t sample_row(std::span<float> logits, const RowSampling& row, std::span<int32_t> workspace) {
  assert(!logits.empty() && logits.size() <= static_cast<size_t>(kMaxVocab));
  assert(!row.draws() || workspace.size() >= logits.size());
  return cpu::sample_row(logits, row, workspace);
}

}  // namespace kvlm
