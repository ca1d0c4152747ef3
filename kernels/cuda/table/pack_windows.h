#pragma once

#include <array>

#include "kernels/cuda/table/table_args.cuh"
#include "kernels/pack.h"

namespace kvlm::cuda::packed {

/// Layers whose windows are packed alike.
struct WindowClass {
  PackedFormat format;
  std::array<PackRule, 2> rules;
  int trigger;
  int rows;
  const int* layers;  // on the GPU
  unsigned count;
};

/// Packs the oldest rows of every full window of the step's lanes, of keys (side 0) or of values.
void pack_windows(const TableArgs& table, const WindowClass& windows, int side, Stream& stream);

}  // namespace kvlm::cuda::packed
