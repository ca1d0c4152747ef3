#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/row_splits.cuh"
#include "kernels/decode_table.h"

// Device-side DecodeTable: the counters and eviction state of every KV head, and the arguments of
// the kernels of this folder. attend_args.cuh has the KV heads and segments, which attention reads
// too.
namespace kvlm::cuda::packed {

/// GrowingRows of a KV head's keys or values, and derived counters.
struct DeviceTail : GrowingRows {
  bool placed;
  int16_t format;
  int16_t flushed;  // 1: the last step packed a window, which is not counted yet
  int newest;       // position after `first` in the ring of the step's token
  int vacated;      // the same for the next token, after an eviction; -1: after the newest
  int fixed_slots;  // slots of the fixed segments
  int16_t targets[kMostFlushedBlocks];  // if placed: the blocks that the next window fills

  /// Counts the window of `rows` tokens if the last step packed it.
  __device__ void count_packed(int rows) {
    if (flushed == 0) return;
    flushed = 0;
    packed += rows;
    full -= rows;
    first = full == 0 ? 0 : place(rows);  // as RowRing::pop()
  }
  /// Ring index of unpacked token i, 0 the oldest.
  __device__ int place(int i) const {
    const int at = first + i;
    return at < ring_rows ? at : at - ring_rows;
  }
  /// First place of the ring (WeighedRows).
  __device__ int ring_begin() const { return fixed_slots + most_blocks * block_rows; }
  /// Slots before the ring.
  __device__ int packed_slots() const { return fixed_slots + packed; }
  /// Place of a slot, if placed: there every place of a block counts as a slot, even an empty one.
  __device__ int place_of_slot(int slot) const {
    return slot < packed_slots() ? slot : ring_begin() + place(slot - packed_slots());
  }
  __device__ int slot_of_place(int at) const {
    if (at < ring_begin()) return at;
    const int row = at - ring_begin() - first;
    return packed_slots() + (row < 0 ? row + ring_rows : row);
  }
};

/// WeighedRows on the GPU, without `came`.
struct DeviceWeighed {
  // By place, or by slot (by_slots). If not placed, scores of `scored` tokens, in token order.
  // Null: not kept.
  float* weights;
  const float* of_numbers;  // if placed: the host's weights or scores, by arrival number
  LeastWeight least;
  int next;          // arrival number of the next token
  int scored;        // tokens with scores; if not placed, those not evicted
  int tail;          // number of the last scored tokens that are never evicted
  bool in_order;     // if placed: when the host set it, tokens were in order
  bool by_slots;     // WeighedRows::by_slots
  int first_places;  // WeighedRows::first_places
};

/// FixedBlock, with the place after its last.
struct DeviceFixedBlock {
  int end;
  int live;
  int bytes;
};

/// RowWindow without its format and rules.
struct DeviceWindow {
  int trigger;
  int rows;
};

/// Arguments of the kernels that count, pack and evict.
struct TableArgs {
  const TableRow* step;
  DeviceHead* heads;            // (slots, layers, heads)
  DeviceSegment* segments;      // (slots, layers, heads, 2 sides, side_segments)
  DeviceTail* tails;            // (slots, layers, heads, 2 sides)
  const DeviceWindow* windows;  // (layers, 2 sides)
  const PackedFormat* formats;
  DeviceWeighed* weighed;  // (slots, layers, heads); null: not kept
  bool compares;           // tokens have weights or scores
  bool scored;             // scores
  const int* together;     // (layers,) layers from this one on that evict alike; 0: not the first
  int* came;               // (slots, layers, heads, weighed_rows)
  // The same shape: place of the value of each place's key, and of the key of each place's value;
  // -1 if the place is empty. Null: no KV head is placed.
  int16_t* value_at;
  int16_t* key_at;
  int* live;                  // (slots, layers, heads, 2 sides, blocks) live tokens of each block
  uint32_t* row_bits;         // (slots, layers, heads, bit_words) PackedRowBits
  DeviceFixedBlock* fixed;    // (slots, layers, heads, 2 sides, fixed_blocks)
  unsigned long long* bytes;  // (slots,) gained by each sequence, modulo 2^64
  TurnedRows* turned;         // (slots, layers, heads); null: no keys are rotated
  const double* waves;        // (TurnedRows.by, 2 turned_half) of find_waves()
  int turned_half;
  float* scores;       // workspace of the step's KV heads
  ScoreRange* ranges;  // AttendArgs::ranges
  int rows;            // of the step
  int layers;
  int kv_heads;
  int side_segments;
  int q_per_kv;
  int head_dim;
  int longest;  // slots of a KV head, at most
  int weighed_rows;
  int weighed_slots;  // of a KV head with weights, at most
  int bit_words;
  int blocks;
  int fixed_blocks;
  int remaps;   // of a KV head, at most
  DType dtype;  // of rings
  // (layers, rows of the step, heads) unpacked tokens for the kernels of row_splits.cu; null: none.
  DeviceRowSplit* row_splits;
  int row_parts;  // parts of one of them, at most

  __device__ int head_at(int layer, int index) const {
    return (step[index / kv_heads].slot * layers + layer) * kv_heads + index % kv_heads;
  }
  __device__ int* came_of(int head) const {
    return came + static_cast<int64_t>(head) * weighed_rows;
  }
  /// (weighed_rows,) of a side: place of each token's other half, its value or key.
  __device__ int16_t* other_of(int head, int side) const {
    return (side == 0 ? value_at : key_at) + static_cast<int64_t>(head) * weighed_rows;
  }
  /// PackedRowBits of a KV head whose DeviceHead::live is not null.
  __device__ uint32_t* row_bits_of(int head) const {
    return row_bits + static_cast<int64_t>(head) * bit_words;
  }
  __device__ int* live_of(int head, int side) const {
    return live + static_cast<int64_t>(head * 2 + side) * blocks;
  }
};

}  // namespace kvlm::cuda::packed
