// End of a step for placed KV heads (placed_rows.cu): counts the packed windows, then evicts one
// token by weight, score or slot. One thread block per layer of a sequence, or per group of layers
// that evict alike; one warp per KV head.
#include <algorithm>

#include "kernels/cuda/table/close_gap.cuh"
#include "kernels/cuda/table/least_row.cuh"
#include "kernels/cuda/table/placed_blocks.cuh"
#include "kernels/cuda/table/placed_rows.h"

namespace kvlm::cuda::packed {

namespace {

constexpr int kThreads = 256;
constexpr int kTogether = 8;  // loads of a thread in flight

__device__ int warp_lane() { return static_cast<int>(threadIdx.x % 32); }

/// Bytes of a block of `rows` rows, as BufferLayout::packed_bytes().
__device__ int block_bytes(const TableArgs& table, const DeviceTail& tail, int rows) {
  const PackedFormat& format = table.formats[tail.format];
  const size_t codes = tail.owns_codes ? static_cast<size_t>(rows) * format.row_bytes() : 0;
  return static_cast<int>(codes + format.meta_bytes(rows));
}

__device__ int full_row_bytes(const TableArgs& table) {
  return table.head_dim * (table.dtype == DType::kF32 ? 4 : 2);
}

/// Moves the places of a packed window's `rows` tokens from the ring to their blocks. By a warp.
__device__ __forceinline__ void note_packed(const TableArgs& table, int head, int side, int rows) {
  const DeviceTail& tail = table.tails[head * 2 + side];
  int16_t* other = table.other_of(head, side);
  int16_t* back = table.other_of(head, 1 - side);
  int* came = table.came_of(head);
  float* weights = table.weighed[head].weights;
  uint32_t* bits = table.heads[head].live == nullptr ? nullptr : table.row_bits_of(head);
  for (int row = warp_lane(); row < rows; row += 32) {
    const int at = tail.filled + row;
    const int from = tail.ring_begin() + tail.place(row);
    const int to = tail.fixed_slots + tail.targets[at / tail.block_rows] * tail.block_rows +
                   at % tail.block_rows;
    other[to] = other[from];
    back[other[from]] = static_cast<int16_t>(to);
    other[from] = -1;
    if (side != 0) continue;
    if (table.compares) weights[to] = weights[from];
    came[to] = came[from];
    came[from] = WeighedRows::kNoRow;
    if (bits == nullptr) continue;
    atomicOr(bits + PackedRowBits::kBits + to / 32, 1u << (to % 32));
    atomicAdd(bits, 1u);
  }
}

/// Counts the window of a side if pack() packed it, and adds the bytes gained. By a warp.
__device__ void count_packed(const TableArgs& table, int head, int side, int rows, int& bytes) {
  DeviceTail& tail = table.tails[head * 2 + side];
  __syncwarp();  // see earlier writes to this side
  if (tail.flushed == 0) return;
  note_packed(table, head, side, rows);
  const int filled = tail.filled + rows;
  const int last = (filled - 1) / tail.block_rows;
  const int rest = filled % tail.block_rows;
  if (rest != 0 && (last > 0 || tail.filled == 0)) {
    clear_rest(table, tail, tail.targets[last], rest, warp_lane(), 32);
  }
  __syncwarp();
  if (warp_lane() != 0) return;
  for (int at = 0; at < filled; at += tail.block_rows) {
    bytes += block_bytes(table, tail, min(tail.block_rows, filled - at));
  }
  if (tail.filled > 0) bytes -= block_bytes(table, tail, tail.filled);
  bytes -= rows * full_row_bytes(table);
  int* live = table.live_of(head, side);
  for (int at = tail.filled; at < filled; ++at) ++live[tail.targets[at / tail.block_rows]];
  for (int i = 0; i <= last; ++i) tail.blocks = max(tail.blocks, tail.targets[i] + 1);
  tail.filling = rest == 0 ? -1 : tail.targets[last];
  tail.filled = rest;
  tail.packed = tail.blocks * tail.block_rows;
  tail.full -= rows;
  tail.first = tail.full == 0 ? 0 : tail.place(rows);  // as RowRing::pop()
  tail.flushed = 0;
  choose_targets(table, head, side);
}

/// Counts an evicted token of a fixed segment. By one thread.
__device__ void drop_fixed(const TableArgs& table, int head, int side, int place, int& bytes) {
  DeviceFixedBlock* block =
      table.fixed + static_cast<int64_t>(head * 2 + side) * table.fixed_blocks;
  while (place >= block->end) ++block;
  if (--block->live == 0) bytes -= block->bytes;
}

/// Empties the place of a packed token. By one thread.
__device__ __forceinline__ void drop_packed(const TableArgs& table, int head, int side, int place,
                                            int& bytes) {
  DeviceTail& tail = table.tails[head * 2 + side];
  table.other_of(head, side)[place] = -1;
  if (side == 0) table.came_of(head)[place] = WeighedRows::kNoRow;
  if (side == 0 && table.heads[head].live != nullptr) {
    uint32_t* bits = table.row_bits_of(head);
    bits[PackedRowBits::kBits + place / 32] &= ~(1u << (place % 32));
    --bits[0];
  }
  if (place < tail.fixed_slots) return drop_fixed(table, head, side, place, bytes);
  const int block = (place - tail.fixed_slots) / tail.block_rows;
  if (--table.live_of(head, side)[block] > 0) return;
  const bool filling = block == tail.filling;
  bytes -= block_bytes(table, tail, filling ? tail.filled : tail.block_rows);
  if (filling) {
    tail.filling = -1;
    tail.filled = 0;
  }
  choose_targets(table, head, side);
}

/// Evicts the token at a place of one side, and counts the bytes. By a warp, whose first thread has
/// the count. In the ring the other tokens close the gap.
__device__ void drop_place(const TableArgs& table, int head, int side, int place, int& bytes) {
  DeviceTail& tail = table.tails[head * 2 + side];
  int16_t* other = table.other_of(head, side);
  int* came = table.came_of(head);
  __syncwarp();
  if (place < tail.ring_begin()) {
    if (warp_lane() == 0) drop_packed(table, head, side, place, bytes);
    return;
  }
  const int begin = tail.ring_begin();
  const int gap = tail.slot_of_place(place) - tail.packed_slots();
  const bool from_front = 2 * gap < tail.full;
  const int emptied = tail.place(from_front ? 0 : tail.full - 1);
  close_gap_of_rows<32>(tail, gap, from_front, full_row_bytes(table));
  close_gap<32>(tail, other + begin, 1, gap, from_front);
  if (side == 0) {
    close_gap<32>(tail, came + begin, 1, gap, from_front);
    if (table.compares) {
      close_gap<32>(tail, table.weighed[head].weights + begin, 1, gap, from_front);
    }
  }
  __syncwarp();
  if (warp_lane() == 0) {
    other[begin + emptied] = -1;
    if (side == 0) came[begin + emptied] = WeighedRows::kNoRow;
    if (from_front) tail.first = tail.place(1);
    --tail.full;
    bytes -= full_row_bytes(table);
  }
  __syncwarp();
  int16_t* back = table.other_of(head, 1 - side);
  for (int row = warp_lane(); row < tail.full; row += 32) {
    const int at = begin + tail.place(row);
    back[other[at]] = static_cast<int16_t>(at);
  }
}

/// Place of the key of least weight or score in a KV head; -1: none may be evicted. By a warp.
__device__ int least_place(const TableArgs& table, int head) {
  const DeviceTail keys = table.tails[head * 2];
  const DeviceWeighed of = table.weighed[head];
  const int* came = table.came_of(head);
  Candidate least{INFINITY, -1, -1};
#pragma unroll kTogether
  for (int slot = warp_lane(); slot < keys.packed_slots() + keys.full; slot += 32) {
    const int place = keys.place_of_slot(slot);
    if (!of.least.may_drop(came[place], of.next)) continue;
    const Candidate candidate{weight_of(of, place), came[place], place};
    if (goes_first(candidate, least)) least = candidate;
  }
  least = first_of_warp(least);
  return __shfl_sync(~0u, least.came < 0 ? -1 : least.place, 0);
}

/// The same for `heads` KV heads together, by mean weight. By a thread block.
__device__ int least_alike(const TableArgs& table, int first, int heads) {
  __shared__ int place_of_least;
  const DeviceTail keys = table.tails[first * 2];
  const LeastWeight rule = table.weighed[first].least;
  const int next = table.weighed[first].next;
  const int* came = table.came_of(first);
  Candidate least{INFINITY, -1, -1};
  for (int slot = static_cast<int>(threadIdx.x); slot < keys.packed_slots() + keys.full;
       slot += kThreads) {
    const int place = keys.place_of_slot(slot);
    if (!rule.may_drop(came[place], next)) continue;
    const Candidate candidate{mean_weight(table, first, heads, place), came[place], place};
    if (goes_first(candidate, least)) least = candidate;
  }
  least = first_of_block<kThreads>(least);
  if (threadIdx.x == 0) place_of_least = least.came < 0 ? -1 : least.place;
  __syncthreads();
  return place_of_least;
}

/// Arrival number of a KV head's token number `slot`, counted in arrival order. By a warp.
///   bits  shared memory, one bit per arrival number
__device__ int number_of_slot(const TableArgs& table, int head, int slot, unsigned* bits) {
  const DeviceTail keys = table.tails[head * 2];
  const int* came = table.came_of(head);
  const int words = table.weighed[head].next / 32 + 1;
  for (int word = warp_lane(); word < words; word += 32) bits[word] = 0;
  __syncwarp();
#pragma unroll kTogether
  for (int at = warp_lane(); at < keys.packed_slots() + keys.full; at += 32) {
    const int row = came[keys.place_of_slot(at)];
    if (row != WeighedRows::kNoRow) atomicOr(bits + row / 32, 1u << (row % 32));
  }
  __syncwarp();
  const int share = (words + 31) / 32;  // adjacent words of a thread
  const int first = warp_lane() * share;
  int count = 0;
  for (int word = first; word < min(words, first + share); ++word) count += __popc(bits[word]);
  int up_to = count;  // tokens up to this thread's
  for (int away = 1; away < 32; away *= 2) {
    const int theirs = __shfl_up_sync(~0u, up_to, away);
    if (warp_lane() >= away) up_to += theirs;
  }
  int left = slot - (up_to - count);
  const bool is_here = left >= 0 && left < count;
  int number = 0;
  if (is_here) {
    int word = first;
    for (; left >= __popc(bits[word]); ++word) left -= __popc(bits[word]);
    unsigned rest = bits[word];
    for (; left > 0; --left) rest &= rest - 1;
    number = word * 32 + __ffs(static_cast<int>(rest)) - 1;
  }
  return __shfl_sync(~0u, number, __ffs(static_cast<int>(__ballot_sync(~0u, is_here))) - 1);
}

/// Place of the key with an arrival number. By a warp.
__device__ int place_of_number(const TableArgs& table, int head, int number) {
  const DeviceTail keys = table.tails[head * 2];
  const int* came = table.came_of(head);
  int found = -1;
#pragma unroll kTogether
  for (int at = warp_lane(); at < keys.packed_slots() + keys.full; at += 32) {
    const int place = keys.place_of_slot(at);
    if (came[place] == number) found = place;
  }
  const unsigned who = __ballot_sync(~0u, found >= 0);
  return __shfl_sync(~0u, found, __ffs(static_cast<int>(who)) - 1);
}

/// Block (sequence, layer).
///   alike  KV heads of a layer, or of a group of layers, evict the same token, by mean weight
///   slots  of DecodeTable::evict(); null: all kLeastScore
///   words  of a warp's bitmap in number_of_slot()
__global__ void __launch_bounds__(kThreads)
    drop_placed(TableArgs table, bool alike, const int* slots, int words) {
  extern __shared__ unsigned bits[];
  __shared__ int gained;  // bytes
  const auto row = static_cast<int>(blockIdx.x);
  const auto layer = static_cast<int>(blockIdx.y);
  const int first = table.head_at(layer, row * table.kv_heads);
  const int heads = table.kv_heads * table.together[layer];
  if (heads == 0 || !table.heads[first].placed) return;
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto warps = static_cast<int>(blockDim.x / 32);
  if (threadIdx.x == 0) gained = 0;
  __syncthreads();
  int bytes = 0;
  for (int head = first + warp; head < first + heads; head += warps) {
    bytes += 2 * full_row_bytes(table);  // the step's row
    const DeviceWindow* windows = table.windows + head / table.kv_heads % table.layers * 2;
    for (const int side : {0, 1}) count_packed(table, head, side, windows[side].rows, bytes);
  }
  __syncthreads();
  const int slot = slots == nullptr ? kLeastScore : slots[row * table.layers + layer];
  int place = alike && slot == kLeastScore ? least_alike(table, first, heads) : -1;
  for (int head = first + warp; head < first + heads; head += warps) {
    if (slot == kLeastScore && !alike) {
      place = least_place(table, heads > table.kv_heads ? first : head);
    } else if (slot >= 0) {
      place = place_of_number(table, head, number_of_slot(table, head, slot, bits + warp * words));
    }
    if (place < 0) continue;
    const int value = table.other_of(head, 0)[place];
    drop_place(table, head, 0, place, bytes);
    drop_place(table, head, 1, value, bytes);
  }
  if (warp_lane() == 0) atomicAdd(&gained, bytes);
  __syncthreads();
  if (threadIdx.x != 0) return;
  atomicAdd(table.bytes + first / (table.layers * table.kv_heads),
            static_cast<unsigned long long>(static_cast<long long>(gained)));
}

dim3 grid_of(const TableArgs& table) {
  return {static_cast<unsigned>(table.rows), static_cast<unsigned>(table.layers)};
}

}  // namespace

void drop_least_placed(const TableArgs& table, bool alike, Stream& stream) {
  drop_placed<<<grid_of(table), kThreads, 0, native(stream)>>>(table, alike, nullptr, 0);
  check_launch("DecodeTable::drop_least");
}

void evict_placed(const TableArgs& table, bool alike, const int* slots, Stream& stream) {
  constexpr int kMostWords = (12 << 10) - 64;  // of a block, next to its static shared memory
  // With weights no slot is named, and the choice needs all threads.
  const int words = table.compares && !table.scored ? 0 : table.longest / 32 + 1;
  const int warps = words == 0 ? kThreads / 32 : std::clamp(kMostWords / words, 1, kThreads / 32);
  const size_t bytes = static_cast<size_t>(warps) * static_cast<size_t>(words) * sizeof(unsigned);
  drop_placed<<<grid_of(table), static_cast<unsigned>(32 * warps), bytes, native(stream)>>>(
      table, alike, slots, words);
  check_launch("DecodeTable::evict");
}

}  // namespace kvlm::cuda::packed
