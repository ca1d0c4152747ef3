#pragma once

#include <cstdint>

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/picture_choice.h"
#include "kernels/cuda/attend/row_pieces.cuh"

// Decode attention over KV heads whose packed rows are one long block: pictures that were packed
// once, with scales by channel or for the whole head (CalibQuant, 1BitVKV).
namespace kvlm::cuda::packed {

/// What a launch reads beside AttendArgs: the full rows of its lanes, which the kernels of
/// row_pieces.cu attend to.
struct PictureLanes {
  PieceLaunch rows{};
  const DeviceRowLane* lanes = nullptr;  ///< (lanes of the launch,) the parts of those rows
  int slots = 0;                         ///< packed rows of a lane, at most
};

/// Attends with the kernels of picture_choice.h that are set in `kernels`, full rows first. Results
/// depend neither on the other lanes nor on how many blocks share one: sums are integers.
void attend_pictures(uint32_t kernels, const AttendArgs& args, const PictureLanes& pictures,
                     unsigned lanes, Stream& stream);

}  // namespace kvlm::cuda::packed
