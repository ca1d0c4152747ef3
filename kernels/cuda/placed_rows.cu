// Rows that go where some are packed: by attention weight, or the host names them. No packed row
// moves: its place is empty until all rows of its block are gone and a window is packed there. Keys
// and values leave their windows at different times, so that a slot's key and its value lie in
// different places: each knows the other's (TableArgs::value_at, key_at), and the softmax of a
// layer puts weights from where scores were to where values are. An empty place has no weight.
// Rings stay in order, as their oldest rows are packed next.
#include "kernels/cuda/close_gap.cuh"
#include "kernels/cuda/least_row.cuh"
#include "kernels/cuda/placed_rows.h"

namespace kvlm::cuda::packed {

namespace {

constexpr int kThreads = 256;

/// Nothing of rows [from, block_rows) of a block may make a product that is no number: their scales
/// become 0. By all threads of a block.
__device__ void clear_rest(const TableArgs& table, const DeviceTail& tail, int block, int from) {
  const PackedFormat& format = table.formats[tail.format];
  const int row_bytes = format.groups() * static_cast<int>(dtype_bytes(format.meta));
  const int64_t at = static_cast<int64_t>(block) * tail.scale_stride;
  for (std::byte* meta : {tail.scales, tail.zeros}) {
    if (meta == nullptr) continue;
    auto* bytes = reinterpret_cast<unsigned char*>(meta + at);
    for (int i = from * row_bytes + static_cast<int>(threadIdx.x); i < tail.block_rows * row_bytes;
         i += static_cast<int>(blockDim.x)) {
      bytes[i] = 0;
    }
  }
}

/// Chooses the blocks that the next window of a side fills: the one that is being filled, then such
/// as have no rows, then new ones. By one thread, whenever a block begins or ends, so that it
/// follows from what the lane holds.
__device__ void choose_targets(const TableArgs& table, int lane, int side) {
  DeviceTail& tail = table.tails[lane * 2 + side];
  if (tail.most_blocks == 0) return;
  const int rows = table.windows[lane / table.heads % table.layers * 2 + side].rows;
  const int* live = table.live_of(lane, side);
  const int wanted = (tail.filled + rows + tail.block_rows - 1) / tail.block_rows;
  int count = 0;
  if (tail.filling >= 0) tail.targets[count++] = static_cast<int16_t>(tail.filling);
  for (int block = 0; block < tail.blocks && count < wanted; ++block) {
    if (live[block] == 0 && block != tail.filling) {
      tail.targets[count++] = static_cast<int16_t>(block);
    }
  }
  for (int block = tail.blocks; count < wanted; ++block) {
    tail.targets[count++] = static_cast<int16_t>(block);
  }
}

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

/// Says which places of fixed runs have rows. By all threads of a block.
__device__ void mark_rows(const TableArgs& table, int lane) {
  const int* came = table.came_of(lane);
  uint32_t* bits = table.row_bits_of(lane);
  const int fixed = table.tails[lane * 2].fixed_slots;
  const int words = PackedRowBits::words(fixed);
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kThreads) bits[i] = 0;
  __syncthreads();
  for (int place = static_cast<int>(threadIdx.x); place < fixed; place += kThreads) {
    if (came[place] == WeighedRows::kNoRow) continue;
    atomicOr(bits + PackedRowBits::kBits + place / 32, 1u << (place % 32));
    atomicAdd(bits, 1u);
  }
}

/// Of lane blockIdx.x of a slot: its weights by places, rows of blocks, targets.
__global__ void __launch_bounds__(kThreads) begin_lanes(TableArgs table, int slot) {
  const int lane = slot * table.layers * table.heads + static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread == 0) table.bytes[slot] = 0;
  if (table.weighed[lane].in_order) lay_in_order(table, lane);
  const int* came = table.came_of(lane);
  const DeviceWeighed& weighed = table.weighed[lane];
  const int fixed = table.tails[lane * 2].fixed_slots;
  for (int place = thread; table.weighs && place < table.weighed_rows; place += kThreads) {
    const int number = came[place];
    if (number == WeighedRows::kNoRow) continue;
    int before = 0;  // rows of fixed runs, and how many there are
    int all = 0;
    for (int other = 0; other < fixed; ++other) {
      before += came[other] < number ? 1 : 0;
      all += came[other] != WeighedRows::kNoRow ? 1 : 0;
    }
    const int in_stores = place < fixed ? before : all + number - before;
    weighed.weights[place] = weighed.of_numbers[table.scored ? number : in_stores];
  }
  if (table.lanes[lane].live != nullptr) mark_rows(table, lane);
  for (const int side : {0, 1}) {
    const DeviceTail& tail = table.tails[lane * 2 + side];
    const int16_t* other = table.other_of(lane, side);
    int* live = table.live_of(lane, side);
    for (int block = thread; block < tail.most_blocks; block += kThreads) {
      int rows = 0;
      for (int row = 0; row < tail.block_rows; ++row) {
        rows += other[tail.fixed_slots + block * tail.block_rows + row] >= 0 ? 1 : 0;
      }
      live[block] = rows;
    }
    if (tail.filling >= 0) clear_rest(table, tail, tail.filling, tail.filled);
  }
  __syncthreads();
  for (const int side : {0, 1}) {
    const DeviceTail& tail = table.tails[lane * 2 + side];
    // Of one that the host has given up, some rows may never have been packed.
    for (int block = 0; block < tail.blocks; ++block) {
      if (table.live_of(lane, side)[block] == 0) clear_rest(table, tail, block, 0);
    }
  }
  __syncthreads();
  if (thread < 2) choose_targets(table, lane, thread);
}

constexpr int kWeighThreads = 512;

__device__ float block_reduce(float x, bool maximum, float* parts) {
  x = maximum ? warp_max(x) : warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float all = parts[0];
  for (int i = 1; i < kWeighThreads / 32; ++i) {
    all = maximum ? fmaxf(all, parts[i]) : all + parts[i];
  }
  return all;
}

/// Remaps the scores of a range of slots, of which those that are -INFINITY have no rows.
template <int kHeld>
__device__ void remap_live(const AttendArgs& args, const ScoreRemap& remap, float (&held)[kHeld],
                           float* parts) {
  const auto is_there = [&](int i) {
    const int at = static_cast<int>(threadIdx.x) + i * kWeighThreads - remap.first;
    return at >= 0 && at < remap.slots && held[i] != -INFINITY;
  };
  float low = INFINITY;
  float high = -INFINITY;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!is_there(i)) continue;
    low = fminf(low, held[i]);
    high = fmaxf(high, held[i]);
  }
  low = -block_reduce(-low, true, parts);
  high = block_reduce(high, true, parts);
  if (low > high) return;  // no row is left
  const float slope = remap_slope(args, remap, low, high, threadIdx.x == 0);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (is_there(i)) held[i] = slope * (held[i] - low) + low - remap.tau_low;
  }
}

/// Block (lane, query head), of lanes of at most kHeld * kWeighThreads places of a side that no
/// kernel has served in one pass.
template <int kHeld>
__global__ void __launch_bounds__(kWeighThreads) weigh(TableArgs table, AttendArgs args) {
  __shared__ float parts[kWeighThreads / 32];
  wait_for_earlier();
  let_next_start();
  const int at = table.lane_at(args.layer, static_cast<int>(blockIdx.x));
  const DeviceLane lane = table.lanes[at];
  if (!lane.placed || lane.fused != 0) return;
  const DeviceTail keys = table.tails[at * 2];
  const DeviceTail values = table.tails[at * 2 + 1];
  float* scores = lane.weights + static_cast<int64_t>(blockIdx.y) * lane.slots;
  const int* came = table.came_of(at);
  const int16_t* value_at = table.other_of(at, 0);
  const int16_t* key_at = table.other_of(at, 1);
  const auto first = static_cast<int>(threadIdx.x);
  const int slots = keys.packed_slots() + keys.full;
  float held[kHeld];
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int slot = first + i * kWeighThreads;
    const bool there = slot < slots && came[keys.place_of_slot(slot)] != WeighedRows::kNoRow;
    held[i] = there ? scores[slot] : -INFINITY;
  }
  for (int r = 0; r < lane.remaps; ++r) {
    remap_live<kHeld>(args, args.remaps[lane.first_remap + r], held, parts);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) maximum = fmaxf(maximum, held[i]);
  maximum = block_reduce(maximum, true, parts);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = __expf(held[i] - maximum);
    sum += held[i];
  }
  const float inverse = 1.0f / block_reduce(sum, false, parts);  // all have read their scores
  for (int slot = first; slot < values.packed_slots(); slot += kWeighThreads) {
    if (key_at[slot] < 0) scores[slot] = 0;
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int slot = first + i * kWeighThreads;
    if (slot >= slots) continue;
    const int place = keys.place_of_slot(slot);
    if (came[place] == WeighedRows::kNoRow) continue;
    scores[values.slot_of_place(value_at[place])] = held[i] * inverse;
  }
}

/// Block (lane, slots).
__global__ void __launch_bounds__(kThreads) add_weights(TableArgs table, int layer, bool summed) {
  const int at = table.lane_at(layer, static_cast<int>(blockIdx.x));
  const DeviceLane& lane = table.lanes[at];
  const DeviceTail& keys = table.tails[at * 2];
  const int slot = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  if (slot >= keys.packed_slots() + keys.full) return;
  const int place = keys.place_of_slot(slot);
  if (table.came_of(at)[place] == WeighedRows::kNoRow) return;
  const int value = table.tails[at * 2 + 1].slot_of_place(table.other_of(at, 0)[place]);
  float sum = 0;
  for (int head = 0; head < table.q_per_kv; ++head) {
    sum += lane.weights[static_cast<int64_t>(head) * lane.slots + value];
  }
  float& weight = table.weighed[at].weights[place];
  const bool known = summed && slot != keys.packed_slots() + keys.newest;
  weight = (known ? weight : 0.0f) + sum / static_cast<float>(table.q_per_kv);
}

/// Bytes of a block of `rows` rows, as Plane::Layout::packed_bytes().
__device__ int block_bytes(const TableArgs& table, const DeviceTail& tail, int rows) {
  const PackedFormat& format = table.formats[tail.format];
  return static_cast<int>(static_cast<size_t>(rows) * format.row_bytes() + format.meta_bytes(rows));
}

__device__ int full_row_bytes(const TableArgs& table) {
  return table.head_dim * (table.dtype == DType::kF32 ? 4 : 2);
}

/// Counts the window of a side that pack() has packed, if it was full: its rows have got other
/// places. By all threads of a block, the first of which counts the bytes that the side gains.
__device__ void count_packed(const TableArgs& table, int lane, int side, int rows, int& bytes) {
  DeviceTail& tail = table.tails[lane * 2 + side];
  __syncthreads();  // what was done to this side before is seen
  if (tail.flushed == 0) return;
  int16_t* other = table.other_of(lane, side);
  int16_t* back = table.other_of(lane, 1 - side);
  int* came = table.came_of(lane);
  float* weights = table.weighed[lane].weights;
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += kThreads) {
    const int at = tail.filled + row;
    const int from = tail.ring_begin() + tail.place(row);
    const int to = tail.fixed_slots + tail.targets[at / tail.block_rows] * tail.block_rows +
                   at % tail.block_rows;
    other[to] = other[from];
    back[other[from]] = static_cast<int16_t>(to);
    other[from] = -1;
    if (side != 0) continue;
    if (table.weighs) weights[to] = weights[from];
    came[to] = came[from];
    came[from] = WeighedRows::kNoRow;
  }
  const int filled = tail.filled + rows;
  const int last = (filled - 1) / tail.block_rows;
  const int rest = filled % tail.block_rows;
  if (rest != 0 && (last > 0 || tail.filled == 0)) {
    clear_rest(table, tail, tail.targets[last], rest);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int at = 0; at < filled; at += tail.block_rows) {
    bytes += block_bytes(table, tail, min(tail.block_rows, filled - at));
  }
  if (tail.filled > 0) bytes -= block_bytes(table, tail, tail.filled);
  bytes -= rows * full_row_bytes(table);
  int* live = table.live_of(lane, side);
  for (int at = tail.filled; at < filled; ++at) ++live[tail.targets[at / tail.block_rows]];
  for (int i = 0; i <= last; ++i) tail.blocks = max(tail.blocks, tail.targets[i] + 1);
  tail.filling = rest == 0 ? -1 : tail.targets[last];
  tail.filled = rest;
  tail.packed = tail.blocks * tail.block_rows;
  tail.full -= rows;
  tail.first = tail.full == 0 ? 0 : tail.place(rows);  // as Plane::pop_rows()
  tail.flushed = 0;
  choose_targets(table, lane, side);
}

/// Counts that a row of a fixed run has gone, once for both sides. By one thread.
__device__ void drop_fixed(const TableArgs& table, int lane, int side, int place, int& bytes) {
  if (side != 0) return;
  DeviceFixedBlock* block = table.fixed + static_cast<int64_t>(lane) * table.fixed_blocks;
  if (table.lanes[lane].live != nullptr) {
    uint32_t* bits = table.row_bits_of(lane);
    bits[PackedRowBits::kBits + place / 32] &= ~(1u << (place % 32));
    --bits[0];
  }
  while (place >= block->end) ++block;
  if (--block->live == 0) bytes -= block->bytes;
}

/// Empties a place of a side. By all threads of a block, the first of which counts the bytes.
__device__ void drop_place(const TableArgs& table, int lane, int side, int place, int& bytes) {
  DeviceTail& tail = table.tails[lane * 2 + side];
  int16_t* other = table.other_of(lane, side);
  int* came = table.came_of(lane);
  __syncthreads();
  if (place < tail.ring_begin()) {
    if (threadIdx.x != 0) return;
    other[place] = -1;
    if (side == 0) came[place] = WeighedRows::kNoRow;
    if (place < tail.fixed_slots) return drop_fixed(table, lane, side, place, bytes);
    const int block = (place - tail.fixed_slots) / tail.block_rows;
    if (--table.live_of(lane, side)[block] > 0) return;
    const bool filling = block == tail.filling;
    bytes -= block_bytes(table, tail, filling ? tail.filled : tail.block_rows);
    if (filling) {
      tail.filling = -1;
      tail.filled = 0;
    }
    choose_targets(table, lane, side);
    return;
  }
  const int begin = tail.ring_begin();
  const int gap = tail.slot_of_place(place) - tail.packed_slots();
  const bool from_front = 2 * gap < tail.full;
  const int emptied = tail.place(from_front ? 0 : tail.full - 1);
  close_gap_of_rows<kThreads>(tail, gap, from_front, full_row_bytes(table));
  close_gap<kThreads>(tail, other + begin, 1, gap, from_front);
  if (side == 0) {
    close_gap<kThreads>(tail, came + begin, 1, gap, from_front);
    if (table.weighs) {
      close_gap<kThreads>(tail, table.weighed[lane].weights + begin, 1, gap, from_front);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    other[begin + emptied] = -1;
    if (side == 0) came[begin + emptied] = WeighedRows::kNoRow;
    if (from_front) tail.first = tail.place(1);
    --tail.full;
    bytes -= full_row_bytes(table);
  }
  __syncthreads();
  int16_t* back = table.other_of(lane, 1 - side);
  for (int row = static_cast<int>(threadIdx.x); row < tail.full; row += kThreads) {
    const int at = begin + tail.place(row);
    back[other[at]] = static_cast<int16_t>(at);
  }
}

/// The place of keys whose row goes, of lanes that drop alike; -1: none. By all threads of a block.
__device__ int least_place(const TableArgs& table, int first, int heads) {
  __shared__ int place_of_least;
  const DeviceTail& keys = table.tails[first * 2];
  const LeastWeight& rule = table.weighed[first].least;
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

/// The number of the row of a lane's slot, counted in the order in which rows came. By all threads
/// of a block, with a bit for each number.
__device__ int number_of_slot(const TableArgs& table, int lane, int slot, unsigned* bits) {
  __shared__ int of_warps[kThreads / 32];
  __shared__ int number;
  const DeviceTail keys = table.tails[lane * 2];
  const int* came = table.came_of(lane);
  const auto thread = static_cast<int>(threadIdx.x);
  const int words = table.weighed[lane].next / 32 + 1;
  for (int word = thread; word < words; word += kThreads) bits[word] = 0;
  __syncthreads();
  for (int at = thread; at < keys.packed_slots() + keys.full; at += kThreads) {
    const int row = came[keys.place_of_slot(at)];
    if (row != WeighedRows::kNoRow) atomicOr(bits + row / 32, 1u << (row % 32));
  }
  __syncthreads();
  const int share = (words + kThreads - 1) / kThreads;  // words of a thread, side by side
  const int end = min(words, (thread + 1) * share);
  int count = 0;
  for (int word = thread * share; word < end; ++word) count += __popc(bits[word]);
  int up_to = count;  // rows of this thread and those before it, of its warp
  for (int away = 1; away < 32; away *= 2) {
    const int theirs = __shfl_up_sync(~0u, up_to, away);
    if (thread % 32 >= away) up_to += theirs;
  }
  if (thread % 32 == 31) of_warps[thread / 32] = up_to;
  __syncthreads();
  int left = slot - (up_to - count);
  for (int warp = 0; warp < thread / 32; ++warp) left -= of_warps[warp];
  if (left >= 0 && left < count) {
    int word = thread * share;
    for (; left >= __popc(bits[word]); ++word) left -= __popc(bits[word]);
    unsigned rest = bits[word];
    for (; left > 0; --left) rest &= rest - 1;
    number = word * 32 + __ffs(static_cast<int>(rest)) - 1;
  }
  __syncthreads();
  return number;
}

/// The place of keys where it lies. By all threads of a block.
__device__ int place_of_number(const TableArgs& table, int lane, int number) {
  __shared__ int found;
  const DeviceTail keys = table.tails[lane * 2];
  const int* came = table.came_of(lane);
  for (int at = static_cast<int>(threadIdx.x); at < keys.packed_slots() + keys.full;
       at += kThreads) {
    const int place = keys.place_of_slot(at);
    if (came[place] == number) found = place;
  }
  __syncthreads();
  return found;
}

/// Block (sequence and group of `heads` lanes that drop alike, layer): by weight, or if there are
/// `slots` those, of which each lane chooses its own that go by score.
__global__ void __launch_bounds__(kThreads)
    drop_rows(TableArgs table, int heads, const int* slots) {
  extern __shared__ unsigned bits[];
  const auto layer = static_cast<int>(blockIdx.y);
  const int number = static_cast<int>(blockIdx.x) * heads;  // of the first lane, in the step
  const int first = table.lane_at(layer, number);
  if (!table.lanes[first].placed) return;
  int bytes = 2 * heads * full_row_bytes(table);  // the step's rows
  for (int lane = first; lane < first + heads; ++lane) {
    for (const int side : {0, 1}) {
      count_packed(table, lane, side, table.windows[layer * 2 + side].rows, bytes);
    }
  }
  __syncthreads();
  int place = -1;
  const int slot =
      slots == nullptr ? kLeastScore : slots[number / table.heads * table.layers + layer];
  if (slot == kLeastScore) {
    place = least_place(table, first, heads);
  } else if (slot != kNoSlot) {
    place = place_of_number(table, first, number_of_slot(table, first, slot, bits));
  }
  for (int lane = first; lane < first + heads && place >= 0; ++lane) {
    const int value = table.other_of(lane, 0)[place];
    drop_place(table, lane, 0, place, bytes);
    drop_place(table, lane, 1, value, bytes);
  }
  if (threadIdx.x != 0) return;
  atomicAdd(table.bytes + first / (table.layers * table.heads),
            static_cast<unsigned long long>(static_cast<long long>(bytes)));
}

}  // namespace

void begin_places(const TableArgs& table, int slot, Stream& stream) {
  begin_lanes<<<static_cast<unsigned>(table.layers * table.heads), kThreads, 0, native(stream)>>>(
      table, slot);
  check_launch("DecodeTable::set");
}

void weigh_places(const TableArgs& table, const AttendArgs& args, Stream& stream) {
  const dim3 grid(static_cast<unsigned>(table.rows * table.heads),
                  static_cast<unsigned>(table.q_per_kv));
  const auto weighed = [&](auto kernel) {
    launch_early("DecodeTable::attend", kernel, grid, kWeighThreads, stream, table, args);
  };
  if (table.most_places <= 4 * kWeighThreads) return weighed(weigh<4>);
  if (table.most_places <= 8 * kWeighThreads) return weighed(weigh<8>);
  if (table.most_places <= 16 * kWeighThreads) return weighed(weigh<16>);
  weighed(weigh<kMostPlaces / kWeighThreads>);
}

void add_place_weights(const TableArgs& table, int layer, bool summed, Stream& stream) {
  const dim3 grid(static_cast<unsigned>(table.rows * table.heads),
                  static_cast<unsigned>(ceil_div(table.most_places, kThreads)));
  add_weights<<<grid, kThreads, 0, native(stream)>>>(table, layer, summed);
  check_launch("DecodeTable::attend");
}

void drop_least_placed(const TableArgs& table, bool alike, Stream& stream) {
  const int heads = alike ? table.heads : 1;
  const dim3 grid(static_cast<unsigned>(table.rows * table.heads / heads),
                  static_cast<unsigned>(table.layers));
  drop_rows<<<grid, kThreads, 0, native(stream)>>>(table, heads, nullptr);
  check_launch("DecodeTable::drop_least");
}

void evict_placed(const TableArgs& table, const int* slots, Stream& stream) {
  const dim3 grid(static_cast<unsigned>(table.rows * table.heads),
                  static_cast<unsigned>(table.layers));
  const size_t words = static_cast<size_t>(table.longest) / 32 + 1;
  drop_rows<<<grid, kThreads, words * sizeof(unsigned), native(stream)>>>(table, 1, slots);
  check_launch("DecodeTable::evict");
}

}  // namespace kvlm::cuda::packed
