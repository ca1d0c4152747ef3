#include "kernels/check.h"

#include <cmath>
#include <functional>

namespace kvlm::check {

bool is_floating(DType dtype) noexcept {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

bool on_gpu(const Stream& stream) noexcept { return stream.device().kind == DeviceKind::kCuda; }

void on_stream(std::string_view op, std::string_view name, const ConstTensorView& view,
               const Stream& stream) {
  if (view.device() != stream.device()) {
    refuse("{}: {} is on {} but the stream runs on {}; copy it there first", op, name,
           device_name(view.device()), device_name(stream.device()));
  }
}

void attends_on_cpu(std::string_view op, const Stream& stream) {
  if (stream.device().kind == DeviceKind::kCpu) return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: the stream is on {}, expected the CPU; use a DecodeTable on a GPU",
                          op, device_name(stream.device())));
}

void rank(std::string_view op, std::string_view name, const ConstTensorView& view, int rank,
          std::string_view dims) {
  if (view.shape().rank() != rank) {
    refuse("{}: {} has shape {}, expected {} dimensions {}; reshape it", op, name,
           view.shape().str(), rank, dims);
  }
}

void shape(std::string_view op, std::string_view name, const ConstTensorView& view,
           const Shape& shape, std::string_view reason) {
  if (view.shape() != shape) {
    refuse("{}: {} has shape {}, expected {}, {}", op, name, view.shape().str(), shape.str(),
           reason);
  }
}

void dtype(std::string_view op, std::string_view name, const ConstTensorView& view, DType dtype) {
  if (view.dtype() != dtype) {
    refuse("{}: {} holds {}, expected {}; convert it first", op, name, dtype_name(view.dtype()),
           dtype_name(dtype));
  }
}

void activation(std::string_view op, std::string_view name, const ConstTensorView& view) {
  const bool cpu = view.device().kind == DeviceKind::kCpu;
  if (cpu ? view.dtype() != DType::kF32 : !is_floating(view.dtype())) {
    refuse("{}: {} holds {}, but activations on {} are {}; convert it first", op, name,
           dtype_name(view.dtype()), device_name(view.device()), cpu ? "f32" : "f32, f16 or bf16");
  }
}

void floating(std::string_view op, std::string_view name, const ConstTensorView& view,
              const Stream& stream) {
  if (!is_floating(view.dtype())) {
    refuse("{}: {} holds {}, expected f32, f16 or bf16; convert it first", op, name,
           dtype_name(view.dtype()));
  }
  on_stream(op, name, view, stream);
}

void f32(std::string_view op, std::string_view name, const ConstTensorView& view,
         const Stream& stream) {
  dtype(op, name, view, DType::kF32);
  on_stream(op, name, view, stream);
}

void f32(std::string_view op, std::string_view name, const ConstTensorView& view,
         const Shape& expected, std::string_view reason, const Stream& stream) {
  shape(op, name, view, expected, reason);
  f32(op, name, view, stream);
}

void made_together(std::string_view op, const ConstTensorView& qkv, const Stream& stream) {
  constexpr std::string_view kDims = "(rows, 3, heads, head_dim)";
  rank(op, "qkv", qkv, 4, kDims);
  const Shape& found = qkv.shape();
  shape(op, "qkv", qkv, {found[0], 3, found[2], found[3]}, kDims);
  on_stream(op, "qkv", qkv, stream);
  if (qkv.dtype() != DType::kF16 && qkv.dtype() != DType::kBF16) {
    refuse("{}: qkv holds {}, expected f16 or bf16", op, dtype_name(qkv.dtype()));
  }
}

void decode_sizes(std::string_view op, int q_per_kv, int head_dim, float scale) {
  if (q_per_kv < 1 || head_dim < 1 || !std::isfinite(scale)) {
    refuse(
        "{}: q_per_kv {}, head_dim {} and scale {}; expected two positive numbers and a finite one",
        op, q_per_kv, head_dim, scale);
  }
}

void disjoint(std::string_view op, std::string_view name_a, const ConstTensorView& a,
              std::string_view name_b, const ConstTensorView& b) {
  if (a.bytes() == 0 || b.bytes() == 0) return;
  const std::less<const std::byte*> before;
  if (before(a.data(), b.data() + b.bytes()) && before(b.data(), a.data() + a.bytes())) {
    refuse("{}: {} and {} overlap in memory; give them separate tensors", op, name_a, name_b);
  }
}

void queries_and_keys(std::string_view op, const ConstTensorView& q, const ConstTensorView& k,
                      float scale, DType multiply, const Stream& stream) {
  rank(op, "q", q, 3, "(n, q_heads, head_dim)");
  rank(op, "k", k, 3, "(n, kv_heads, head_dim)");
  const int64_t q_heads = q.shape()[1];
  const int64_t kv_heads = k.shape()[1];
  shape(op, "k", k, {q.shape()[0], kv_heads, q.shape()[2]}, "(n, kv_heads, head_dim) of q");
  if (q.elements() == 0 || k.elements() == 0) {
    refuse("{}: q has shape {} and k {}, expected at least one number in each", op, q.shape().str(),
           k.shape().str());
  }
  if (q_heads % kv_heads != 0) {
    refuse("{}: {} query heads are not a multiple of {} KV heads", op, q_heads, kv_heads);
  }
  f32(op, "q", q, stream);
  f32(op, "k", k, stream);
  if (!std::isfinite(scale)) refuse("{}: scale is {}, expected a finite number", op, scale);
  if (!is_floating(multiply)) {
    refuse("{}: the type to multiply in is {}, expected f32, f16 or bf16", op,
           dtype_name(multiply));
  }
}

void values_and_outputs(std::string_view op, const ConstTensorView& v, const ConstTensorView& out,
                        const ConstTensorView& q, const ConstTensorView& k, const Stream& stream) {
  f32(op, "v", v, k.shape(), "the shape of k", stream);
  f32(op, "out", out, q.shape(), "the shape of q", stream);
  disjoint(op, "out", out, "k", k);
  disjoint(op, "out", out, "v", v);
  if (out.data() != q.data()) disjoint(op, "out", out, "q", q);
}

}  // namespace kvlm::check
