#pragma once

#include <span>

#include "kernels/base/tensor.h"
#include "kvcache/engine/float_space.h"
#include "kvcache/engine/qkv_rows.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Layers that store keys, or keys and values, rotated by a Hadamard matrix (option rotate;
/// docs/formulas.md, "Rotation"). Queries are rotated with keys on arrival, and attention outputs
/// over stored values are rotated back.
class Rotation {
 public:
  explicit Rotation(const CacheTraits& traits);

  /// Allocates for the generated tokens of a step.
  void reserve(const Workload& load);
  Rotated rotated(int layer) const noexcept { return traits_.plan().rotated(layer); }
  /// The rows of a step, as they are stored in `layer`; valid until the next call.
  ///   generated  all are decode tokens: their memory moves only in reserve()
  QkvRows turned(int layer, const QkvRows& rows, bool generated, Stream& stream);
  /// Rotates vectors along the last axis back, in place.
  static void turn_back(TensorView rows, Stream& stream);
  /// The same for a step's generated tokens; consecutive ones share a launch.
  static void turn_generated_back(TensorView out, std::span<const StepRows> step, Stream& stream);

 private:
  const CacheTraits& traits_;
  FloatSpace generated_;
  FloatSpace prompt_;
};

}  // namespace kvlm
