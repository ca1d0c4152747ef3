#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/base/tensor.h"
#include "kernels/decode_table.h"
#include "kernels/elementwise.h"
#include "tests/kernels/values.h"

namespace kvlm::testing {

/// The KV heads of a test on a GPU: each is the KV head of a sequence of its own. Its last segment
/// of keys and its last of values are full rows; they become its rings, and their newest row that
/// of the step.
class TableHeads {
 public:
  TableHeads(std::span<const PackedHead> heads, int q_per_kv, int head_dim, Stream& stream)
      : heads_(heads), stream_(stream), dtype_(heads[0].keys.back().dtype) {
    shape_.layers = shape_.kv_heads = 1;
    shape_.q_per_kv = q_per_kv;
    shape_.head_dim = head_dim;
    shape_.rows = dtype_;
    TableLoad load;
    load.slots = static_cast<int>(heads.size());
    for (const PackedHead& head : heads) {
      if (head.weights_wanted) shape_.weights = RowWeights::kOfStep;
      shape_.remaps = std::max(shape_.remaps, static_cast<int>(head.remaps.size()));
      load.longest = std::max(load.longest, head.slots);
      int blocks = 0;
      int words = 0;
      for (const auto& segments : {fixed(head.keys), fixed(head.values)}) {
        load.fixed_segments = std::max(load.fixed_segments, static_cast<int>(segments.size()));
        for (const SlotSegment& segment : segments) count(segment, blocks, words);
      }
      load.listed_blocks = std::max(load.listed_blocks, blocks);
      load.words = std::max(load.words, words);
    }
    table_ = std::make_unique<DecodeTable>(shape_, windows_, stream.device());
    table_->reserve(load);
  }

  /// Attends all KV heads at once, as attend_packed() does; weights that are wanted are means over
  /// queries, (slots,). Returns how many slopes were clamped.
  int64_t attend(float scale) {
    std::vector<TableRow> step;
    for (size_t i = 0; i < heads_.size(); ++i) {
      const PackedHead& head = heads_[i];
      TableHead made;
      made.keys = fixed(head.keys);
      made.values = fixed(head.values);
      made.keys_gained = ring(head.keys.back());
      made.values_gained = ring(head.values.back());
      made.remaps = head.remaps;
      if (shape_.weights != RowWeights::kNone) made.weighed.weights = head.weights;
      made.weighed.by_slots = true;
      const int number = static_cast<int>(i);
      table_->set(number, 0, {&made, 1}, stream_);
      step.push_back({number, number});
    }
    table_->start(step, stream_);
    const auto rows = static_cast<int64_t>(heads_.size());
    const Device device = stream_.device();
    const Shape heads{rows, shape_.q_per_kv, shape_.head_dim};
    Tensor q(DType::kF32, heads, device);
    Tensor out(DType::kF32, heads, device);
    std::array<Tensor, 2> newest = {Tensor(dtype_, {rows, shape_.head_dim}, device),
                                    Tensor(dtype_, {rows, shape_.head_dim}, device)};
    std::array<Tensor, 2> wide = {Tensor(DType::kF32, newest[0].shape(), device),
                                  Tensor(DType::kF32, newest[0].shape(), device)};
    const Shape of_head{1, shape_.q_per_kv, shape_.head_dim};
    for (int64_t i = 0; i < rows; ++i) {
      const PackedHead& head = heads_[static_cast<size_t>(i)];
      copy(q.view().slice(i, 1), ConstTensorView(head.q, DType::kF32, of_head, device), stream_);
      for (const size_t side : {size_t{0}, size_t{1}}) {
        const SlotSegment& segment = side == 0 ? head.keys.back() : head.values.back();
        copy(newest[side].view().slice(i, 1), last_row(segment), stream_);
      }
    }
    for (const size_t side : {size_t{0}, size_t{1}}) convert(wide[side], newest[side], stream_);
    table_->store(0, wide[0].as<float>(), wide[1].as<float>(), stream_);
    table_->attend(0, q.as<float>(), out.as<float>(), scale, stream_);
    for (int64_t i = 0; i < rows; ++i) {
      float* to = heads_[static_cast<size_t>(i)].out;
      copy(TensorView(to, DType::kF32, of_head, device), out.view().slice(i, 1), stream_);
    }
    stream_.synchronize();
    return table_->guarded_remaps(0);
  }

 private:
  static std::span<const SlotSegment> fixed(std::span<const SlotSegment> segments) {
    return segments.first(segments.size() - 1);
  }
  /// Adds what a segment may list: parts of at least 256 rows, and bitmaps.
  static void count(const SlotSegment& segment, int& blocks, int& words) {
    words += segment.selected_of / 64 + 1;
    for (const PackedBlock& block : segment.blocks) {
      blocks += block.rows / 256 + 1;
      words += block.rows / 64 + block.rows / 256 + 2;
    }
  }
  static GrowingRows ring(const SlotSegment& rows) {
    GrowingRows gained;
    gained.ring = const_cast<std::byte*>(rows.rows);
    gained.ring_rows = rows.slots;
    gained.full = rows.slots - 1;
    return gained;
  }
  ConstTensorView last_row(const SlotSegment& segment) const {
    const size_t bytes = static_cast<size_t>(shape_.head_dim) * dtype_bytes(dtype_);
    return {segment.rows + static_cast<size_t>(segment.slots - 1) * bytes, dtype_,
            Shape{1, shape_.head_dim}, stream_.device()};
  }

  std::span<const PackedHead> heads_;
  Stream& stream_;
  DType dtype_;
  TableShape shape_;
  std::vector<std::array<RowWindow, 2>> windows_ = std::vector<std::array<RowWindow, 2>>(1);
  std::unique_ptr<DecodeTable> table_;
};

/// Attends KV heads on the stream's device; weights that are wanted are means over queries,
/// (slots,). Returns how many slopes were clamped.
inline int64_t attend_heads(std::span<PackedHead> heads, int q_per_kv, int head_dim, float scale,
                            Stream& stream) {
  if (stream.device().kind != DeviceKind::kCpu) {
    return TableHeads(heads, q_per_kv, head_dim, stream).attend(scale);
  }
  attend_packed(heads, q_per_kv, head_dim, scale, stream);
  int64_t clamped = 0;
  for (const PackedHead& head : heads) {
    clamped += head.guarded_remaps;
    for (int slot = 0; slot < head.slots; ++slot) {
      float sum = 0;
      for (int q = 0; q < q_per_kv; ++q) sum += head.weights[q * head.slots + slot];
      head.weights[slot] = sum / static_cast<float>(q_per_kv);
    }
  }
  return clamped;
}

/// Attends KV heads of full rows alone: the first `lengths[i]` of the same keys and values.
/// (KV heads, q_per_kv, head_dim)
inline Tensor full_rows(int q_per_kv, int head_dim, DType dtype, std::span<const int> lengths,
                        Device device, Stream& stream) {
  const int most = *std::max_element(lengths.begin(), lengths.end());
  const auto count = static_cast<int64_t>(lengths.size());
  const auto placed = [&](const Tensor& x) {
    Tensor made(x.dtype(), x.shape(), device);
    copy(made, x, stream);
    return made;
  };
  const Tensor q = placed(normal_tensor(DType::kF32, {count, q_per_kv, head_dim}, 3));
  const std::array<Tensor, 2> rows = {placed(normal_tensor(dtype, {most, head_dim}, 1)),
                                      placed(normal_tensor(dtype, {most, head_dim}, 2))};
  Tensor out(DType::kF32, q.shape(), device);
  Tensor weights(DType::kF32, {count, q_per_kv, most}, device);
  std::vector<std::array<SlotSegment, 2>> segments;
  for (const int length : lengths) {
    std::array<SlotSegment, 2>& of_head = segments.emplace_back();
    for (const size_t side : {size_t{0}, size_t{1}}) {
      of_head[side].slots = length;
      of_head[side].rows = rows[side].view().data();
      of_head[side].dtype = dtype;
    }
  }
  std::vector<PackedHead> heads;
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    PackedHead& head = heads.emplace_back();
    head.q = q.view().slice(i, 1).as<float>();
    head.keys = {&segments[at][0], 1};
    head.values = {&segments[at][1], 1};
    head.slots = lengths[at];
    head.weights = weights.view().slice(i, 1).as<float>();
    head.weights_wanted = false;
    head.out = out.view().slice(i, 1).as<float>();
  }
  attend_heads(heads, q_per_kv, head_dim, 0.3f, stream);
  return out;
}

}  // namespace kvlm::testing
