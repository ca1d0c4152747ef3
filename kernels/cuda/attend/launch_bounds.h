#pragma once

#include <vector>

#include "kernels/cuda/attend/attend_layer.h"

namespace kvlm::cuda::packed {

/// Upper bounds for the launches of a DecodeTable, whichever sequences a step has. They only grow,
/// so that steps have the same launches, and can be recorded, until a new kind of KV head arrives.
class LaunchBounds {
 public:
  explicit LaunchBounds(int layers) : kinds_(static_cast<size_t>(layers)) {}

  /// Extends the bounds of a layer to a KV head with these kernels.
  void note(int layer, const HeadKernels& kinds);
  /// Extends the bounds to those of `other`.
  void take(const LaunchBounds& other);

  /// Whether some KV heads of a layer use image_block.cu.
  bool has_images(int layer) const;
  const HeadKernels& kinds(int layer) const { return kinds_[static_cast<size_t>(layer)]; }

  bool changed = true;  ///< the bounds have grown; the user of the class clears it

 private:
  std::vector<HeadKernels> kinds_;  // (layers,)
};

}  // namespace kvlm::cuda::packed
