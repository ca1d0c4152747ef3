#include "kvcache/extensions/visual_remap.h"

#include <algorithm>
#include <cassert>

namespace kvlm {

VisualRemap::VisualRemap(const CacheTraits& traits) : traits_(traits) {
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    if (!traits.layer(layer).remaps) continue;
    const bool per_image = traits.quantizer(kVisual, layer)->per_image();
    ranges_ = std::max(ranges_, per_image ? static_cast<size_t>(Layouts::kMaxImages) : size_t{1});
  }
}

void VisualRemap::reserve(const Workload& load) {
  remaps_.resize(std::max(remaps_.size(), load.heads * ranges_));
}

std::span<const ScoreRemap> VisualRemap::describe(size_t index, const StoreBuffers& visual,
                                                  int layer, bool places) {
  ScoreRemap* remaps = remaps_.data() + index * ranges_;
  return {remaps, fill(visual, layer, places, remaps)};
}

std::vector<ScoreRemap> VisualRemap::list(const StoreBuffers& visual, int layer) const {
  std::vector<ScoreRemap> remaps(ranges_);
  remaps.resize(fill(visual, layer, /*places=*/false, remaps.data()));
  return remaps;
}

/// Returns the number of entries written to `remaps`.
size_t VisualRemap::fill(const StoreBuffers& visual, int layer, bool places,
                         ScoreRemap* remaps) const {
  if (!traits_.layer(layer).remaps || visual.keys.packed() == 0) return 0;
  const Quantizer* quantizer = traits_.quantizer(kVisual, layer);
  const RemapRule* rule = quantizer->remap(layer);
  ScoreRemap remap;
  remap.tau_low = rule->tau_low;
  remap.tau_high = rule->tau_high;
  remap.guarded = rule->guarded;
  if (!quantizer->per_image()) {
    remap.slots = places ? visual.keys.places() : visual.keys.packed();
    *remaps = remap;
    return 1;
  }
  size_t count = 0;
  for (const PackedBlock& block : visual.keys.blocks.all()) {
    remap.slots = places ? block.rows : block.live_rows;
    if (remap.slots == 0) continue;
    remaps[count++] = remap;
    remap.first += remap.slots;
  }
  assert(count <= ranges_);
  return count;
}

}  // namespace kvlm
