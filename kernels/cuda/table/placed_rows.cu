// Rows that go where some are packed: where they lie, and how they are weighed. No packed row
// moves: its place is empty until all rows of its block are gone and a window is packed there. Keys
// and values leave their windows at different times, so that a slot's key and its value lie in
// different places: each knows the other's (TableArgs::value_at, key_at), and the score of a
// key is stored where its value is. An empty place has no weight.
// Rings stay in order, as their oldest rows are packed next.
#include "kernels/cuda/table/placed_blocks.cuh"
#include "kernels/cuda/table/placed_rows.h"

namespace kvlm::cuda::packed {

namespace {

constexpr int kThreads = 256;

/// Says where the rows of a lane lie that has lost none. By all threads of a block.
__device__ void lay_in_order(const TableArgs& table, int lane) {
  const DeviceTail& keys = table.tails[lane * 2];
  const DeviceTail& values = table.tails[lane * 2 + 1];
  int* came = table.came_of(lane);
  int16_t* value_at = table.other_of(lane, 0);
  int16_t* key_at = table.other_of(lane, 1);
  for (int place = static_cast<int>(threadIdx.x); place < table.weighed_rows; place += kThreads) {
    came[place] = WeighedRows::kNoRow;
    value_at[place] = key_at[place] = -1;
  }
  __syncthreads();
  const auto packed = [](const DeviceTail& tail) {
    return tail.filling < 0 ? tail.packed : tail.packed - tail.block_rows + tail.filled;
  };
  const auto place_of = [&](const DeviceTail& tail, int row) {
    return row < packed(tail) ? row : tail.ring_begin() + tail.place(row - packed(tail));
  };
  const int rows = packed(keys) + keys.full;
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += kThreads) {
    const int key = place_of(keys, row);
    const int value = place_of(values, row);
    came[key] = row;
    value_at[key] = static_cast<int16_t>(value);
    key_at[value] = static_cast<int16_t>(key);
  }
  if (threadIdx.x == 0) table.weighed[lane].next = rows;
  __syncthreads();
}

/// Says which places of packed rows have rows. By all threads of a block.
__device__ void mark_rows(const TableArgs& table, int lane) {
  const int* came = table.came_of(lane);
  uint32_t* bits = table.row_bits_of(lane);
  const int packed = table.tails[lane * 2].ring_begin();
  const int words = PackedRowBits::words(packed);
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kThreads) bits[i] = 0;
  __syncthreads();
  for (int place = static_cast<int>(threadIdx.x); place < packed; place += kThreads) {
    if (came[place] == WeighedRows::kNoRow) continue;
    atomicOr(bits + PackedRowBits::kBits + place / 32, 1u << (place % 32));
    atomicAdd(bits, 1u);
  }
}

/// Gives places the weights, or scores, of their rows. By all threads of a block.
__device__ __forceinline__ void place_weights(const TableArgs& table, int lane) {
  const int* came = table.came_of(lane);
  const DeviceWeighed& weighed = table.weighed[lane];
  const int apart = weighed.first_places;
  for (int place = static_cast<int>(threadIdx.x); place < table.weighed_rows; place += kThreads) {
    const int number = came[place];
    if (number == WeighedRows::kNoRow) continue;
    if (table.scored) {
      weighed.weights[place] = number < weighed.scored ? weighed.of_numbers[number] : 0;
      continue;
    }
    int before = 0;  // rows whose weights come first, and how many there are
    int all = 0;
    for (int other = 0; other < apart; ++other) {
      before += came[other] < number ? 1 : 0;
      all += came[other] != WeighedRows::kNoRow ? 1 : 0;
    }
    weighed.weights[place] = weighed.of_numbers[place < apart ? before : all + number - before];
  }
}

/// Counts the rows of each block of a side. By all threads of a block.
__device__ __forceinline__ void count_live(const TableArgs& table, int lane, int side) {
  const DeviceTail& tail = table.tails[lane * 2 + side];
  const int16_t* other = table.other_of(lane, side);
  int* live = table.live_of(lane, side);
  for (int block = static_cast<int>(threadIdx.x); block < tail.most_blocks; block += kThreads) {
    int rows = 0;
    for (int row = 0; row < tail.block_rows; ++row) {
      rows += other[tail.fixed_slots + block * tail.block_rows + row] >= 0 ? 1 : 0;
    }
    live[block] = rows;
  }
}

/// Of lane blockIdx.x of a slot: its weights by places, rows of blocks, targets.
__global__ void __launch_bounds__(kThreads) begin_lanes(TableArgs table, int slot) {
  const int lane = slot * table.layers * table.heads + static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0) table.bytes[slot] = 0;
  if (table.weighed[lane].in_order) lay_in_order(table, lane);
  if (table.compares) place_weights(table, lane);
  if (table.lanes[lane].live != nullptr) mark_rows(table, lane);
  for (const int side : {0, 1}) {
    const DeviceTail& tail = table.tails[lane * 2 + side];
    count_live(table, lane, side);
    if (tail.filling >= 0) clear_rest(table, tail, tail.filling, tail.filled, thread, kThreads);
  }
  __syncthreads();
  for (const int side : {0, 1}) {
    const DeviceTail& tail = table.tails[lane * 2 + side];
    // Of one that the host has given up, some rows may never have been packed.
    for (int block = 0; block < tail.blocks; ++block) {
      if (table.live_of(lane, side)[block] == 0)
        clear_rest(table, tail, block, 0, thread, kThreads);
    }
  }
  __syncthreads();
  if (thread < 2) choose_targets(table, lane, thread);
}

}  // namespace

void begin_places(const TableArgs& table, int slot, Stream& stream) {
  begin_lanes<<<static_cast<unsigned>(table.layers * table.heads), kThreads, 0, native(stream)>>>(
      table, slot);
  check_launch("DecodeTable::set");
}

}  // namespace kvlm::cuda::packed
