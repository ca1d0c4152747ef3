#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvcache/kv_cache.h"
#include "kvcache/quantizer.h"
#include "kvcache/retention.h"
#include "kvcache/simulation.h"
#include "kvcache/spec/cache_spec.h"
#include "kvcache/spec/words.h"

// From spec to cache. Each file needs only earlier ones: words, cache_spec, policy, registry,
// [cache_plan], conflicts, planner, spec; and of the plan: layouts, sequence_bounds, formula,
// make_cache.

namespace kvlm {

/// A layer stores visual tokens and the rest separately if the plan is `split`.
enum StoreIndex : size_t { kVisual, kRest, kStores };

/// What a spec means for one decoder: the policy objects, and which tokens of which layer each of
/// them packs. plan_cache() (kvcache/plan/planner.h) makes it once. Sizes and any number of caches
/// follow from it (kvcache/make_cache.h), which share it and never change it.
struct CachePlan {
  /// A quantizer or a plain format, and its tokens and layers.
  struct Packer {
    SpecPart part;
    std::optional<DType> format;  ///< if a plain format
    Scope scope = Scope::kAll;
    LayerRanges layers;  ///< empty: the layers not named by another packer of its scope
    Rotated rotated = Rotated::kNothing;
    std::unique_ptr<Quantizer> quantizer;  ///< null for a plain format
  };

  std::string spec;  ///< canonical text
  CacheShape shape;
  std::optional<SpecPart> retention_part;
  std::optional<SpecPart> sharing_part;
  std::optional<SpecPart> simulation_part;
  std::vector<Packer> packers;
  DType rows = DType::kF16;  ///< of unpacked tokens
  /// Visual tokens and others are packed differently: packers' scopes are kVisual and kText. Else
  /// all tokens are in kRest.
  bool split = false;
  /// By store, (layers,): its quantizer; null: unpacked.
  std::array<std::vector<const Quantizer*>, kStores> quantizers;
  std::unique_ptr<Retention> retention;    ///< null: every token is kept
  std::unique_ptr<Simulation> simulation;  ///< null: nothing is simulated
  bool checks_selections = false;          ///< RetentionEntry.checked of its rule
  ShareMap share;
  /// Layers with equal numbers keep the same slots; empty: no such constraint
  std::vector<int> pairs;

  /// The packer of `scope` in `layer` (kAll unless split); null: unpacked.
  const Packer* packer(Scope scope, int layer) const noexcept;
  /// What of `layer` is stored rotated.
  Rotated rotated(int layer) const noexcept;
  bool rotates_any() const noexcept;
  /// Some layer packs tokens.
  bool packs() const noexcept;
  /// Nothing is evicted, packed or simulated.
  bool plain() const noexcept { return retention == nullptr && !packs() && simulation == nullptr; }
};

}  // namespace kvlm
