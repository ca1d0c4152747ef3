#pragma once

#include <cstddef>
#include <vector>

#include "kernels/row_moves.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Gives the first rows of a sequence the positions of their ranks while rows behind them go
/// (docs/formulas.md, "StreamingLLM", rerotate=on).
class SinkRotation {
 public:
  explicit SinkRotation(const CacheTraits& traits);

  /// Gives a layer the memory of its sinks, Layouts::sink_bytes().
  static void place(LayerState& state, std::byte* memory) noexcept;
  /// Bytes of a layer's sinks.
  size_t bytes(const LayerState& state) const noexcept {
    return sizeof(float) * traits_.kv_heads() * static_cast<size_t>(state.sink_rows) *
           traits_.dim();
  }

  /// Rotates the sinks of a layer by `by` more positions. `sinks`: how many they are, if none was
  /// rotated before.
  void rotate(LayerState& state, int sinks, int by, Stream& stream);

 private:
  void copy_sinks(LayerState& state, int sinks, Stream& stream);

  const CacheTraits& traits_;
  std::vector<const std::byte*> sources_;
  std::vector<TurnedRow> rotated_;
};

}  // namespace kvlm
