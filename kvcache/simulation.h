#pragma once

#include <span>

#include "kvcache/quantizer.h"

namespace kvlm {

/// A quantizer that packs nothing. What its codes would give back takes the place of the rows of a
/// first prompt, which stay unpacked: for asking what an idea would answer before it has a format.
/// It saves no byte, and generated tokens stay as they are.
class Simulation {
 public:
  virtual ~Simulation() = default;

  /// The newest kept tokens of a prompt, which stay as they are.
  virtual int hold() const noexcept { return 0; }
  /// Replaces kept tokens of a prompt. Called by the thread that fills the cache, for the keys and
  /// then the values of each layer, after attention, selection and merging.
  ///   rows  (kv_heads, n, head_dim) f32, on the host; keys after RoPE
  virtual void round_trip(KvSide side, int layer, std::span<float> rows, int n) const = 0;
};

}  // namespace kvlm
