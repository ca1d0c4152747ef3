#include "kvcache/engine/ring_packers.h"

namespace kvlm {

RingPackers::RingPackers(const CacheTraits& traits) : traits_(traits) {
  for (size_t layer = 0; layer < traits.layers(); ++layer) {
    layers_.push_back({Rings(traits.device()), Rings(traits.device())});
  }
}

void RingPackers::describe(int layer, Part part, Stream& stream) {
  Rings& rings = layers_[static_cast<size_t>(layer)][static_cast<size_t>(part)];
  rings.any = !rings_.empty();
  if (!rings.any) return;
  const PartPlan& plan = traits_.quantizer(kRest, layer)->plan(part, layer);
  rings.packer.describe(plan.format, plan.rules, traits_.plan().rows, rings_, stream);
}

void RingPackers::pack_oldest(int layer, Stream& stream) {
  for (Rings& rings : layers_[static_cast<size_t>(layer)]) {
    if (rings.any) rings.packer.run(stream);
  }
}

}  // namespace kvlm
