#pragma once

#include <vector>

#include "kernels/cuda/attend/attend_layer.h"

namespace kvlm::cuda::packed {

/// How large the launches of a DecodeTable have to be, at most, whichever lanes a step is of:
/// bounds grow with what lanes are noted, so that steps launch the same while nothing new comes.
class LaunchBounds {
 public:
  explicit LaunchBounds(int layers) : kinds_(static_cast<size_t>(layers)) {}

  /// Which kernels serve a lane of a layer.
  void note(int layer, const LaneKinds& kinds);
  /// Adds what another table of this shape, or part of it, has noted.
  void take(const LaunchBounds& other);

  /// Some lanes of a layer are picture_lanes.cu's.
  bool has_pictures(int layer) const;
  const LaneKinds& kinds(int layer) const { return kinds_[static_cast<size_t>(layer)]; }

  bool changed = true;  ///< since its user has last said otherwise

 private:
  std::vector<LaneKinds> kinds_;  // (layers,)
};

}  // namespace kvlm::cuda::packed
