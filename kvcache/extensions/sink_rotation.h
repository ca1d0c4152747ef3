#pragma once

#include <cstddef>
#include <vector>

#include "kernels/row_moves.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Moves the sinks to the positions of their ranks when later tokens are evicted (docs/formulas.md,
/// "StreamingLLM", rerotate=on).
class SinkRotation {
 public:
  explicit SinkRotation(const CacheTraits& traits);

  /// Assigns memory of Layouts::sink_bytes() to a layer's sinks.
  static void place(LayerState& state, std::byte* memory) noexcept;
  /// Bytes of a layer's saved sinks.
  size_t bytes(const LayerState& state) const noexcept {
    return sizeof(float) * traits_.kv_heads() * static_cast<size_t>(state.sink_rows) *
           traits_.dim();
  }

  /// Rotates the sinks of a layer by `by` more positions. `sinks` is their number, used at the
  /// first rotation.
  void rotate(LayerState& state, int sinks, int by, Stream& stream);

 private:
  void copy_sinks(LayerState& state, int sinks, Stream& stream);

  const CacheTraits& traits_;
  std::vector<const std::byte*> sources_;
  std::vector<TurnedRow> rotated_;
};

}  // namespace kvlm
