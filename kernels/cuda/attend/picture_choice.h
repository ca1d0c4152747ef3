#pragma once

#include "kernels/attend_packed.h"

// Which kernel of picture_lanes.cu serves a lane.
namespace kvlm::cuda::packed {

/// DeviceLane::fused of lanes that picture_lanes.cu serves is kFirstPicture + a place in its table.
constexpr int kFirstPicture = 20;
constexpr uint32_t kPictureKernels = ~uint32_t{0} << kFirstPicture;
VLM_HD constexpr bool is_picture(int fused) { return fused >= kFirstPicture; }

/// DeviceRun::kernel of runs that kernel `number` of picture_lanes.cu reads, which others pass by.
VLM_HD constexpr int picture_run(int number) { return 32 + number; }
VLM_HD constexpr bool is_picture_run(int kernel) { return kernel >= 32; }

/// What a GPU gives the blocks that serve a lane.
struct PictureLimits {
  int shared_bytes;  ///< of a block, at most
  bool clusters;     ///< several blocks may share a lane
};
/// Of the first GPU that was asked.
PictureLimits picture_limits();

/// The kernel of picture_lanes.cu that reads the first runs of a lane, 0 if none does: its keys are
/// one block, its values one of as many rows, and their scores fit and are wanted by nobody else.
int picture_kernel(const PackedLane& lane, int head_dim, const PictureLimits& limits);
/// Whether the runs behind them are f16 rows, so that it serves the whole lane (DeviceLane::fused).
bool has_rows_behind(const PackedLane& lane);

}  // namespace kvlm::cuda::packed
