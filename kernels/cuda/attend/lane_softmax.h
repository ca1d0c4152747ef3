#pragma once

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/attend_layer.h"

namespace kvlm::cuda::packed {

/// Makes weights of the scores of lanes that are served by nobody in one pass and not deferred.
void normalise_lanes(const AttendArgs& args, const LayerLaunch& layer, Stream& stream);
/// Finds the weightings of deferred lanes.
void weigh_deferred(const AttendArgs& args, const LayerLaunch& layer, Stream& stream);

}  // namespace kvlm::cuda::packed
