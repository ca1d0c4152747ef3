#pragma once

#include <cstddef>
#include <vector>

#include "kernels/row_moves.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Gives the first rows of a sequence the positions of their ranks while rows behind them go
/// (docs/arithmetic.md, "StreamingLLM", rerotate=on).
class SinkRotation {
 public:
  explicit SinkRotation(const CacheTraits& traits) : traits_(traits) {}

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
