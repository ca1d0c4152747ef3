#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/row_pieces.cuh"
#include "kernels/decode_table.h"

// What the GPU keeps of a DecodeTable, beside the lanes and runs of attend_args.cuh.
namespace kvlm::cuda::packed {

/// The rows that a lane gains, of its keys or its values: GrowingRows, and what follows from them.
struct DeviceTail : GrowingRows {
  bool placed;
  int16_t format;
  int16_t flushed;  // the last step has packed a window: its rows are to be counted
  int newest;       // of the ring's rows, where the step's goes
  int vacated;      // the place that the next row takes; -1: the one behind the newest
  int fixed_slots;  // of the lane's runs before
  // Of a lane that is placed: the blocks that the next window fills.
  int16_t targets[kMostFlushedBlocks];

  /// Counts the window of `rows` that the last step has packed, if it was full.
  __device__ void count_packed(int rows) {
    if (flushed == 0) return;
    flushed = 0;
    packed += rows;
    full -= rows;
    first = full == 0 ? 0 : place(rows);  // as RowRing::pop()
  }
  /// Row i of the ring, 0 the oldest.
  __device__ int place(int i) const {
    const int at = first + i;
    return at < ring_rows ? at : at - ring_rows;
  }
  /// The first of the ring's places, of all that a lane's rows have (WeighedRows).
  __device__ int ring_begin() const { return fixed_slots + most_blocks * block_rows; }
  /// Slots that are no rows of the ring.
  __device__ int packed_slots() const { return fixed_slots + packed; }
  /// The place of a slot, where blocks' places are slots whether or not a row lies there.
  __device__ int place_of_slot(int slot) const {
    return slot < packed_slots() ? slot : ring_begin() + place(slot - packed_slots());
  }
  __device__ int slot_of_place(int at) const {
    if (at < ring_begin()) return at;
    const int row = at - ring_begin() - first;
    return packed_slots() + (row < 0 ? row + ring_rows : row);
  }
};

/// WeighedRows, as the GPU keeps them; `came` lies apart.
struct DeviceWeighed {
  // By places, or by_slots, or of a lane that is scored and not placed (scored,) in the order of
  // its rows; null: none are kept.
  float* weights;
  const float* of_numbers;  // as they came, of a lane that is placed
  LeastWeight least;
  int next;          // number of the next row
  int scored;        // rows that have scores; of a lane that is not placed those that are left
  int tail;          // the last of them, which stay
  bool in_order;     // when it is set, of a lane that is placed: its rows lie in their order
  bool by_slots;     // WeighedRows::by_slots
  int first_places;  // WeighedRows::first_places
};

/// FixedBlock, up to which row it reaches.
struct DeviceFixedBlock {
  int end;
  int live;
  int bytes;
};

/// A window as its kernels see it.
struct DeviceWindow {
  int trigger;
  int rows;
};

/// A DecodeTable, to the kernels that count and pack.
struct TableArgs {
  const TableRow* step;
  DeviceLane* lanes;            // (slots, layers, heads)
  DeviceRun* runs;              // (slots, layers, heads, 2 sides, runs)
  DeviceTail* tails;            // (slots, layers, heads, 2 sides)
  const DeviceWindow* windows;  // (layers, 2 sides)
  const PackedFormat* formats;
  DeviceWeighed* weighed;  // (slots, layers, heads); null: rows are not weighed
  bool compares;           // they have weights, or scores
  bool scored;             // it is scores
  const int* together;  // (layers,) so many, from each one on, drop the same row; 0: with another
  int* came;            // (slots, layers, heads, weighed_rows)
  // Where lanes may be placed, of the same shape: the place of the value of each place's key, and
  // of the key of each place's value, -1 where no row is; null: none may.
  int16_t* value_at;
  int16_t* key_at;
  int* live;                  // (slots, layers, heads, 2 sides, blocks) rows of each block
  uint32_t* row_bits;         // (slots, layers, heads, bit_words) PackedRowBits
  DeviceFixedBlock* fixed;    // (slots, layers, heads, 2 sides, fixed_blocks)
  unsigned long long* bytes;  // (slots,) that sequences have gained, modulo 2^64
  TurnedRows* turned;         // (slots, layers, heads); null: no rows turn
  const double* waves;        // (TurnedRows.by, 2 turned_half) of find_waves()
  int turned_half;
  float* scores;       // workspace of all lanes
  ScoreRange* ranges;  // AttendArgs::ranges
  int rows;            // of the step
  int layers;
  int heads;
  int side_runs;
  int q_per_kv;
  int head_dim;
  int longest;  // slots of a lane, at most
  int weighed_rows;
  int weighed_slots;  // of a lane whose rows have weights, at most
  int bit_words;
  int blocks;
  int fixed_blocks;
  int remaps;   // of a lane, at most
  DType dtype;  // of rings
  // Full rows that the kernels of row_pieces.cu serve, (layers, rows of the step, heads); null:
  // there are none.
  DevicePiece* pieces;
  int row_parts;  // of such a lane, at most

  __device__ int lane_at(int layer, int index) const {
    return (step[index / heads].slot * layers + layer) * heads + index % heads;
  }
  __device__ int* came_of(int lane) const {
    return came + static_cast<int64_t>(lane) * weighed_rows;
  }
  /// Of a side, where the other side of each place's row is.
  __device__ int16_t* other_of(int lane, int side) const {
    return (side == 0 ? value_at : key_at) + static_cast<int64_t>(lane) * weighed_rows;
  }
  /// Of a lane whose DeviceLane::live is not null.
  __device__ uint32_t* row_bits_of(int lane) const {
    return row_bits + static_cast<int64_t>(lane) * bit_words;
  }
  __device__ int* live_of(int lane, int side) const {
    return live + static_cast<int64_t>(lane * 2 + side) * blocks;
  }
};

}  // namespace kvlm::cuda::packed
