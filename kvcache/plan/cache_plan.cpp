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

bool CachePlan::turns(int layer) const noexcept {
  for (const Scope scope : {Scope::kAll, Scope::kVisual, Scope::kText}) {
    const Packer* found = packer(scope, layer);
    if (found != nullptr && found->turns) return true;
  }
  return false;
}

bool CachePlan::turns_any() const noexcept {
  return std::any_of(packers.begin(), packers.end(),
                     [](const Packer& packer) { return packer.turns; });
}

bool CachePlan::packs() const noexcept {
  return std::any_of(packers.begin(), packers.end(),
                     [](const Packer& packer) { return !packer.format; });
}

}  // namespace kvlm
