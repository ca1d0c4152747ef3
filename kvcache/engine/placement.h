#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "kernels/row_moves.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/decode_weights.h"
#include "kvcache/extensions/protected_values.h"
#include "kvcache/extensions/sink_rotation.h"

namespace kvlm {

/// Assigns a sequence's memory to its K and V buffers and extensions, once it is known what each
/// layer keeps.
class Placement {
 public:
  Placement(const CacheTraits& traits, const DecodeWeights& weights,
            const ProtectedValues& protected_values, const SinkRotation& sinks);

  /// Assigns memory to the buffers of a layer when its prompt has ended.
  ///   counts  (kv_heads,) tokens in each store
  void place(Sequence& sequence, int layer, std::span<const std::array<int, kStores>> counts) const;
  /// Assigns memory for all tokens to a layer that stores every token unpacked and in order. Called
  /// at its first tokens; later calls do nothing.
  void place_rows(Sequence& sequence, int layer) const;

  /// Bytes that a fork needs; `made` is its state without buffers.
  size_t forked_bytes(const Sequence& parent, const Sequence& made) const;
  /// Sets up the buffers of a fork's layer. Packed blocks that never change are read from the
  /// parent; all other data is appended to `copies`.
  void fork_layer(Sequence& parent, Sequence& made, int layer,
                  std::vector<ByteRange>& copies) const;

 private:
  /// A K or V buffer of a KV head, as place() sets it up.
  struct Site {
    int layer;
    size_t head;
    size_t store;
    KvBuffer StoreBuffers::*side;
    BufferLayout layout;
    BufferCapacity capacity;

    KvBuffer& in(Sequence& sequence) const noexcept {
      return sequence.layers[static_cast<size_t>(layer)].heads[head].stores[store].*side;
    }
    const KvBuffer& in(const Sequence& sequence) const noexcept {
      return sequence.layers[static_cast<size_t>(layer)].heads[head].stores[store].*side;
    }
  };

  template <class Body>
  void for_buffers(const Sequence& sequence, int layer, const Body& body) const;
  int most_slots(const Sequence& sequence, int layer) const noexcept;
  int most_rows(const Sequence& sequence, int layer) const noexcept;
  void prepare_heads(Sequence& sequence, int layer) const;
  void place_extras(Sequence& sequence, int layer) const;
  void place_buffer(Sequence& sequence, const Site& site, const BufferCapacity& capacity) const;
  std::byte* take_rest(Sequence& sequence, size_t bytes) const noexcept;
  const KvBuffer* owner_of(const Sequence& sequence, const Site& site) const noexcept;
  BufferCapacity forked_capacity(const Sequence& parent, const Sequence& made,
                                 const Site& site) const noexcept;
  bool blocks_stay(const Site& site) const noexcept;
  void fork_extras(const Sequence& parent, Sequence& made, int layer,
                   std::vector<ByteRange>& copies) const;

  const CacheTraits& traits_;
  const DecodeWeights& weights_;
  const ProtectedValues& protected_values_;
  const SinkRotation& sinks_;
};

}  // namespace kvlm
