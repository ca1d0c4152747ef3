// Begin of a step on the GPU. One launch for all layers counts the token that each KV head gains
// and the window that the last step packed (count_rows); one launch per layer stores new keys and
// values (store_gained). Windows packed in place are counted by placed_drops.cu.
#include <climits>

#include "kernels/cuda/attend/attend_layer.h"
#include "kernels/cuda/attend/fused_splits.h"
#include "kernels/cuda/attend/image_choice.h"
#include "kernels/cuda/table/count_rows.h"
#include "kernels/cuda/table/store_row.cuh"

namespace kvlm::cuda::packed {

namespace {

constexpr int kCountThreads = 128;

/// Updates the segments after the fixed ones: packed tokens, and the ring before and after its end.
__device__ void lay_gained(const TableArgs& table, const DeviceTail& tail, DeviceSegment* gained) {
  const int before_wrap = min(tail.full, tail.ring_rows - tail.first);
  gained[0].slots = gained[0].packed_rows = tail.packed;
  gained[0].first_slot = gained[0].first_block.first_slot = tail.fixed_slots;
  gained[0].first_place = tail.fixed_slots;
  const int64_t row_bytes =
      static_cast<int64_t>(table.head_dim) * (table.dtype == DType::kF32 ? 4 : 2);
  gained[1].rows = tail.ring + tail.first * row_bytes;
  gained[1].slots = before_wrap;
  gained[1].first_slot = tail.fixed_slots + tail.packed;
  gained[1].first_place = tail.placed ? tail.ring_begin() + tail.first : gained[1].first_slot;
  gained[2].rows = tail.ring;
  gained[2].slots = tail.full - before_wrap;
  gained[2].first_slot = gained[1].first_slot + before_wrap;
  gained[2].first_place = tail.placed ? tail.ring_begin() : gained[2].first_slot;
}

/// Chooses the place of the step's token, and its arrival number if the GPU evicts.
__device__ void place_newest(const TableArgs& table, int head, int side, DeviceTail& tail) {
  tail.newest = tail.vacated >= 0 ? tail.vacated : tail.full - 1;
  tail.vacated = -1;
  if (side != 0 || !(tail.placed || (table.compares && !table.scored))) return;
  if (table.weighed[head].by_slots) return;
  const int place = tail.placed ? tail.ring_begin() + tail.place(tail.newest) : tail.newest;
  table.came_of(head)[place] = table.weighed[head].next++;
  if (table.scored) table.weighed[head].weights[place] = 0;  // tokens of decode have no score
}

/// Describes a KV head's unpacked tokens to row_splits.cu. Keys and values have the same places.
///   served  row_splits.cu attends to this KV head
__device__ void lay_row_split(const TableArgs& table, int layer, int number, int head, bool served,
                              int64_t query, const DeviceTail& keys) {
  const std::byte* values = table.tails[head * 2 + 1].ring;
  const int64_t at = static_cast<int64_t>(layer) * table.rows * table.kv_heads + number;
  DeviceRowSplit& row_split = table.row_splits[at];
  if (!served) {
    row_split.parts = 0;
    return;
  }
  row_split.first_query = query;
  row_split.cached = {keys.ring, values, table.dtype, keys.full};
  row_split.first = keys.first;
  row_split.ring_rows = keys.ring_rows;
  row_split.parts = static_cast<int>(ceil_div(keys.full, part_rows(keys.full)));
  table.heads[head].splits[0] = {0, static_cast<int16_t>(row_split.parts)};
}

/// Row of the step's keys and values, by the KV head's number in the step.
__device__ __forceinline__ int64_t row_of(const TableArgs& table, int number) {
  return static_cast<int64_t>(table.step[number / table.kv_heads].row) * table.kv_heads +
         number % table.kv_heads;
}

/// Sets the range of splits in which each pass over the values has slots.
__device__ __forceinline__ void find_splits(const TableArgs& table, const DeviceSegment* values,
                                            DeviceHead& head) {
  const int split = fused_split_slots(head.slots);
  for (int pass = 0; pass < head.passes; ++pass) {
    int first = INT_MAX;
    int end = 0;
    for (int i = 0; i < table.side_segments; ++i) {
      const DeviceSegment& segment = values[i];
      if (segment.kernel < 0 || segment.pass != pass || segment.slots == 0) continue;
      if (is_image_segment(segment.kernel)) {  // one state, stored as that of split 0
        first = 0, end = 1;
        break;
      }
      first = min(first, segment.first_slot / split);
      end = max(end, (segment.first_slot + segment.slots + split - 1) / split);
    }
    head.splits[pass] = {static_cast<int16_t>(min(first, end)), static_cast<int16_t>(end)};
  }
}

/// One thread for each side of each KV head of a step.
__global__ void __launch_bounds__(kCountThreads) count_rows(TableArgs table) {
  const int index = static_cast<int>(blockIdx.x) * kCountThreads + static_cast<int>(threadIdx.x);
  const int of_layer = table.rows * table.kv_heads * 2;
  if (index >= of_layer * table.layers) return;
  const int layer = index / of_layer;
  const int side = index % 2;
  const int number = index % of_layer / 2;  // of the KV head, in the step
  const int at = table.head_at(layer, number);
  DeviceTail& tail = table.tails[at * 2 + side];
  if (!tail.placed) tail.count_packed(table.windows[layer * 2 + side].rows);
  ++tail.full;
  place_newest(table, at, side, tail);
  DeviceSegment* segments =
      table.segments + static_cast<int64_t>(at * 2 + side) * table.side_segments;
  DeviceSegment* gained = segments + table.side_segments - kGainedSegments;
  // Without packed tokens row_splits.cu attends, which does not read the segments.
  const bool rows_alone = gained[kGainedSegments - 1].kernel < 0;
  if (!rows_alone) lay_gained(table, tail, gained);
  DeviceHead& head = table.heads[at];
  const bool in_row_splits = rows_alone || is_image(head.fused);
  if (side != 0) {
    head.slots = tail.fixed_slots + tail.packed + tail.full;
    if (!in_row_splits) find_splits(table, segments, head);
    return;
  }
  const int64_t query = row_of(table, number) * table.q_per_kv * table.head_dim;
  head.first_query = query;
  head.weights = table.scores + static_cast<int64_t>(number) * table.q_per_kv * table.longest;
  if (table.row_splits != nullptr) {
    lay_row_split(table, layer, number, at, in_row_splits, query, tail);
  }
}

/// Makes the score ranges of a KV head's remaps empty. By a warp.
__device__ void clear_ranges(const TableArgs& table, int number) {
  const int count = table.remaps * table.q_per_kv;
  for (int i = static_cast<int>(threadIdx.x % 32); i < count; i += 32) {
    table.ranges[number * count + i] = {INT_MAX, INT_MIN};
  }
}

constexpr int kStoreWarps = 4;

/// A warp stores the new key or value of a KV head as the newest of its ring. If placed, it also
/// records where the other one is. It reads the table at once, unless it `waits`
/// (store_new_rows()).
__global__ void __launch_bounds__(32 * kStoreWarps)
    store_gained(TableArgs table, int layer, bool waits, const float* k, const float* v) {
  if (waits) wait_for_earlier();
  let_next_start();
  const auto index = static_cast<int>(blockIdx.x * kStoreWarps + threadIdx.x / 32);
  const int number = index / 2;
  const int side = index % 2;
  if (number >= table.rows * table.kv_heads) return wait_for_earlier();
  const int head = table.head_at(layer, number);
  const DeviceTail tail = table.tails[head * 2 + side];
  const int64_t from = row_of(table, number) * table.head_dim;
  wait_for_earlier();
  store_row(tail.ring, table.dtype, tail.place(tail.newest), table.head_dim,
            (side == 0 ? k : v) + from);
  if (side == 0) clear_ranges(table, number);
  if (!tail.placed || threadIdx.x % 32 != 0) return;
  const DeviceTail& other = table.tails[head * 2 + 1 - side];
  table.other_of(head, side)[tail.ring_begin() + tail.place(tail.newest)] =
      static_cast<int16_t>(other.ring_begin() + other.place(other.newest));
}

}  // namespace

void count_step(const TableArgs& table, Stream& stream) {
  const int64_t threads = int64_t{2} * table.rows * table.kv_heads * table.layers;
  count_rows<<<static_cast<unsigned>(ceil_div(threads, kCountThreads)), kCountThreads, 0,
               native(stream)>>>(table);
  check_launch("DecodeTable::start");
}

void store_new_rows(const TableArgs& table, int layer, bool waits, const float* k, const float* v,
                    Stream& stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(2 * table.rows * table.kv_heads, kStoreWarps));
  launch_early("DecodeTable::store", store_gained, dim3(blocks), 32 * kStoreWarps, stream, table,
               layer, waits, k, v);
}

}  // namespace kvlm::cuda::packed
