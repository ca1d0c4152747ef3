#pragma once

#include "kernels/cuda/table/table_args.cuh"

// Removes one row from a ring in place: for drop_rows.cu, placed_drops.cu and row_moves.cu.
namespace kvlm::cuda::packed {

/// Synchronises a block of `kThreads`, or a warp.
template <int kThreads>
__device__ void sync_threads() {
  if constexpr (kThreads == 32) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

/// Closes the gap that row `gap` leaves in a ring of rows of `width` units: the rows before it
/// (from_front) or after it move by one. Units move tile by tile; a tile is read before it is
/// written. By a block of `kThreads`, or by a warp.
template <int kThreads, class Tail, class Unit>
__device__ void close_gap(const Tail& tail, Unit* ring, int width, int gap, bool from_front) {
  constexpr int kUnitsHeld = 8;  // in a thread's registers
  const int moved = (from_front ? gap : tail.full - 1 - gap) * width;
  const auto place = [&](int unit) -> Unit& {
    const int row = from_front ? gap - unit / width : gap + unit / width;
    return ring[static_cast<int64_t>(tail.place(row)) * width + unit % width];
  };
  const auto thread = static_cast<int>(threadIdx.x % kThreads);
  for (int first = thread; first - thread < moved; first += kThreads * kUnitsHeld) {
    Unit held[kUnitsHeld];
#pragma unroll
    for (int i = 0; i < kUnitsHeld; ++i) {
      const int unit = first + i * kThreads;
      if (unit < moved) held[i] = place(unit + width);
    }
    sync_threads<kThreads>();
#pragma unroll
    for (int i = 0; i < kUnitsHeld; ++i) {
      const int unit = first + i * kThreads;
      if (unit < moved) place(unit) = held[i];
    }
    sync_threads<kThreads>();
  }
}

/// The same for the keys or values of a ring.
template <int kThreads>
__device__ void close_gap_of_rows(const DeviceTail& tail, int gap, bool from_front, int row_bytes) {
  if ((row_bytes | static_cast<int64_t>(reinterpret_cast<uintptr_t>(tail.ring))) % 16 == 0) {
    close_gap<kThreads>(tail, reinterpret_cast<int4*>(tail.ring), row_bytes / 16, gap, from_front);
  } else {
    close_gap<kThreads>(tail, reinterpret_cast<uint16_t*>(tail.ring), row_bytes / 2, gap,
                        from_front);
  }
}

}  // namespace kvlm::cuda::packed
