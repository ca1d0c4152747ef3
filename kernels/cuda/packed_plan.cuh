#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attend_packed.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/packed_format.h"

// A layer's lanes as the host describes them to the kernels of attend_packed.
namespace kvlm::cuda::packed {

struct DeviceBlock {
  const std::byte* codes;
  const std::byte* scales;
  const std::byte* zeros;
  const uint64_t* live;
  int rows;
  int first_slot;  // of the lane
};

struct DeviceRun {
  const std::byte* rows;  // null: packed
  const float* q;
  const uint64_t* selection;
  DType dtype;
  int format;
  int slots;
  int first_slot;
  int selected_of;
  bool selected_bit;
  // Blocks that lie evenly, counted from this one; else block_rows is 0 and items count in a list.
  DeviceBlock first_block;
  std::ptrdiff_t code_stride;
  std::ptrdiff_t scale_stride;
  int block_rows;
  int packed_rows;
};

struct DeviceLane {
  const float* q;
  float* weights;
  float* out;
  int slots;
  int first_remap, remaps;
  int first_part, parts;  // partial outputs
};

/// Some blocks (or, of full rows, some slots) of one run.
struct Item {
  int lane;
  int run;
  int first;  // block, or slot within the run
  int count;
  int part;  // of values: where its sums go
};

/// Everything a launch reads.
struct DevicePlan {
  const DeviceLane* lanes;
  const DeviceRun* runs;
  const DeviceBlock* blocks;
  const PackedFormat* formats;
  const ScoreRemap* remaps;
  const Item* items;
  float* parts;  // (items of values, q_per_kv, head_dim)
  int q_per_kv;
  int head_dim;
  float scale;
};

/// Block `index` of a run, or of the list where it does not lie evenly.
__device__ inline DeviceBlock block_of(const DeviceBlock* list, const DeviceRun& run, int index) {
  if (run.block_rows == 0) return list[index];
  DeviceBlock block = run.first_block;
  block.codes += index * run.code_stride;
  block.scales += index * run.scale_stride;
  if (block.zeros != nullptr) block.zeros += index * run.scale_stride;
  block.rows = min(run.block_rows, run.packed_rows - index * run.block_rows);
  block.first_slot += index * run.block_rows;
  return block;
}

__device__ inline float meta_at(const std::byte* from, DType meta, size_t i) {
  return meta == DType::kF16 ? __half2float(reinterpret_cast<const __half*>(from)[i])
                             : reinterpret_cast<const float*>(from)[i];
}

}  // namespace kvlm::cuda::packed
