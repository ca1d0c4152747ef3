// Evicts unpacked tokens whose slot the host names, or which have the least score of the prompt.
// Tokens stay in order: the fewer ones on one side of the gap move by one. weigh_rows.cu evicts by
// attention weight without moves, placed_drops.cu evicts packed tokens.
#include "kernels/cuda/table/close_gap.cuh"
#include "kernels/cuda/table/drop_rows.h"
#include "kernels/cuda/table/least_row.cuh"

namespace kvlm::cuda::packed {

namespace {

constexpr int kThreads = 256;

/// The scores of a KV head's tokens, in order, in the form that close_gap() reads.
struct ScoredRows {
  int full;
  __device__ int place(int i) const { return i; }
};

/// The slot of least score; -1: none may be evicted. NaN counts as the greatest. By `kGroup`
/// threads.
template <int kGroup>
__device__ int least_scored(const DeviceWeighed& of) {
  constexpr int kAhead = kGroup == 32 ? 8 : 1;  // loads in flight
  const int end = of.scored - of.tail;
  const auto thread = static_cast<int>(threadIdx.x % kGroup);
  Candidate least{INFINITY, -1, -1};
  for (int first = of.least.first + thread; first < end; first += kGroup * kAhead) {
    float weights[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = first + i * kGroup;
      weights[i] = slot < end ? weight_of(of, slot) : INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = first + i * kGroup;
      const Candidate candidate{weights[i], slot < end ? slot : -1, slot};
      if (goes_first(candidate, least)) least = candidate;
    }
  }
  if constexpr (kGroup == 32) {
    return __shfl_sync(~0u, first_of_warp(least).place, 0);
  } else {
    __shared__ int slot_of_least;
    least = first_of_block<kGroup>(least);
    if (threadIdx.x == 0) slot_of_least = least.place;
    __syncthreads();
    return slot_of_least;
  }
}

/// Removes the score of a slot, if it has one. By `kGroup` threads.
template <int kGroup>
__device__ void close_scores(DeviceWeighed& of, int slot) {
  const int scored = of.scored;
  if (slot >= scored) return;
  close_gap<kGroup>(ScoredRows{scored}, of.weights, 1, slot, /*from_front=*/false);
  sync_threads<kGroup>();  // all have read `scored`
  if (threadIdx.x % kGroup == 0) of.scored = scored - 1;
}

/// Rotates the sinks by one more position, always from their original keys, so that rounding errors
/// do not add up (turn_rows()). By `kGroup` threads.
template <int kGroup, class T>
__device__ void turn(const TableArgs& table, const DeviceTail& keys, TurnedRows& turned) {
  const int half = table.turned_half;
  const double* waves = table.waves + int64_t{turned.by + 1} * 2 * half;
  for (auto i = static_cast<int>(threadIdx.x % kGroup); i < turned.rows * half; i += kGroup) {
    const int row = i / half;
    const int pair = i % half;
    const float* from = turned.keys + static_cast<int64_t>(row) * table.head_dim;
    T* to =
        reinterpret_cast<T*>(keys.ring) + static_cast<int64_t>(keys.place(row)) * table.head_dim;
    const auto a = static_cast<double>(from[pair]);
    const auto b = static_cast<double>(from[pair + half]);
    const double c = waves[pair];
    const double s = waves[pair + half];
    to[pair] = store_float<T>(static_cast<float>(a * c - b * s));
    to[pair + half] = store_float<T>(static_cast<float>(b * c + a * s));
  }
  sync_threads<kGroup>();
  if (threadIdx.x % kGroup == 0) ++turned.by;
}

template <int kGroup>
__device__ void turn_first(const TableArgs& table, int head) {
  const DeviceTail& keys = table.tails[head * 2];
  TurnedRows& turned = table.turned[head];
  switch (table.dtype) {
    case DType::kF16:
      return turn<kGroup, __half>(table, keys, turned);
    case DType::kBF16:
      return turn<kGroup, __nv_bfloat16>(table, keys, turned);
    default:
      return turn<kGroup, float>(table, keys, turned);
  }
}

/// Evicts a slot of one side. By `kGroup` threads.
template <int kGroup>
__device__ void drop(const TableArgs& table, DeviceTail& held, int window, int slot) {
  DeviceTail tail = held;
  tail.count_packed(window);
  const int gap = slot - tail.packed_slots();
  const bool from_front = 2 * gap < tail.full;
  sync_threads<kGroup>();  // all have read `held`
  close_gap_of_rows<kGroup>(tail, gap, from_front,
                            table.head_dim * (table.dtype == DType::kF32 ? 4 : 2));
  if (threadIdx.x % kGroup == 0) {
    held.flushed = tail.flushed;
    held.packed = tail.packed;
    held.first = from_front ? tail.place(1) : tail.first;
    held.full = tail.full - 1;
  }
  sync_threads<kGroup>();
}

/// kGroup threads, a block or a warp, for each side of each KV head of a layer. With scores one
/// group evicts both sides.
template <int kGroup>
__global__ void __launch_bounds__(kThreads) drop_slots(TableArgs table, const int* slots) {
  const auto number = static_cast<int>(blockIdx.x * (kThreads / kGroup) + threadIdx.x / kGroup);
  if (number >= table.rows * table.kv_heads) return;
  const auto layer = static_cast<int>(blockIdx.y);
  int slot = slots[number / table.kv_heads * table.layers + layer];
  const int head = table.head_at(layer, number);
  if (slot == kNoSlot || table.heads[head].placed) return;
  if (slot == kLeastScore) slot = least_scored<kGroup>(table.weighed[head]);
  if (slot < 0) return;
  for (auto side = static_cast<int>(blockIdx.z); side < 2; side += static_cast<int>(gridDim.z)) {
    drop<kGroup>(table, table.tails[head * 2 + side], table.windows[layer * 2 + side].rows, slot);
    if (side == 0 && table.turned != nullptr) turn_first<kGroup>(table, head);
  }
  if (table.scored) close_scores<kGroup>(table.weighed[head], slot);
}

template <int kGroup>
void launch(const TableArgs& table, const int* slots, Stream& stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(table.rows * table.kv_heads, kThreads / kGroup)),
                  static_cast<unsigned>(table.layers), table.scored ? 1 : 2);
  drop_slots<kGroup><<<grid, kThreads, 0, native(stream)>>>(table, slots);
}

}  // namespace

void evict_slots(const TableArgs& table, const int* slots, Stream& stream) {
  // A warp takes longer to move many rows of a ring, but more KV heads run at once.
  const int64_t heads = int64_t{table.rows} * table.kv_heads * table.layers;
  if (heads >= int64_t{64} * stream.queue().multiprocessors()) {
    launch<32>(table, slots, stream);
  } else {
    launch<kThreads>(table, slots, stream);
  }
  check_launch("DecodeTable::evict");
}

}  // namespace kvlm::cuda::packed
