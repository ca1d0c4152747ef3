// Full rows that go because the host names their slot, or that the least of the prompt's scores
// does: rows stay in the order of the tokens, those on one side of the gap move by a place.
#include "kernels/cuda/close_gap.cuh"
#include "kernels/cuda/drop_rows.h"
#include "kernels/cuda/least_row.cuh"

namespace kvlm::cuda::packed {

namespace {

constexpr int kThreads = 256;

/// Of the rows that have scores, the slot that goes. By all threads of a block.
__device__ int least_scored(const DeviceWeighed& of) {
  __shared__ int slot_of_least;
  const int end = of.scored - of.tail;
  Candidate least{INFINITY, -1, -1};
  for (int slot = of.least.first + static_cast<int>(threadIdx.x); slot < end; slot += kThreads) {
    const Candidate candidate{of.weights[slot], slot, slot};
    if (goes_first(candidate, least)) least = candidate;
  }
  least = first_of_block<kThreads>(least);
  if (threadIdx.x == 0) slot_of_least = least.place;
  __syncthreads();
  return slot_of_least;
}

/// Drops a score, if there is one of this slot. By all threads of a block.
__device__ void close_scores(DeviceWeighed& of, int slot) {
  const int left = of.scored - 1;
  if (slot > left) return;
  for (int first = slot; first < left; first += kThreads) {
    const int at = first + static_cast<int>(threadIdx.x);
    const float next = at < left ? of.weights[at + 1] : 0;
    __syncthreads();
    if (at < left) of.weights[at] = next;
    __syncthreads();
  }
  __syncthreads();  // all have read how many there were
  if (threadIdx.x == 0) of.scored = left;
}

/// Turns the first rows of a ring of keys by a position more: always from how they came, so that
/// roundings do not add up (turn_rows()). By all threads of a block.
template <class T>
__device__ void turn(const TableArgs& table, const DeviceTail& keys, TurnedRows& turned) {
  const int half = table.turned_half;
  const double* waves = table.waves + int64_t{turned.by + 1} * 2 * half;
  for (int i = static_cast<int>(threadIdx.x); i < turned.rows * half; i += kThreads) {
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
  __syncthreads();
  if (threadIdx.x == 0) ++turned.by;
}

__device__ void turn_first(const TableArgs& table, int lane) {
  const DeviceTail& keys = table.tails[lane * 2];
  TurnedRows& turned = table.turned[lane];
  switch (table.dtype) {
    case DType::kF16:
      return turn<__half>(table, keys, turned);
    case DType::kBF16:
      return turn<__nv_bfloat16>(table, keys, turned);
    default:
      return turn<float>(table, keys, turned);
  }
}

/// Drops a slot of a side. By all threads of a block.
__device__ void drop(const TableArgs& table, DeviceTail& held, int window, int slot) {
  DeviceTail tail = held;
  tail.count_packed(window);
  const int gap = slot - tail.packed_slots();
  const bool from_front = 2 * gap < tail.full;
  __syncthreads();  // all have read
  close_gap_of_rows<kThreads>(tail, gap, from_front,
                              table.head_dim * (table.dtype == DType::kF32 ? 4 : 2));
  if (threadIdx.x == 0) {
    if (from_front) tail.first = tail.place(1);
    --tail.full;
    held = tail;
  }
  __syncthreads();
}

/// Block (lane, layer, side), or if rows have scores (lane, layer) for both.
__global__ void __launch_bounds__(kThreads) drop_slots(TableArgs table, const int* slots) {
  const auto number = static_cast<int>(blockIdx.x);
  const auto layer = static_cast<int>(blockIdx.y);
  int slot = slots[number / table.heads * table.layers + layer];
  const int lane = table.lane_at(layer, number);
  if (slot == kNoSlot || table.lanes[lane].placed) return;
  if (slot == kLeastScore) slot = least_scored(table.weighed[lane]);
  for (auto side = static_cast<int>(blockIdx.z); side < 2; side += static_cast<int>(gridDim.z)) {
    drop(table, table.tails[lane * 2 + side], table.windows[layer * 2 + side].rows, slot);
    if (side == 0 && table.turned != nullptr) turn_first(table, lane);
  }
  if (table.scored) close_scores(table.weighed[lane], slot);
}

}  // namespace

void evict_slots(const TableArgs& table, const int* slots, Stream& stream) {
  const dim3 grid(static_cast<unsigned>(table.rows * table.heads),
                  static_cast<unsigned>(table.layers), table.scored ? 1 : 2);
  drop_slots<<<grid, kThreads, 0, native(stream)>>>(table, slots);
  check_launch("DecodeTable::evict");
}

}  // namespace kvlm::cuda::packed
