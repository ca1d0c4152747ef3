// Completes the entries of placed KV heads after their upload. placed_drops.cu evicts in place:
//
// No packed token moves. An evicted one's place stays empty until its whole block is empty and a
// window is packed there. Rings stay in order, because their oldest tokens are packed next. Keys
// and values may be packed at different times, so a token's key and value have different places.
// Each stores the other's (TableArgs::value_at, key_at); a key's score is stored at its value's
// place.
#include "kernels/cuda/table/placed_blocks.cuh"
#include "kernels/cuda/table/placed_rows.h"

namespace kvlm::cuda::packed {

namespace {

constexpr int kThreads = 256;

/// Numbers tokens that are in order, and pairs keys with values. By a thread block.
__device__ void lay_in_order(const TableArgs& table, int head) {
  const DeviceTail& keys = table.tails[head * 2];
  const DeviceTail& values = table.tails[head * 2 + 1];
  int* came = table.came_of(head);
  int16_t* value_at = table.other_of(head, 0);
  int16_t* key_at = table.other_of(head, 1);
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
  if (threadIdx.x == 0) table.weighed[head].next = rows;
  __syncthreads();
}

/// Sets PackedRowBits: the places of packed tokens that are not empty. By a thread block.
__device__ void mark_rows(const TableArgs& table, int head) {
  const int* came = table.came_of(head);
  uint32_t* bits = table.row_bits_of(head);
  const int packed = table.tails[head * 2].ring_begin();
  const int words = PackedRowBits::words(packed);
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kThreads) bits[i] = 0;
  __syncthreads();
  for (int place = static_cast<int>(threadIdx.x); place < packed; place += kThreads) {
    if (came[place] == WeighedRows::kNoRow) continue;
    atomicOr(bits + PackedRowBits::kBits + place / 32, 1u << (place % 32));
    atomicAdd(bits, 1u);
  }
}

/// Copies weights or scores from arrival numbers to places. By a thread block.
__device__ __forceinline__ void place_weights(const TableArgs& table, int head) {
  const int* came = table.came_of(head);
  const DeviceWeighed& weighed = table.weighed[head];
  const int apart = weighed.first_places;
  for (int place = static_cast<int>(threadIdx.x); place < table.weighed_rows; place += kThreads) {
    const int number = came[place];
    if (number == WeighedRows::kNoRow) continue;
    if (table.scored) {
      weighed.weights[place] = number < weighed.scored ? weighed.of_numbers[number] : 0;
      continue;
    }
    int before = 0;  // tokens of first_places: older ones, and all
    int all = 0;
    for (int other = 0; other < apart; ++other) {
      before += came[other] < number ? 1 : 0;
      all += came[other] != WeighedRows::kNoRow ? 1 : 0;
    }
    weighed.weights[place] = weighed.of_numbers[place < apart ? before : all + number - before];
  }
}

/// Counts the live tokens of each packed block of a side. By a thread block.
__device__ __forceinline__ void count_live(const TableArgs& table, int head, int side) {
  const DeviceTail& tail = table.tails[head * 2 + side];
  const int16_t* other = table.other_of(head, side);
  int* live = table.live_of(head, side);
  for (int block = static_cast<int>(threadIdx.x); block < tail.most_blocks; block += kThreads) {
    int rows = 0;
    for (int row = 0; row < tail.block_rows; ++row) {
      rows += other[tail.fixed_slots + block * tail.block_rows + row] >= 0 ? 1 : 0;
    }
    live[block] = rows;
  }
}

/// Completes KV head blockIdx.x of a slot.
__global__ void __launch_bounds__(kThreads) begin_heads(TableArgs table, int slot) {
  const int head = slot * table.layers * table.kv_heads + static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0) table.bytes[slot] = 0;
  if (table.weighed[head].in_order) lay_in_order(table, head);
  if (table.compares) place_weights(table, head);
  if (table.heads[head].live != nullptr) mark_rows(table, head);
  for (const int side : {0, 1}) {
    const DeviceTail& tail = table.tails[head * 2 + side];
    count_live(table, head, side);
    if (tail.filling >= 0) clear_rest(table, tail, tail.filling, tail.filled, thread, kThreads);
  }
  __syncthreads();
  for (const int side : {0, 1}) {
    const DeviceTail& tail = table.tails[head * 2 + side];
    // Some rows of an empty block may never have been packed.
    for (int block = 0; block < tail.blocks; ++block) {
      if (table.live_of(head, side)[block] == 0)
        clear_rest(table, tail, block, 0, thread, kThreads);
    }
  }
  __syncthreads();
  if (thread < 2) choose_targets(table, head, thread);
}

}  // namespace

void begin_places(const TableArgs& table, int slot, Stream& stream) {
  begin_heads<<<static_cast<unsigned>(table.layers * table.kv_heads), kThreads, 0,
                native(stream)>>>(table, slot);
  check_launch("DecodeTable::set");
}

}  // namespace kvlm::cuda::packed
