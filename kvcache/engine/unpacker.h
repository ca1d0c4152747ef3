#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/key_basis.h"
#include "kernels/row_moves.h"
#include "kvcache/engine/float_space.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/protected_values.h"

namespace kvlm {

/// Stored rows as floats, (rows, head_dim) f32 on the cache's device, oldest first.
class Unpacker {
 public:
  Unpacker(const CacheTraits& traits, ProtectedValues& protected_values);

  /// The live packed rows of a plane, and where they go.
  struct PackedRows {
    const Plane* plane;
    const HeadFacts* facts;
    float* to;
  };

  /// Room for unpack_together() of `rows` rows of `planes` planes, in `blocks` blocks.
  void reserve(size_t rows, size_t planes, size_t blocks);
  /// unpack_packed() of planes that are packed alike, in as few calls for all of them. Where there
  /// is no basis, copies that are still to be made are appended to `copies`.
  void unpack_together(std::span<const PackedRows> planes, const KeyBasis* basis,
                       std::vector<ByteRange>& copies, Stream& stream);
  /// The live packed rows of a plane; `basis` undoes their change of basis, null: there was none.
  void unpack_packed(const Plane& plane, const HeadFacts& facts, const KeyBasis* basis, float* out,
                     Stream& stream);
  /// Keys and values of a KV head, (slots, head_dim) each.
  void unpack_head(const HeadState& head, int layer, float* keys, float* values, Stream& stream);

 private:
  void unpack_keys(const HeadState& head, size_t store, int layer, float* out, Stream& stream);
  void unpack_values(const HeadState& head, size_t store, float* out, Stream& stream);
  void widen_full(const Plane& plane, float* out, Stream& stream);

  const CacheTraits& traits_;
  ProtectedValues& protected_values_;
  FloatSpace in_basis_;  // rows as they were packed
  FloatSpace apart_;     // values of a KV head, protected ones behind the others
  std::vector<const std::byte*> rows_;
  std::vector<PackedBlock> blocks_;  // of unpack_together()
  std::vector<BasisJob> jobs_;
};

}  // namespace kvlm
