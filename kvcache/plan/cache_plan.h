#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvcache/kv_cache.h"
#include "kvcache/quantizer.h"
#include "kvcache/retention.h"
#include "kvcache/spec/cache_spec.h"
#include "kvcache/spec/words.h"

// From a sentence to a cache, each file needs only those before it: words, cache_spec, policy,
// registry, [cache_plan], conflicts, planner, spec; and of the plan: layouts, sequence_bounds,
// formula, make_cache.

namespace kvlm {

/// Sets of slots of a layer that are stored apart.
enum StoreIndex : size_t { kVisual, kRest, kStores };

/// What a spec means for one decoder: the policies' objects, and which of them serves which slots
/// of which layer. plan_cache() (kvcache/plan/planner.h) makes it, once; sizes are asked of it and
/// caches made from it (kvcache/make_cache.h), as many as are wanted, which share it and change
/// nothing.
struct CachePlan {
  /// A quantizer or a plain format, and what it serves.
  struct Packer {
    SpecPart part;
    std::optional<DType> format;  ///< of a plain format
    Scope scope = Scope::kAll;
    LayerRanges layers;  ///< empty: the layers that no other packer of its scope names
    bool turns = false;  ///< rotate=hadamard
    std::unique_ptr<Quantizer> quantizer;  ///< null for a plain format
  };

  std::string spec;  ///< canonical text
  CacheShape shape;
  std::optional<SpecPart> retention_part;
  std::optional<SpecPart> sharing_part;
  std::vector<Packer> packers;
  DType rows = DType::kF16;  ///< of rows that nothing packs
  /// Visual slots and others are packed differently: packers' scopes are kVisual and kText. Else
  /// everything is in kRest.
  bool split = false;
  /// (layers,) of each store: what packs its rows; null: they stay plain rows.
  std::array<std::vector<const Quantizer*>, kStores> quantizers;
  std::unique_ptr<Retention> retention;  ///< null: every row is kept
  bool checks_selections = false;        ///< RetentionEntry.checked of its rule
  ShareMap share;
  std::vector<int> pairs;  ///< layers of one number keep the same slots; empty: none must

  /// What packs the slots of `scope` in `layer` (kAll unless split); null: they stay plain rows.
  const Packer* packer(Scope scope, int layer) const noexcept;
  /// Keys and values of `layer` are stored turned (rotate=hadamard).
  bool turns(int layer) const noexcept;
  bool turns_any() const noexcept;
  /// Some part packs rows, in whatever layers.
  bool packs() const noexcept;
  /// Nothing is dropped and nothing packed.
  bool plain() const noexcept { return retention == nullptr && !packs(); }
};

}  // namespace kvlm
