#include "kernels/tile_rows.h"

#include <cstring>

#include "kernels/check.h"
#include "kernels/cuda/model/tile_rows.h"

namespace kvlm {

namespace {

void check_rows(std::string_view op, std::string_view name, ConstTensorView rows, Stream& stream) {
  check::rank(op, name, rows, 2, "(rows, dim)");
  check::f32(op, name, rows, stream);
}

[[noreturn]] void refuse_tiles(std::string_view op, int64_t rows, int64_t in_tile) {
  check::refuse("{}: {} rows are not whole tiles of {} rows each", op, rows, in_tile);
}

/// scatter_tiles() on the CPU.
void scatter(TensorView x, ConstTensorView patches, ConstTensorView class_token,
             ConstTensorView positions) {
  const int64_t in_tile = positions.shape()[0];
  const int64_t dim = positions.shape()[1];
  const int64_t first = class_token.empty() ? 0 : 1;
  const auto row_bytes = static_cast<size_t>(dim) * sizeof(float);
  for (int64_t tile = 0; tile < x.shape()[0] / in_tile; ++tile) {
    const TensorView to = x.slice(tile * in_tile, in_tile);
    if (first > 0) std::memcpy(to.data(), class_token.data(), row_bytes);
    std::memcpy(to.slice(first, in_tile - first).data(),
                patches.slice(tile * (in_tile - first), in_tile - first).data(),
                row_bytes * static_cast<size_t>(in_tile - first));
    const float* added = positions.as<float>();
    float* sums = to.as<float>();
    for (int64_t i = 0; i < in_tile * dim; ++i) sums[i] += added[i];
  }
}

/// What take_tiles() asks of its operands.
void check_taken(TensorView y, int64_t first, ConstTensorView x, int64_t rows_per_tile,
                 int64_t skipped, Stream& stream) {
  constexpr std::string_view kOp = "take_tiles";
  check_rows(kOp, "x", x, stream);
  check_rows(kOp, "y", y, stream);
  if (rows_per_tile < 1 || x.shape()[0] % rows_per_tile != 0 || skipped < 0 ||
      skipped > rows_per_tile) {
    refuse_tiles(kOp, x.shape()[0], rows_per_tile);
  }
  const int64_t tiles = x.shape()[0] / rows_per_tile;
  const int64_t dim = x.shape()[1];
  check::shape(kOp, "y", y, {tiles * (rows_per_tile - skipped), y.shape()[1]},
               "the rows of x that are not skipped");
  if (first < 0 || first + dim > y.shape()[1]) {
    check::refuse("{}: {} columns do not fit into columns {} on of {}", kOp, dim, first,
                  y.shape().str());
  }
}

}  // namespace

void scatter_tiles(TensorView x, ConstTensorView patches, ConstTensorView class_token,
                   ConstTensorView positions, Stream& stream) {
  constexpr std::string_view kOp = "scatter_tiles";
  check_rows(kOp, "x", x, stream);
  check_rows(kOp, "patches", patches, stream);
  check_rows(kOp, "positions", positions, stream);
  const int64_t in_tile = positions.shape()[0];
  const int64_t dim = positions.shape()[1];
  const int64_t first = class_token.empty() ? 0 : 1;
  if (!class_token.empty()) {
    check::shape(kOp, "class_token", class_token, {1, dim}, "(1, dim) of positions");
    check_rows(kOp, "class_token", class_token, stream);
  }
  if (in_tile <= first || x.shape()[0] % in_tile != 0) {
    refuse_tiles(kOp, x.shape()[0], in_tile);
  }
  const int64_t tiles = x.shape()[0] / in_tile;
  check::shape(kOp, "x", x, {tiles * in_tile, dim}, "rows as long as positions");
  check::shape(kOp, "patches", patches, {tiles * (in_tile - first), dim},
               "a row of x but for the class tokens");
  check::disjoint(kOp, "x", x, "patches", patches);
  if (x.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::scatter_tiles(x, patches, class_token, positions, stream);
  scatter(x, patches, class_token, positions);
}

void take_tiles(TensorView y, int64_t first, ConstTensorView x, int64_t rows_per_tile,
                int64_t skipped, Stream& stream) {
  check_taken(y, first, x, rows_per_tile, skipped, stream);
  if (x.elements() == 0 || y.elements() == 0) return;
  if (check::on_gpu(stream)) return cuda::take_tiles(y, first, x, rows_per_tile, skipped, stream);
  const int64_t kept = rows_per_tile - skipped;
  const int64_t dim = x.shape()[1];
  for (int64_t row = 0; row < y.shape()[0]; ++row) {
    const int64_t from = row / kept * rows_per_tile + skipped + row % kept;
    std::memcpy(y.as<float>() + row * y.shape()[1] + first, x.as<float>() + from * dim,
                static_cast<size_t>(dim) * sizeof(float));
  }
}

}  // namespace kvlm
