#pragma once

#include <span>

#include "kernels/cuda/attend_args.cuh"
#include "kernels/cuda/attend_layer.h"

namespace kvlm::cuda::packed {

/// Lanes of a layer as the host has sent them, and what their launches come to.
struct DescribedLayer {
  AttendArgs args{};  ///< but for the workspace and what counts clamped slopes
  LayerLaunch layer;
  int row_parts = 0;  ///< parts of the full rows of layer.pictures, whose states have no place yet
};

/// Sends what kernels have to know of lanes. What it returns is for kernels that the stream gets
/// next: it lasts as long as an upload (Queue::upload). Throws Error{kUnsupported} above 1024
/// channels.
DescribedLayer describe_layer(std::span<const PackedLane> lanes, int q_per_kv, int head_dim,
                              float scale, Stream& stream);
/// The same of blocks alone, (blocks,).
const DeviceBlock* describe_blocks(std::span<const PackedBlock> blocks, Stream& stream);

}  // namespace kvlm::cuda::packed
