#include <algorithm>

#include "kernels/cuda/attend/image_choice.h"
#include "kernels/cuda/attend/launch_bounds.h"

namespace kvlm::cuda::packed {

void LaunchBounds::note(int layer, const HeadKernels& more) {
  HeadKernels& kinds = kinds_[static_cast<size_t>(layer)];
  const HeadKernels before = kinds;
  kinds.fused |= more.fused;
  for (size_t i = 0; i < more.sources.size(); ++i) {
    kinds.sources[i] = std::max(kinds.sources[i], more.sources[i]);
  }
  kinds.lose_rows |= more.lose_rows;
  // Rounded up, so that sequences of similar length have the same launches.
  constexpr int kRounded = 256;
  const int slots = (more.image_slots + kRounded - 1) / kRounded * kRounded;
  kinds.image_slots = std::max(kinds.image_slots, slots);
  kinds.image_rows |= more.image_rows;
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

bool LaunchBounds::has_images(int layer) const { return (kinds(layer).fused & kImageKernels) != 0; }

}  // namespace kvlm::cuda::packed
