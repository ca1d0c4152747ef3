#pragma once

#include <array>

#include "kernels/cuda/table/table_args.cuh"
#include "kernels/pack.h"

// End of a decode step: packs full residual windows of one side, for the layers of one class.
namespace kvlm::cuda::packed {

/// Layers whose windows are packed by one launch.
struct WindowClass {
  PackedFormat format;
  std::array<PackRule, 2> rules;
  int trigger;
  int rows;
  const int* layers;  // on the GPU
  unsigned count;
};

/// Packs the oldest tokens of every full window of the step's KV heads, of keys (side 0) or values.
void pack_windows(const TableArgs& table, const WindowClass& windows, int side, Stream& stream);

}  // namespace kvlm::cuda::packed
