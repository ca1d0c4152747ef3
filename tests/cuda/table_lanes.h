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

/// The lanes of a test on a GPU: each is the KV head of a sequence of its own. Its last run of keys
/// and its last of values are full rows; they become its rings, and their newest row that of the
/// step.
class TableLanes {
 public:
  TableLanes(std::span<const PackedLane> lanes, int q_per_kv, int head_dim, Stream& stream)
      : lanes_(lanes), stream_(stream), dtype_(lanes[0].keys.back().dtype) {
    shape_.layers = shape_.kv_heads = 1;
    shape_.q_per_kv = q_per_kv;
    shape_.head_dim = head_dim;
    shape_.rows = dtype_;
    TableLoad load;
    load.slots = static_cast<int>(lanes.size());
    for (const PackedLane& lane : lanes) {
      if (lane.weights_wanted) shape_.weights = RowWeights::kOfStep;
      shape_.remaps = std::max(shape_.remaps, static_cast<int>(lane.remaps.size()));
      load.longest = std::max(load.longest, lane.slots);
      int blocks = 0;
      int words = 0;
      for (const auto& runs : {fixed(lane.keys), fixed(lane.values)}) {
        load.fixed_runs = std::max(load.fixed_runs, static_cast<int>(runs.size()));
        for (const SlotRun& run : runs) count(run, blocks, words);
      }
      load.listed_blocks = std::max(load.listed_blocks, blocks);
      load.words = std::max(load.words, words);
    }
    table_ = std::make_unique<DecodeTable>(shape_, windows_, stream.device());
    table_->reserve(load);
  }

  /// Attends all lanes at once, as attend_packed() does; weights that are wanted are means over
  /// queries, (slots,). Returns how many slopes were clamped.
  int64_t attend(float scale) {
    std::vector<TableRow> step;
    for (size_t i = 0; i < lanes_.size(); ++i) {
      const PackedLane& lane = lanes_[i];
      TableLane made;
      made.keys = fixed(lane.keys);
      made.values = fixed(lane.values);
      made.keys_gained = ring(lane.keys.back());
      made.values_gained = ring(lane.values.back());
      made.remaps = lane.remaps;
      if (shape_.weights != RowWeights::kNone) made.weighed.weights = lane.weights;
      made.weighed.by_slots = true;
      const int number = static_cast<int>(i);
      table_->set(number, 0, {&made, 1}, stream_);
      step.push_back({number, number});
    }
    table_->start(step, stream_);
    const auto rows = static_cast<int64_t>(lanes_.size());
    const Device device = stream_.device();
    const Shape heads{rows, shape_.q_per_kv, shape_.head_dim};
    Tensor q(DType::kF32, heads, device);
    Tensor out(DType::kF32, heads, device);
    std::array<Tensor, 2> newest = {Tensor(dtype_, {rows, shape_.head_dim}, device),
                                    Tensor(dtype_, {rows, shape_.head_dim}, device)};
    std::array<Tensor, 2> wide = {Tensor(DType::kF32, newest[0].shape(), device),
                                  Tensor(DType::kF32, newest[0].shape(), device)};
    const Shape of_lane{1, shape_.q_per_kv, shape_.head_dim};
    for (int64_t i = 0; i < rows; ++i) {
      const PackedLane& lane = lanes_[static_cast<size_t>(i)];
      copy(q.view().slice(i, 1), ConstTensorView(lane.q, DType::kF32, of_lane, device), stream_);
      for (const size_t side : {size_t{0}, size_t{1}}) {
        const SlotRun& run = side == 0 ? lane.keys.back() : lane.values.back();
        copy(newest[side].view().slice(i, 1), last_row(run), stream_);
      }
    }
    for (const size_t side : {size_t{0}, size_t{1}}) convert(wide[side], newest[side], stream_);
    table_->store(0, wide[0].as<float>(), wide[1].as<float>(), stream_);
    table_->attend(0, q.as<float>(), out.as<float>(), scale, stream_);
    for (int64_t i = 0; i < rows; ++i) {
      float* to = lanes_[static_cast<size_t>(i)].out;
      copy(TensorView(to, DType::kF32, of_lane, device), out.view().slice(i, 1), stream_);
    }
    stream_.synchronize();
    return table_->guarded_remaps(0);
  }

 private:
  static std::span<const SlotRun> fixed(std::span<const SlotRun> runs) {
    return runs.first(runs.size() - 1);
  }
  /// Adds what a run may list: parts of at least 256 rows, and bitmaps.
  static void count(const SlotRun& run, int& blocks, int& words) {
    words += run.selected_of / 64 + 1;
    for (const PackedBlock& block : run.blocks) {
      blocks += block.rows / 256 + 1;
      words += block.rows / 64 + block.rows / 256 + 2;
    }
  }
  static GrowingRows ring(const SlotRun& rows) {
    GrowingRows gained;
    gained.ring = const_cast<std::byte*>(rows.rows);
    gained.ring_rows = rows.slots;
    gained.full = rows.slots - 1;
    return gained;
  }
  ConstTensorView last_row(const SlotRun& run) const {
    const size_t bytes = static_cast<size_t>(shape_.head_dim) * dtype_bytes(dtype_);
    return {run.rows + static_cast<size_t>(run.slots - 1) * bytes, dtype_,
            Shape{1, shape_.head_dim}, stream_.device()};
  }

  std::span<const PackedLane> lanes_;
  Stream& stream_;
  DType dtype_;
  TableShape shape_;
  std::vector<std::array<RowWindow, 2>> windows_ = std::vector<std::array<RowWindow, 2>>(1);
  std::unique_ptr<DecodeTable> table_;
};

/// Attends lanes on the stream's device; weights that are wanted are means over queries, (slots,).
/// Returns how many slopes were clamped.
inline int64_t attend_lanes(std::span<PackedLane> lanes, int q_per_kv, int head_dim, float scale,
                            Stream& stream) {
  if (stream.device().kind != DeviceKind::kCpu) {
    return TableLanes(lanes, q_per_kv, head_dim, stream).attend(scale);
  }
  attend_packed(lanes, q_per_kv, head_dim, scale, stream);
  int64_t clamped = 0;
  for (const PackedLane& lane : lanes) {
    clamped += lane.guarded_remaps;
    for (int slot = 0; slot < lane.slots; ++slot) {
      float sum = 0;
      for (int head = 0; head < q_per_kv; ++head) sum += lane.weights[head * lane.slots + slot];
      lane.weights[slot] = sum / static_cast<float>(q_per_kv);
    }
  }
  return clamped;
}

/// Attends lanes of full rows alone: the first `lengths[i]` of the same keys and values.
/// (lanes, q_per_kv, head_dim)
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
  std::vector<std::array<SlotRun, 2>> runs;
  for (const int length : lengths) {
    std::array<SlotRun, 2>& of_lane = runs.emplace_back();
    for (const size_t side : {size_t{0}, size_t{1}}) {
      of_lane[side].slots = length;
      of_lane[side].rows = rows[side].view().data();
      of_lane[side].dtype = dtype;
    }
  }
  std::vector<PackedLane> lanes;
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    PackedLane& lane = lanes.emplace_back();
    lane.q = q.view().slice(i, 1).as<float>();
    lane.keys = {&runs[at][0], 1};
    lane.values = {&runs[at][1], 1};
    lane.slots = lengths[at];
    lane.weights = weights.view().slice(i, 1).as<float>();
    lane.weights_wanted = false;
    lane.out = out.view().slice(i, 1).as<float>();
  }
  attend_lanes(lanes, q_per_kv, head_dim, 0.3f, stream);
  return out;
}

}  // namespace kvlm::testing
