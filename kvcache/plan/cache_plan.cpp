#include "kvcache/plan/cache_plan.h"

#include <algorithm>

namespace kvlm {

const CachePlan::Packer* CachePlan::packer(Scope scope, int layer) const noexcept {
  const Packer* found = nullptr;
  for (const Packer& packer : packers) {
    if (packer.scope != scope) continue;
    if (contains(packer.layers, layer)) {
      found = &packer;
      break;
    }
    if (packer.layers.empty()) found = &packer;
  }
  return found == nullptr || found->format ? nullptr : found;
}

Rotated CachePlan::rotated(int layer) const noexcept {
  Rotated most = Rotated::kNothing;
  for (const Scope scope : {Scope::kAll, Scope::kVisual, Scope::kText}) {
    const Packer* found = packer(scope, layer);
    if (found != nullptr) most = std::max(most, found->rotated);
  }
  return most;
}

bool CachePlan::rotates_any() const noexcept {
  return std::any_of(packers.begin(), packers.end(),
                     [](const Packer& packer) { return packer.rotated != Rotated::kNothing; });
}

bool CachePlan::packs() const noexcept {
  return std::any_of(packers.begin(), packers.end(),
                     [](const Packer& packer) { return !packer.format; });
}

}  // namespace kvlm
