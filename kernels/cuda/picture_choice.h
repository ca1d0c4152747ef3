#pragma once

#include "kernels/attend_packed.h"

// Which kernel of picture_lanes.cu serves a lane.
namespace kvlm::cuda::packed {

/// DeviceLane::fused of lanes that picture_lanes.cu serves is kFirstPicture + a place in its table.
constexpr int kFirstPicture = 19;
constexpr uint32_t kPictureKernels = ~uint32_t{0} << kFirstPicture;
VLM_HD constexpr bool is_picture(int fused) { return fused >= kFirstPicture; }

/// DeviceLane::fused of a lane, 0 if no kernel of picture_lanes.cu serves it: its packed keys are
/// one block, its packed values one of as many rows, at most `most_slots`, in front of f16 rows.
int picture_lane(const PackedLane& lane, int head_dim, int most_slots);
/// Packed rows of a lane at most, for the first GPU that was asked.
int most_picture_slots();

}  // namespace kvlm::cuda::packed
