#include "kernels/check.h"

#include <fmt/format.h>

#include <functional>

#include "kernels/base/error.h"

namespace kvlm::check {

namespace {

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...));
}

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

}  // namespace

void on_stream(std::string_view op, std::string_view name, const ConstTensorView& view,
               const Stream& stream) {
  if (view.device() != stream.device()) {
    fail("{}: {} is on {} but the stream runs on {}; copy it there first", op, name,
         device_name(view.device()), device_name(stream.device()));
  }
}

void attends_on_cpu(std::string_view op, const Stream& stream) {
  if (stream.device().kind == DeviceKind::kCpu) return;
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: the stream runs on {}, expected the CPU; attend with a DecodeTable",
                          op, device_name(stream.device())));
}

void rank(std::string_view op, std::string_view name, const ConstTensorView& view, int rank,
          std::string_view dims) {
  if (view.shape().rank() != rank) {
    fail("{}: {} has shape {}, expected {} dimensions {}; reshape it", op, name, view.shape().str(),
         rank, dims);
  }
}

void shape(std::string_view op, std::string_view name, const ConstTensorView& view,
           const Shape& shape, std::string_view reason) {
  if (view.shape() != shape) {
    fail("{}: {} has shape {}, expected {}, {}", op, name, view.shape().str(), shape.str(), reason);
  }
}

void dtype(std::string_view op, std::string_view name, const ConstTensorView& view, DType dtype) {
  if (view.dtype() != dtype) {
    fail("{}: {} holds {}, expected {}; convert it first", op, name, dtype_name(view.dtype()),
         dtype_name(dtype));
  }
}

void activation(std::string_view op, std::string_view name, const ConstTensorView& view) {
  const bool cpu = view.device().kind == DeviceKind::kCpu;
  if (cpu ? view.dtype() != DType::kF32 : !is_float(view.dtype())) {
    fail("{}: {} holds {}, but activations on {} are {}; convert it first", op, name,
         dtype_name(view.dtype()), device_name(view.device()), cpu ? "f32" : "f32, f16 or bf16");
  }
}

void floating(std::string_view op, std::string_view name, const ConstTensorView& view) {
  if (!is_float(view.dtype())) {
    fail("{}: {} holds {}, expected f32, f16 or bf16; convert it first", op, name,
         dtype_name(view.dtype()));
  }
}

void disjoint(std::string_view op, std::string_view name_a, const ConstTensorView& a,
              std::string_view name_b, const ConstTensorView& b) {
  if (a.bytes() == 0 || b.bytes() == 0) return;
  const std::less<const std::byte*> before;
  if (before(a.data(), b.data() + b.bytes()) && before(b.data(), a.data() + a.bytes())) {
    fail("{}: {} and {} overlap in memory; give them separate tensors", op, name_a, name_b);
  }
}

}  // namespace kvlm::check
