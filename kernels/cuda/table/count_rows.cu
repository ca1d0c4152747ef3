// What a DecodeTable's GPU does with the counters of its lanes: counts the row that each gains and
// the window that was packed, stores new rows.
#include <climits>

#include "kernels/cuda/attend/attend_layer.h"
#include "kernels/cuda/attend/fused_splits.h"
#include "kernels/cuda/attend/picture_choice.h"
#include "kernels/cuda/table/count_rows.h"
#include "kernels/cuda/table/store_row.cuh"

namespace kvlm::cuda::packed {

namespace {

constexpr int kCountThreads = 128;

/// What the runs behind the fixed ones hold now.
__device__ void lay_gained(const TableArgs& table, const DeviceTail& tail, DeviceRun* gained) {
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

/// Where the step's row goes, and of weighed rows its number.
__device__ void place_newest(const TableArgs& table, int lane, int side, DeviceTail& tail) {
  tail.newest = tail.vacated >= 0 ? tail.vacated : tail.full - 1;
  tail.vacated = -1;
  if (side != 0 || !(tail.placed || (table.compares && !table.scored))) return;
  if (table.weighed[lane].by_slots) return;
  const int place = tail.placed ? tail.ring_begin() + tail.place(tail.newest) : tail.newest;
  table.came_of(lane)[place] = table.weighed[lane].next++;
  if (table.scored) table.weighed[lane].weights[place] = 0;  // as all that have no score
}

/// What the kernels of row_pieces.cu read of the full rows of a lane: those of its keys, beside
/// which its values lie alike.
///   served  they read the lane
__device__ void lay_piece(const TableArgs& table, int layer, int number, int lane, bool served,
                          int64_t query, const DeviceTail& keys) {
  const std::byte* values = table.tails[lane * 2 + 1].ring;
  const int64_t at = static_cast<int64_t>(layer) * table.rows * table.heads + number;
  DevicePiece& piece = table.pieces[at];
  if (!served) {
    piece.parts = 0;
    return;
  }
  piece.first_query = query;
  piece.cached = {keys.ring, values, table.dtype, keys.full};
  piece.first = keys.first;
  piece.ring_rows = keys.ring_rows;
  piece.parts = static_cast<int>(ceil_div(keys.full, part_rows(keys.full)));
  table.lanes[lane].splits[0] = {0, static_cast<int16_t>(piece.parts)};
}

/// The row of queries of a lane, of keys and of values, by its number in the step.
__device__ __forceinline__ int64_t row_of(const TableArgs& table, int number) {
  return static_cast<int64_t>(table.step[number / table.heads].row) * table.heads +
         number % table.heads;
}

/// The splits of a lane in which each pass over its values has slots.
__device__ __forceinline__ void find_splits(const TableArgs& table, const DeviceRun* values,
                                            DeviceLane& lane) {
  const int split = fused_split_slots(lane.slots);
  for (int pass = 0; pass < lane.passes; ++pass) {
    int first = INT_MAX;
    int end = 0;
    for (int i = 0; i < table.side_runs; ++i) {
      const DeviceRun& run = values[i];
      if (run.kernel < 0 || run.pass != pass || run.slots == 0) continue;
      if (is_picture_run(run.kernel)) {  // one state, in the place of the first
        first = 0, end = 1;
        break;
      }
      first = min(first, run.first_slot / split);
      end = max(end, (run.first_slot + run.slots + split - 1) / split);
    }
    lane.splits[pass] = {static_cast<int16_t>(min(first, end)), static_cast<int16_t>(end)};
  }
}

/// A thread for each side of each lane of a step.
__global__ void __launch_bounds__(kCountThreads) count_rows(TableArgs table) {
  const int index = static_cast<int>(blockIdx.x) * kCountThreads + static_cast<int>(threadIdx.x);
  const int of_layer = table.rows * table.heads * 2;
  if (index >= of_layer * table.layers) return;
  const int layer = index / of_layer;
  const int side = index % 2;
  const int number = index % of_layer / 2;  // of the lane, in the step
  const int at = table.lane_at(layer, number);
  DeviceTail& tail = table.tails[at * 2 + side];
  if (!tail.placed) tail.count_packed(table.windows[layer * 2 + side].rows);
  ++tail.full;
  place_newest(table, at, side, tail);
  DeviceRun* runs = table.runs + static_cast<int64_t>(at * 2 + side) * table.side_runs;
  DeviceRun* gained = runs + table.side_runs - kGainedRuns;
  // Of a lane of full rows alone, which row_pieces.cu attends to, nobody reads the runs.
  const bool rows_alone = gained[kGainedRuns - 1].kernel < 0;
  if (!rows_alone) lay_gained(table, tail, gained);
  DeviceLane& lane = table.lanes[at];
  const bool in_pieces = rows_alone || is_picture(lane.fused);
  if (side != 0) {
    lane.slots = tail.fixed_slots + tail.packed + tail.full;
    if (!in_pieces) find_splits(table, runs, lane);
    return;
  }
  const int64_t query = row_of(table, number) * table.q_per_kv * table.head_dim;
  lane.first_query = query;
  lane.weights = table.scores + static_cast<int64_t>(number) * table.q_per_kv * table.longest;
  if (table.pieces != nullptr) {
    lay_piece(table, layer, number, at, in_pieces, query, tail);
  }
}

/// Nothing of the ranges of a lane's remaps has been seen. By a warp.
__device__ void clear_ranges(const TableArgs& table, int number) {
  const int count = table.remaps * table.q_per_kv;
  for (int i = static_cast<int>(threadIdx.x % 32); i < count; i += 32) {
    table.ranges[number * count + i] = {INT_MAX, INT_MIN};
  }
}

constexpr int kStoreWarps = 4;

/// A warp stores the new key or value of a lane as the newest of its ring, and says where the other
/// is if the lane is placed. It reads lanes at once, unless it `waits` (store_new_rows()).
__global__ void __launch_bounds__(32 * kStoreWarps)
    store_gained(TableArgs table, int layer, bool waits, const float* k, const float* v) {
  if (waits) wait_for_earlier();
  let_next_start();
  const auto index = static_cast<int>(blockIdx.x * kStoreWarps + threadIdx.x / 32);
  const int number = index / 2;
  const int side = index % 2;
  if (number >= table.rows * table.heads) return wait_for_earlier();
  const int lane = table.lane_at(layer, number);
  const DeviceTail tail = table.tails[lane * 2 + side];
  const int64_t from = row_of(table, number) * table.head_dim;
  wait_for_earlier();
  store_row(tail.ring, table.dtype, tail.place(tail.newest), table.head_dim,
            (side == 0 ? k : v) + from);
  if (side == 0) clear_ranges(table, number);
  if (!tail.placed || threadIdx.x % 32 != 0) return;
  const DeviceTail& other = table.tails[lane * 2 + 1 - side];
  table.other_of(lane, side)[tail.ring_begin() + tail.place(tail.newest)] =
      static_cast<int16_t>(other.ring_begin() + other.place(other.newest));
}

}  // namespace

void count_step(const TableArgs& table, Stream& stream) {
  const int64_t threads = int64_t{2} * table.rows * table.heads * table.layers;
  count_rows<<<static_cast<unsigned>(ceil_div(threads, kCountThreads)), kCountThreads, 0,
               native(stream)>>>(table);
  check_launch("DecodeTable::start");
}

void store_new_rows(const TableArgs& table, int layer, bool waits, const float* k, const float* v,
                    Stream& stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(2 * table.rows * table.heads, kStoreWarps));
  launch_early("DecodeTable::store", store_gained, dim3(blocks), 32 * kStoreWarps, stream, table,
               layer, waits, k, v);
}

}  // namespace kvlm::cuda::packed
