#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvcache/policy.h"
#include "kvcache/quantizer.h"
#include "kvcache/retention.h"
#include "kvcache/spec.h"

namespace kvlm {

/// The parts of a spec by what they do. Points into the spec, which must outlive it.
struct Composition {
  /// A quantizer part; plain formats are in it too, with format set.
  struct Packer {
    const SpecPart* part = nullptr;
    std::optional<DType> format;
    Scope scope = Scope::kAll;
    LayerRanges layers;  ///< empty: the layers that no other packer of its scope names
  };

  const SpecPart* retention = nullptr;
  const SpecPart* sharing = nullptr;
  std::vector<Packer> packers;
  DType rows = DType::kF16;  ///< of rows that nothing packs
  /// Visual slots and others are packed differently: packers' scopes are kVisual and kText.
  bool split = false;

  /// What packs the slots of `scope` in `layer` (kAll unless split), an index into packers; -1:
  /// they stay plain rows.
  int packer(Scope scope, int layer) const noexcept;
  bool packs() const noexcept;
};

/// Sorts the parts of a spec that parse_spec() returned.
Composition compose(const CacheSpec& spec);

/// The objects of a composition for one decoder.
struct ComposedParts {
  std::vector<std::unique_ptr<Quantizer>> quantizers;  ///< (packers,); null for plain formats
  std::unique_ptr<Retention> retention;                ///< null: every row is kept
  ShareMap share;
  std::vector<int> pairs;  ///< layers of one number keep the same slots; empty: none must
};

/// Makes the objects. `profile` may be null; `words_only` if they are made to be asked for
/// conflicts alone. Throws Error{kUnsupported} for options that do not fit the decoder.
ComposedParts make_parts(const Composition& composition, const CacheShape& shape,
                         const PolicyProfile* profile, bool words_only = false);

/// Why the parts cannot work together (specs 10), with the nearest spelling that can; nothing if
/// they can.
std::optional<std::string> conflict(const Composition& composition, const ComposedParts& parts,
                                    const CacheShape& shape);

/// As conflict(), of what no decoder can have: for any shape on which the parts can be made.
std::optional<std::string> conflict_of_words(const CacheSpec& spec);

}  // namespace kvlm
