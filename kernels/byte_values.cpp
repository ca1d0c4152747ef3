#include "kernels/byte_values.h"

#include <string_view>

#include "kernels/check.h"
#include "kernels/cpu/byte_values.h"
#include "kernels/cuda/pack/byte_values.h"

namespace kvlm {

namespace {

void check_bytes(TensorView to, ConstTensorView from, ConstTensorView values, Stream& stream) {
  constexpr std::string_view kOp = "place_bytes";
  check::rank(kOp, "from", from, 2, "(rows, columns)");
  check::rank(kOp, "values", values, 2, "(groups, 256)");
  check::rank(kOp, "to", to, 2, "(rows, columns or more)");
  check::dtype(kOp, "from", from, DType::kU8);
  check::dtype(kOp, "values", values, DType::kF32);
  check::floating(kOp, "to", to, stream);
  const int64_t groups = values.shape()[0];
  check::shape(kOp, "values", values, {groups, 256}, "a value for each byte");
  const int64_t columns = from.shape()[1];
  if (to.shape()[0] != from.shape()[0] || to.shape()[1] < columns || groups == 0 ||
      columns % groups != 0 || from.device().kind != DeviceKind::kCpu ||
      values.device().kind != DeviceKind::kCpu) {
    check::refuse(
        "{}: bytes of shape {} on {} cannot be converted to {} with {} tables on {}; expected "
        "equal rows, no fewer columns, a number of tables that divides the columns, and bytes and "
        "tables on the CPU",
        kOp, from.shape().str(), device_name(from.device()), to.shape().str(), groups,
        device_name(values.device()));
  }
}

}  // namespace

void place_bytes(TensorView to, ConstTensorView from, ConstTensorView values, Stream& stream) {
  check_bytes(to, from, values, stream);
  if (to.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::place_bytes(to, from, values, stream);
  cpu::place_bytes(to, from, values, stream);
}

}  // namespace kvlm
