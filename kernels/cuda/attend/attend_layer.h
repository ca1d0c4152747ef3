#pragma once

#include <array>
#include <cstdint>

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/row_pieces.cuh"

// Decode attention of one layer over packed and full rows, in launches whose sizes the host knows.
namespace kvlm::cuda::packed {

/// Which kernels serve the lanes of a layer.
struct LaneKinds {
  uint32_t fused = 0;             ///< those that serve lanes in one pass, as bits
  std::array<int, 32> sources{};  ///< by such a kernel, FusedArgs::sources
  bool lose_rows = false;         ///< FusedArgs::lose_rows
  int picture_slots = 0;          ///< packed rows that picture_lanes.cu reads of a lane, at most
  bool picture_rows = false;      ///< it serves some lanes alone, with their full rows
  uint32_t keys = 0;              ///< kernels of the first of two passes
  uint32_t values = 0;            ///< and of the second
  int pass_sources = 0;           ///< PassArgs::sources
  int passes = 0;                 ///< DeviceLane::passes, at most

  bool operator==(const LaneKinds&) const = default;
};

/// What a layer's launches come to, at most.
struct LayerLaunch {
  LaneKinds kinds;
  unsigned lanes = 0;
  PieceLaunch rows{};  ///< full rows that row_pieces.cu serves; `count` is 0 where there are none
  DType dtype = DType::kF16;  ///< of full rows
  bool rows_alone = false;    ///< there is nothing else
  int most_slots = 0;         ///< of a lane
  int channels = 0;           ///< of a packed row
};

/// Attends, up to the softmax states of splits and where they are. Somebody has to merge them, if
/// needs_join().
FusedArgs attend_splits(const LayerLaunch& layer, const AttendArgs& args, Stream& stream);
/// Whether some lanes of a layer have states to be merged: no block had all of theirs.
bool needs_join(const LayerLaunch& layer, const FusedArgs& fused);

}  // namespace kvlm::cuda::packed
