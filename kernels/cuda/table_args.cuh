#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/cuda/attend_args.cuh"
#include "kernels/cuda/row_pieces.cuh"
#include "kernels/decode_table.h"

// What the GPU keeps of a DecodeTable, beside the lanes and runs of attend_args.cuh.
namespace kvlm::cuda::packed {

/// How a run of a DecodeTable is cut into splits when its lane has become longer.
enum class Cut : int8_t {
  kListed,  ///< once, by the host
  kRows,    ///< full rows
  kEven,    ///< blocks that lie evenly
  kSingle,  ///< one block of many rows, by rows
};

/// The rows that a lane gains, of its keys or its values: GrowingRows, and what follows from them.
struct DeviceTail {
  std::byte* ring;
  std::byte* codes;
  std::byte* scales;
  std::byte* zeros;
  int ring_rows;
  int first;
  int full;
  int packed;
  int newest;       // of the ring's rows, where the step's goes
  int vacated;      // the place that the next row takes; -1: the one behind the newest
  int fixed_slots;  // of the lane's runs before
  int code_stride;
  int scale_stride;
  int block_rows;
  int16_t format;
  int16_t flushed;  // the last step has packed a window: its rows are to be counted
  bool shares_codes;

  /// Row i of the ring, 0 the oldest.
  __device__ int place(int i) const {
    const int at = first + i;
    return at < ring_rows ? at : at - ring_rows;
  }
};

/// WeighedRows, as the GPU keeps them; `came` lies apart.
struct DeviceWeighed {
  float* weights;
  LeastWeight least;
  int next;  // number of the next row
};

/// A window as its kernels see it.
struct DeviceWindow {
  int trigger;
  int rows;
};

/// A DecodeTable, to the kernels that count and pack.
struct TableArgs {
  const StepSlot* step;
  DeviceLane* lanes;            // (slots, layers, heads)
  DeviceRun* runs;              // (slots, layers, heads, 2 sides, runs)
  DeviceTail* tails;            // (slots, layers, heads, 2 sides)
  const DeviceWindow* windows;  // (layers, 2 sides)
  const int* parts;             // (layers, 2 sides) splits of a lane, at most
  const PackedFormat* formats;
  DeviceWeighed* weighed;  // (slots, layers, heads); null: rows are not weighed
  int* came;               // (slots, layers, heads, weighed_rows)
  float* scores;           // workspace of all lanes
  int rows;                // of the step
  int layers;
  int heads;
  int side_runs;
  int q_per_kv;
  int head_dim;
  int longest;  // slots of a lane, at most
  int weighed_rows;
  int key_slots;   // of a split of keys, at most
  int weightings;  // of a lane
  DType dtype;     // of rings
  // Full rows that the kernels of row_batch.cu serve, (layers, rows of the step, heads); null:
  // there are none.
  DevicePiece* pieces;
  DeviceRowLane* row_lanes;
  int row_parts;  // of such a lane, at most
  bool pictures;  // they are those of lanes that picture_lanes.cu serves; else of all lanes

  __device__ int lane_at(int layer, int index) const {
    return (step[index / heads].slot * layers + layer) * heads + index % heads;
  }
  __device__ int* came_of(int lane) const {
    return came + static_cast<int64_t>(lane) * weighed_rows;
  }
};

}  // namespace kvlm::cuda::packed
