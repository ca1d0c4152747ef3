#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "kernels/pack.h"
#include "kvcache/engine/traits.h"
#include "kvcache/plane.h"

namespace kvlm {

/// Packs the oldest row of each ring of a layer whose window packs a row in every step, without
/// that the host describes them anew.
class RingPackers {
 public:
  explicit RingPackers(const CacheTraits& traits);

  void reserve(size_t heads) { rings_.reserve(heads); }
  /// Begins the list of a layer's rings of keys or of values.
  void start() noexcept { rings_.clear(); }
  void add(const Plane& plane) { rings_.push_back(plane.ring()); }
  /// Takes the list.
  void describe(int layer, Part part, Stream& stream);
  /// Packs a row of each.
  void pack_oldest(int layer, Stream& stream);

 private:
  struct Rings {
    explicit Rings(Device device) : packer(device) {}
    RingPacker packer;
    bool any = false;
  };

  const CacheTraits& traits_;
  std::vector<std::array<Rings, 2>> layers_;  // (layers,), by Part
  std::vector<PackedRing> rings_;
};

}  // namespace kvlm
