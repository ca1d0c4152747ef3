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

/// Deals out the memory of a sequence to the planes of its layers and to extensions, once it is
/// known what a layer keeps.
class Placement {
 public:
  Placement(const CacheTraits& traits, const DecodeWeights& weights,
            const ProtectedValues& protected_values, const SinkRotation& sinks);

  /// Gives the planes of a layer their memory, when its prompt has ended.
  ///   counts  (kv_heads,) rows that go to each store
  void place(Sequence& sequence, int layer, std::span<const std::array<int, kStores>> counts) const;
  /// Gives a layer that keeps every row as it comes room for all of them, when its first rows come.
  /// Does nothing if it has that room.
  void place_rows(Sequence& sequence, int layer) const;

  /// Bytes that a fork needs: `made` is what the host knows of it.
  size_t forked_bytes(const Sequence& parent, const Sequence& made) const;
  /// Gives a layer of a fork its planes, which read what stays of the parent's; what else there is
  /// joins `copies`.
  void fork_layer(Sequence& parent, Sequence& made, int layer,
                  std::vector<ByteRange>& copies) const;

 private:
  /// A plane of a KV head, as place() makes it.
  struct Site {
    int layer;
    size_t head;
    size_t store;
    Plane StorePlanes::*side;
    PlaneLayout layout;
    PlaneCapacity capacity;

    Plane& in(Sequence& sequence) const noexcept {
      return sequence.layers[static_cast<size_t>(layer)].heads[head].stores[store].*side;
    }
    const Plane& in(const Sequence& sequence) const noexcept {
      return sequence.layers[static_cast<size_t>(layer)].heads[head].stores[store].*side;
    }
  };

  template <class Body>
  void for_planes(const Sequence& sequence, int layer, const Body& body) const;
  int most_slots(const Sequence& sequence, int layer) const noexcept;
  int most_rows(const Sequence& sequence, int layer) const noexcept;
  void prepare_heads(Sequence& sequence, int layer) const;
  void place_extras(Sequence& sequence, int layer) const;
  void place_plane(Sequence& sequence, const Site& site, const PlaneCapacity& capacity) const;
  std::byte* take_rest(Sequence& sequence, size_t bytes) const noexcept;
  const Plane* owner_of(const Sequence& sequence, const Site& site) const noexcept;
  PlaneCapacity forked_capacity(const Sequence& parent, const Sequence& made,
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
