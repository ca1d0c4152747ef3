#include "kernels/elementwise.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "kernels/base/queue.h"
#include "kernels/check.h"
#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/quantized_product.h"
#include "kernels/cuda/model/elementwise.h"
#include "kernels/cuda/product/quantized.h"

// Copies, sums and conversions of tensors: checks, then the CPU's or the GPU's implementation.
namespace kvlm {

void gather_rows(TensorView y, const Weight& table, std::span<const int32_t> ids, Stream& stream) {
  constexpr std::string_view kOp = "gather_rows";
  const ConstTensorView entries(table.data(), table.dtype(), table.shape(), table.device());
  check::rank(kOp, "table", entries, 2, "(entries, dim)");
  check::f32(kOp, "y", y, {static_cast<int64_t>(ids.size()), table.shape()[1]},
             "a row of the table per id", stream);
  check::floating(kOp, "table", entries, stream);
  for (size_t row = 0; row < ids.size(); ++row) {
    if (ids[row] < 0 || ids[row] >= table.shape()[0]) {
      check::refuse(
          "gather_rows: id {} at position {} is outside the table of {} entries; check that the "
          "tokenizer belongs to the model",
          ids[row], row, table.shape()[0]);
    }
  }
  if (y.elements() == 0) return;
  if (table.is_quantized()) {
    if (check::on_gpu(stream)) return cuda::gather_rows(y, table.quantized(), ids, stream);
    return cpu::gather_rows(y, table.quantized(), ids, stream);
  }
  if (check::on_gpu(stream)) return cuda::gather_rows(y, table.plain(), ids, stream);
  cpu::gather_rows(y, table.plain(), ids, stream);
}

void copy(TensorView to, ConstTensorView from, Stream& stream) {
  check::shape("copy", "from", from, to.shape(), "the shape of to");
  check::dtype("copy", "from", from, to.dtype());
  if (to.elements() == 0) return;
  if (to.device().kind == DeviceKind::kCpu && from.device().kind == DeviceKind::kCpu) {
    std::memcpy(to.data(), from.data(), to.bytes());
    return;
  }
  check::on_stream("copy", "the tensor on a GPU", to.device().kind == DeviceKind::kCuda ? to : from,
                   stream);
  stream.queue().copy(to.data(), to.device().kind == DeviceKind::kCuda, from.data(),
                      from.device().kind == DeviceKind::kCuda, to.bytes());
}

namespace {

void check_upload(TensorView to, ConstTensorView from, Stream& stream) {
  constexpr std::string_view kOp = "upload_rows";
  check::rank(kOp, "from", from, 2, "(rows, columns)");
  check::rank(kOp, "to", to, 2, "(rows, columns or more)");
  check::dtype(kOp, "from", from, DType::kF32);
  check::floating(kOp, "to", to, stream);
  if (to.shape()[0] != from.shape()[0] || to.shape()[1] < from.shape()[1] ||
      to.device().kind == DeviceKind::kCpu || from.device().kind != DeviceKind::kCpu) {
    check::refuse("{}: rows of shape {} on {} cannot be copied to {} on {}", kOp,
                  from.shape().str(), device_name(from.device()), to.shape().str(),
                  device_name(to.device()));
  }
}

/// Rows of f32 in the format of longer ones, `row_bytes` apart, with zeros behind each.
void convert_rows(std::byte* to, DType dtype, size_t row_bytes, ConstTensorView from,
                  Stream& stream) {
  constexpr int64_t kTaskRows = 64;
  const int64_t rows = from.shape()[0];
  const auto columns = static_cast<size_t>(from.shape()[1]);
  const size_t filled = columns * dtype_bytes(dtype);
  const auto tasks = static_cast<size_t>((rows + kTaskRows - 1) / kTaskRows);
  stream.pool().parallel_for(tasks, [&](size_t task, int) {
    const int64_t begin = static_cast<int64_t>(task) * kTaskRows;
    for (int64_t row = begin; row < std::min(rows, begin + kTaskRows); ++row) {
      std::byte* at = to + static_cast<size_t>(row) * row_bytes;
      cpu::convert_elements(at, dtype, from.slice(row, 1).data(), DType::kF32, columns);
      std::memset(at + filled, 0, row_bytes - filled);
    }
  });
}

}  // namespace

void upload_rows(TensorView to, ConstTensorView from, Stream& stream) {
  check_upload(to, from, stream);
  if (from.elements() == 0) return;
  constexpr size_t kPieceBytes = size_t{2} << 20;  // the GPU copies one while we convert the next
  const size_t row_bytes = static_cast<size_t>(to.shape()[1]) * dtype_bytes(to.dtype());
  const auto in_piece = static_cast<int64_t>(std::max<size_t>(1, kPieceBytes / row_bytes));
  int64_t rows = 0;
  for (int64_t first = 0; first < from.shape()[0]; first += rows) {
    // The first is small: nothing is copied while it is converted.
    rows = std::min(first == 0 ? (in_piece + 3) / 4 : in_piece, from.shape()[0] - first);
    const size_t bytes = static_cast<size_t>(rows) * row_bytes;
    std::byte* staged = stream.queue().stage(bytes);
    convert_rows(staged, to.dtype(), row_bytes, from.slice(first, rows), stream);
    stream.queue().send(to.slice(first, rows).data(), staged, bytes);
  }
}

void add(TensorView y, ConstTensorView x, Stream& stream) {
  check::f32("add", "x", x, y.shape(), "the shape of y", stream);
  check::f32("add", "y", y, stream);
  if (y.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::add(y, x, stream);
  cpu::add(y, x, stream);
}

void add_scaled(TensorView y, ConstTensorView x, ConstTensorView scale, Stream& stream) {
  constexpr std::string_view kOp = "add_scaled";
  check::rank(kOp, "y", y, 2, "(rows, dim)");
  check::f32(kOp, "x", x, y.shape(), "the shape of y", stream);
  check::f32(kOp, "scale", scale, {y.shape()[1]}, "(dim,) of y", stream);
  check::f32(kOp, "y", y, stream);
  check::disjoint(kOp, "y", y, "scale", scale);
  if (y.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::add_scaled(y, x, scale, stream);
  cpu::add_scaled(y, x, scale, stream);
}

void convert(TensorView y, ConstTensorView x, Stream& stream) {
  check::shape("convert", "x", x, y.shape(), "the shape of y");
  check::floating("convert", "y", y, stream);
  check::floating("convert", "x", x, stream);
  check::disjoint("convert", "y", y, "x", x);
  if (y.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::convert(y, x, stream);
  cpu::convert(y, x, stream);
}

}  // namespace kvlm
