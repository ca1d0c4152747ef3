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

/// Stored tokens as floats, (rows, head_dim) f32 on the cache's device, oldest first.
class Unpacker {
 public:
  Unpacker(const CacheTraits& traits, ProtectedValues& protected_values);

  /// The packed tokens of a buffer that were not evicted, and where to write them.
  struct PackedRows {
    const KvBuffer* buffer;
    const HeadFacts* facts;
    float* to;
  };

  /// Allocates for unpack_together() of `rows` tokens in `buffers` buffers and `blocks` blocks.
  void reserve(size_t rows, size_t buffers, size_t blocks);
  /// unpack_packed() of buffers with the same packing, in as few calls as possible. If there is no
  /// basis, the remaining copies are appended to `copies` for the caller to make.
  void unpack_together(std::span<const PackedRows> buffers, const KeyBasis* basis,
                       std::vector<ByteRange>& copies, Stream& stream);
  /// Unpacks the tokens of a buffer that were not evicted. `basis` is inverted; null: none.
  void unpack_packed(const KvBuffer& buffer, const HeadFacts& facts, const KeyBasis* basis,
                     float* out, Stream& stream);
  /// Keys and values of a KV head, (slots, head_dim) each.
  void unpack_head(const HeadState& head, int layer, float* keys, float* values, Stream& stream);

 private:
  void unpack_keys(const HeadState& head, size_t store, int layer, float* out, Stream& stream);
  void unpack_values(const HeadState& head, size_t store, float* out, Stream& stream);
  void widen_full(const KvBuffer& buffer, float* out, Stream& stream);

  const CacheTraits& traits_;
  ProtectedValues& protected_values_;
  FloatSpace in_basis_;  // tokens in the basis of packing
  FloatSpace apart_;     // values of a KV head, the protected ones last
  std::vector<const std::byte*> rows_;
  std::vector<PackedBlock> blocks_;  // of unpack_together()
  std::vector<BasisJob> jobs_;
};

}  // namespace kvlm
