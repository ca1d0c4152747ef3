#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "kernels/base/error.h"
#include "kernels/check.h"
#include "kernels/cpu/attention.h"
#include "kernels/cuda/dense/attention.h"
#include "kernels/elementwise.h"

// Checks the operands of attention and hands them to the CPU's or the GPU's implementation; cuts
// segments into tiles of queries; merges softmax states on the host.
namespace kvlm {

namespace {

using check::refuse;

/// `rows` hold numbers and have memory; `index` says which of them in a message.
void check_rows(std::string_view op, size_t index, const KeyValueRows& rows) {
  if (!check::is_floating(rows.dtype)) {
    refuse("{}: segment {} of the cache holds {}, expected f32, f16 or bf16", op, index,
           dtype_name(rows.dtype));
  }
  if (rows.rows < 0 || (rows.rows > 0 && (rows.keys == nullptr || rows.values == nullptr))) {
    refuse("{}: segment {} claims {} cached tokens but has no data", op, index, rows.rows);
  }
}

/// What both kinds of attention ask of their operands.
void check_attention(std::string_view op, ConstTensorView out, ConstTensorView q, ConstTensorView k,
                     ConstTensorView v, float scale, DType multiply, const Stream& stream) {
  check::queries_and_keys(op, q, k, scale, multiply, stream);
  check::values_and_outputs(op, v, out, q, k, stream);
}

void check_segments(std::string_view op, const Segments& segments, int64_t rows) {
  if (segments.rows() != rows) {
    refuse("{}: the segments have {} rows, expected the {} of q", op, segments.rows(), rows);
  }
}

}  // namespace

void attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
               std::span<const KeyValueRows> past, bool causal, float scale, DType multiply,
               Stream& stream) {
  constexpr std::string_view kOp = "attention";
  check_attention(kOp, out, q, k, v, scale, multiply, stream);
  const int64_t kv_heads = k.shape()[1];
  if (past.size() % static_cast<size_t>(kv_heads) != 0) {
    refuse("{}: {} cached segments cannot be split evenly over {} KV heads", kOp, past.size(),
           kv_heads);
  }
  for (size_t i = 0; i < past.size(); ++i) check_rows(kOp, i, past[i]);
  if (check::on_gpu(stream)) {
    return cuda::attention(out, q, k, v, past, causal, scale, multiply, stream);
  }
  cpu::attention(out, q, k, v, past, causal, scale, stream);
}

namespace {

void check_bounds(std::span<const int32_t> bounds) {
  constexpr std::string_view kOp = "Segments";
  if (bounds.size() < 2 || bounds.front() != 0) {
    refuse("{}: {} bounds from {} on; expected at least two, beginning at 0", kOp, bounds.size(),
           bounds.empty() ? 0 : bounds.front());
  }
  for (size_t i = 1; i < bounds.size(); ++i) {
    if (bounds[i] <= bounds[i - 1]) {
      refuse("{}: bound {} is {}, after {}; expected ascending bounds", kOp, i, bounds[i],
             bounds[i - 1]);
    }
  }
}

/// Adds the tiles of `size` queries of all segments.
void add_tiles(std::span<const int32_t> bounds, int32_t size, std::vector<Segments::Tile>& tiles) {
  const auto before = std::ssize(tiles);
  for (size_t i = 1; i < bounds.size(); ++i) {
    const int32_t rows = bounds[i] - bounds[i - 1];
    for (int32_t first = 0; first < rows; first += size) {
      tiles.push_back({bounds[i - 1], rows, first});
    }
  }
  // The longest first: what a GPU does last, and alone, is then short.
  const auto queries = [size](const Segments::Tile& tile) {
    return std::min(size, tile.rows - tile.queries);
  };
  std::ranges::stable_sort(tiles.begin() + before, tiles.end(), std::ranges::greater(), queries);
}

}  // namespace

void Segments::assign(std::span<const int32_t> bounds, Stream& stream) {
  check_bounds(bounds);
  if (std::ranges::equal(bounds, bounds_)) return;
  bounds_.assign(bounds.begin(), bounds.end());
  if (!check::on_gpu(stream)) return;
  std::vector<Tile> tiles;
  add_tiles(bounds, 64, tiles);
  counts_[0] = std::ssize(tiles);
  add_tiles(bounds, 128, tiles);
  counts_[1] = std::ssize(tiles) - counts_[0];
  const Shape shape{std::ssize(tiles), 4};
  if (tiles_.empty() || tiles_.shape()[0] < shape[0]) {
    tiles_ = Tensor(DType::kI32, shape, stream.device());
  }
  copy(tiles_.view().slice(0, shape[0]), ConstTensorView(tiles.data(), DType::kI32, shape), stream);
}

const Segments::Tile* Segments::tiles(int size) const noexcept {
  const auto* all = reinterpret_cast<const Tile*>(tiles_.view().data());
  return size == 64 ? all : all + counts_[0];
}

void segment_attention(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                       const Segments& segments, float scale, DType multiply, Stream& stream) {
  constexpr std::string_view kOp = "segment_attention";
  check_attention(kOp, out, q, k, v, scale, multiply, stream);
  check_segments(kOp, segments, q.shape()[0]);
  if (!check::on_gpu(stream)) {
    return cpu::segment_attention(out, q, k, v, segments.bounds(), scale, stream);
  }
  cuda::segment_attention(out, q, k, v, segments, scale, multiply, stream);
}

namespace {

/// What segment_attention() asks of operands that one product made.
void check_product(TensorView out, ConstTensorView qkv, float scale, Stream& stream) {
  constexpr std::string_view kOp = "segment_attention";
  check::made_together(kOp, qkv, stream);
  const Shape& shape = qkv.shape();
  check::shape(kOp, "out", out, {shape[0], shape[2], shape[3]}, "(n, heads, head_dim) of qkv");
  check::on_stream(kOp, "out", out, stream);
  check::dtype(kOp, "out", out, qkv.dtype());
  check::disjoint(kOp, "out", out, "qkv", qkv);
  if (shape[2] < 1 || shape[3] < 8 || shape[3] > 256 || shape[3] % 8 != 0) {
    refuse(
        "{}: {} heads of {} channels; expected at least one head of a multiple of 8, at most 256",
        kOp, shape[2], shape[3]);
  }
  if (!std::isfinite(scale) || scale <= 0) {
    refuse("{}: scale is {}, expected a positive number", kOp, scale);
  }
}

}  // namespace

void segment_attention(TensorView out, ConstTensorView qkv, const Segments& segments, float scale,
                       Stream& stream) {
  check_product(out, qkv, scale, stream);
  check_segments("segment_attention", segments, qkv.shape()[0]);
  if (!check::on_gpu(stream)) {
    throw Error(
        ErrorCode::kUnsupported,
        "segment_attention: the CPU attends in f32 only; pass q, k and v as separate tensors");
  }
  cuda::segment_attention(out, qkv, segments, scale, stream);
}

void attend_rows(std::span<const DecodeSplit> pieces, int q_per_kv, int head_dim, float scale,
                 Stream& stream) {
  constexpr std::string_view kOp = "attend_rows";
  check::decode_sizes(kOp, q_per_kv, head_dim, scale);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const DecodeSplit& piece = pieces[i];
    check_rows(kOp, i, piece.cached);
    if (piece.q == nullptr || piece.state.max == nullptr || piece.state.sum == nullptr ||
        piece.state.out == nullptr) {
      refuse("{}: part {} has no query or no attention state", kOp, i);
    }
  }
  if (check::on_gpu(stream)) {
    refuse("{}: the stream is on {}, expected the CPU", kOp, device_name(stream.device()));
  }
  cpu::attend_rows(pieces, q_per_kv, head_dim, scale, stream);
}

namespace {

/// One row of merge_states(), row r of every part; `out_row` may be that of the first part.
void merge_row(float* out_row, std::span<const SoftmaxState> parts, size_t r, size_t dim) noexcept {
  float max = -std::numeric_limits<float>::infinity();
  for (const SoftmaxState& part : parts) max = std::max(max, part.max[r]);
  float sum = 0;
  bool first = true;  // out_row is overwritten by the first part only
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
  const float inverse = 1 / sum;
  // Without a part, nothing was written yet.
  for (size_t d = 0; d < dim; ++d) out_row[d] = sum > 0 ? out_row[d] * inverse : 0.0f;
}

}  // namespace

void merge_states(std::span<const MergeJob> jobs, int queries, int head_dim) {
  const auto dim = static_cast<size_t>(head_dim);
  for (const MergeJob& job : jobs) {
    for (size_t r = 0; r < static_cast<size_t>(queries); ++r) {
      merge_row(job.out + r * dim, job.parts, r, dim);
    }
  }
}

}  // namespace kvlm
