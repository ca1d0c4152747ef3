#pragma once

#include "kernels/attend_packed.h"

// Which kernel of picture_lanes.cu serves a lane.
namespace kvlm::cuda::packed {

/// DeviceLane::fused of lanes that picture_lanes.cu serves is kFirstPicture + a place in its table.
constexpr int kFirstPicture = 19;
constexpr uint32_t kPictureKernels = ~uint32_t{0} << kFirstPicture;
VLM_HD constexpr bool is_picture(int fused) { return fused >= kFirstPicture; }

/// What a GPU gives the blocks that serve a lane.
struct PictureLimits {
  int shared_bytes;  ///< of a block, at most
  bool clusters;     ///< several blocks may share a lane
};
/// Of the first GPU that was asked.
PictureLimits picture_limits();

/// DeviceLane::fused of a lane, 0 if no kernel of picture_lanes.cu serves it: its packed keys are
/// one block, its packed values one of as many rows, in front of f16 rows, and their scores fit.
int picture_lane(const PackedLane& lane, int head_dim, const PictureLimits& limits);

}  // namespace kvlm::cuda::packed
