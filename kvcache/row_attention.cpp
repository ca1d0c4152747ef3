#include "kvcache/row_attention.h"

#include <algorithm>

namespace kvlm {

namespace {

/// On the CPU; on CUDA the kernel cuts pieces itself, into as many rows.
constexpr int64_t kRowsPerPiece = 256;

size_t state_size(const CacheShape& shape) {
  return static_cast<size_t>(shape.q_per_kv()) * (2 + static_cast<size_t>(shape.head_dim));
}

}  // namespace

void RowAttention::reserve(const CacheShape& shape, size_t lanes, size_t rows) {
  const size_t pieces = rows / kRowsPerPiece + lanes;
  pieces_.reserve(pieces);
  states_.reserve(pieces);
  lanes_.reserve(lanes);
  merges_.reserve(lanes);
  const size_t bytes = pieces * state_size(shape) * sizeof(float);
  if (state_floats_.bytes() < bytes) state_floats_ = Buffer(device_, bytes);
}

void RowAttention::clear() noexcept {
  pieces_.clear();
  states_.clear();
  lanes_.clear();
}

void RowAttention::add(const float* q, std::span<const KeyValueRows> runs, float* out,
                       const CacheShape& shape) {
  const size_t before = pieces_.size();
  for (const KeyValueRows& run : runs) add_pieces(q, run, shape);
  lanes_.push_back({out, pieces_.size() - before});
}

void RowAttention::add_pieces(const float* q, const KeyValueRows& rows, const CacheShape& shape) {
  const size_t row_bytes = static_cast<size_t>(shape.head_dim) * dtype_bytes(rows.dtype);
  const auto q_per_kv = static_cast<size_t>(shape.q_per_kv());
  const int64_t most = device_.kind == DeviceKind::kCpu ? kRowsPerPiece : rows.rows;
  for (int64_t first = 0; first < rows.rows; first += most) {
    const size_t skipped = static_cast<size_t>(first) * row_bytes;
    float* state =
        reinterpret_cast<float*>(state_floats_.data()) + pieces_.size() * state_size(shape);
    pieces_.push_back({q,
                       {rows.keys + skipped, rows.values + skipped, rows.dtype,
                        std::min(most, rows.rows - first)},
                       {state, state + q_per_kv, state + 2 * q_per_kv}});
    states_.push_back(pieces_.back().state);
  }
}

void RowAttention::run(const CacheShape& shape, float scale, Stream& stream) {
  if (lanes_.empty()) return;
  attend_rows(pieces_, shape.q_per_kv(), shape.head_dim, scale, stream);
  merges_.clear();
  size_t first = 0;
  for (const Lane& lane : lanes_) {
    merges_.push_back({lane.out, std::span(states_).subspan(first, lane.pieces)});
    first += lane.pieces;
  }
  merge_states(merges_, shape.q_per_kv(), shape.head_dim, stream);
}

}  // namespace kvlm
