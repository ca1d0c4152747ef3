#include <algorithm>

#include "kernels/cuda/attend/launch_bounds.h"
#include "kernels/cuda/attend/picture_choice.h"

namespace kvlm::cuda::packed {

void LaunchBounds::note(int layer, const LaneKinds& more) {
  LaneKinds& kinds = kinds_[static_cast<size_t>(layer)];
  const LaneKinds before = kinds;
  kinds.fused |= more.fused;
  for (size_t i = 0; i < more.sources.size(); ++i) {
    kinds.sources[i] = std::max(kinds.sources[i], more.sources[i]);
  }
  kinds.lose_rows |= more.lose_rows;
  // Rounded up, so that sequences of about the same length launch the same.
  constexpr int kRounded = 256;
  const int slots = (more.picture_slots + kRounded - 1) / kRounded * kRounded;
  kinds.picture_slots = std::max(kinds.picture_slots, slots);
  kinds.picture_rows |= more.picture_rows;
  kinds.keys |= more.keys;
  kinds.values |= more.values;
  kinds.pass_sources = std::max(kinds.pass_sources, more.pass_sources);
  kinds.passes = std::max(kinds.passes, more.passes);
  changed |= kinds != before;
}

void LaunchBounds::take(const LaunchBounds& other) {
  for (size_t layer = 0; layer < kinds_.size(); ++layer) {
    note(static_cast<int>(layer), other.kinds_[layer]);
  }
}

bool LaunchBounds::has_pictures(int layer) const {
  return (kinds(layer).fused & kPictureKernels) != 0;
}

}  // namespace kvlm::cuda::packed
