#pragma once

#include "kernels/cuda/dense/segment_launch.cuh"

namespace kvlm::cuda {

/// segment_attention() with the warpgroup products of compute capability 9.0. Whether it did:
/// false, and nothing is queued, on other GPUs and for heads that it has no kernel for.
template <class T, class Out>
bool attend_by_warpgroups(const SegmentLaunch<T, Out>& launch, const Segments& segments,
                          Stream& stream);

}  // namespace kvlm::cuda
