#include "kernels/attention.h"

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "kernels/base/error.h"

namespace kvlm {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

bool overlap(ConstTensorView a, ConstTensorView b) {
  const std::less<const std::byte*> before;
  return before(a.data(), b.data() + b.bytes()) && before(b.data(), a.data() + a.bytes());
}

void check_rows(const KeyValueRows& rows, const char* what, size_t index) {
  if (!is_float(rows.dtype)) {
    refuse(fmt::format("attention: {} {} holds {} rows; expected f32, f16 or bf16", what, index,
                       dtype_name(rows.dtype)));
  }
  if (rows.rows < 0 || (rows.rows > 0 && (rows.keys == nullptr || rows.values == nullptr))) {
    refuse(fmt::format("attention: {} {} states {} rows but gives no memory for them", what, index,
                       rows.rows));
  }
}

void check_operand(const char* name, ConstTensorView x, ConstTensorView q, const Shape& expected,
                   Device device) {
  if (x.shape() != expected || x.dtype() != q.dtype()) {
    refuse(fmt::format("attention: {} is {} {}; expected {} {}, to fit q {}", name, x.shape().str(),
                       dtype_name(x.dtype()), expected.str(), dtype_name(q.dtype()),
                       q.shape().str()));
  }
  if (x.device() != device || x.empty()) {
    refuse(fmt::format("attention: {} has no memory on {}, where the stream computes", name,
                       device_name(device)));
  }
}

}  // namespace

void attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
               std::span<const KeyValueRows> past, bool causal, float scale, Stream& stream) {
  const bool on_cuda = stream.device().kind == DeviceKind::kCuda;
  if (q.shape().rank() != 3 || k.shape().rank() != 3 || q.elements() == 0 || k.elements() == 0) {
    refuse(
        fmt::format("attention: q is {} and k is {}; expected (n, q_heads, head_dim) and "
                    "(n, kv_heads, head_dim), none of them 0",
                    q.shape().str(), k.shape().str()));
  }
  if (q.dtype() != DType::kF32 && !(on_cuda && is_float(q.dtype()))) {
    refuse(fmt::format("attention: q is {}; on {} it must be f32", dtype_name(q.dtype()),
                       device_name(stream.device())));
  }
  const int64_t n = q.shape()[0];
  const int64_t q_heads = q.shape()[1];
  const int64_t kv_heads = k.shape()[1];
  const int64_t head_dim = q.shape()[2];
  const Shape key_shape{n, kv_heads, head_dim};
  check_operand("q", q, q, q.shape(), stream.device());
  check_operand("out", out, q, q.shape(), stream.device());
  check_operand("k", k, q, key_shape, stream.device());
  check_operand("v", v, q, key_shape, stream.device());
  if (q_heads % kv_heads != 0) {
    refuse(fmt::format("attention: {} query heads cannot share {} kv heads evenly", q_heads,
                       kv_heads));
  }
  if (past.size() % static_cast<size_t>(kv_heads) != 0) {
    refuse(fmt::format("attention: {} past runs cannot be the same number for each of {} kv heads",
                       past.size(), kv_heads));
  }
  for (size_t i = 0; i < past.size(); ++i) check_rows(past[i], "past run", i);
  if (!std::isfinite(scale)) refuse(fmt::format("attention: scale is {}", scale));
  if (overlap(out, k) || overlap(out, v) || (overlap(out, q) && out.data() != q.data())) {
    refuse("attention: out overlaps an operand; it may be q itself, else memory of its own");
  }
  if (on_cuda) return cuda::attention(out, q, k, v, past, causal, scale, stream);
  cpu::attention(out, q, k, v, past, causal, scale, stream);
}

void attend_rows(std::span<const DecodePiece> pieces, int q_per_kv, int head_dim, float scale,
                 Stream& stream) {
  if (q_per_kv < 1 || head_dim < 1 || !std::isfinite(scale)) {
    refuse(
        fmt::format("attend_rows: q_per_kv {}, head_dim {}, scale {}; expected at least 1, at "
                    "least 1 and a finite number",
                    q_per_kv, head_dim, scale));
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    const DecodePiece& piece = pieces[i];
    check_rows(piece.cached, "decode piece", i);
    if (piece.q == nullptr || piece.state.max == nullptr || piece.state.sum == nullptr ||
        piece.state.out == nullptr) {
      refuse(fmt::format("attend_rows: piece {} lacks its query or its state", i));
    }
  }
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::attend_rows(pieces, q_per_kv, head_dim, scale, stream);
  }
  cpu::attend_rows(pieces, q_per_kv, head_dim, scale, stream);
}

void merge_states(float* out, std::span<const SoftmaxState> parts, int queries,
                  int head_dim) noexcept {
  const auto dim = static_cast<size_t>(head_dim);
  for (size_t r = 0; r < static_cast<size_t>(queries); ++r) {
    float max = -std::numeric_limits<float>::infinity();
    for (const SoftmaxState& part : parts) max = std::max(max, part.max[r]);
    float* out_row = out + r * dim;
    float sum = 0;
    bool first = true;  // out may be parts[0].out: it is overwritten by the first part only
    for (const SoftmaxState& part : parts) {
      const bool seen = part.max[r] > -std::numeric_limits<float>::infinity();
      const float weight = seen ? std::exp(part.max[r] - max) : 0.0f;
      const float* part_row = part.out + r * dim;
      sum += weight * part.sum[r];
      if (first) {
        for (size_t d = 0; d < dim; ++d) out_row[d] = weight * part_row[d];
      } else {
        for (size_t d = 0; d < dim; ++d) out_row[d] += weight * part_row[d];
      }
      first = false;
    }
    const float inverse = sum > 0 ? 1 / sum : 0.0f;
    for (size_t d = 0; d < dim; ++d) out_row[d] *= inverse;
  }
}

}  // namespace kvlm
