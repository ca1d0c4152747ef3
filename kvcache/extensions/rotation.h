#pragma once

#include <span>

#include "kernels/base/tensor.h"
#include "kvcache/engine/float_space.h"
#include "kvcache/engine/qkv_rows.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Layers whose keys and values are stored turned by a Hadamard matrix (rotate=hadamard;
/// docs/formulas.md, "Rotation"): queries, keys and values are turned as they come, and outputs
/// over what is stored are turned back.
class Rotation {
 public:
  explicit Rotation(const CacheTraits& traits);

  /// Room for the generated rows of a step.
  void reserve(const Workload& load);
  bool turns(int layer) const noexcept { return traits_.plan().turns(layer); }
  /// The rows of a step, turned. They last until the next call.
  ///   generated  all are of decode: they lie in memory that moves in reserve() alone
  QkvRows turned(const QkvRows& rows, bool generated, Stream& stream);
  /// Turns vectors of the last axis back, in their place.
  static void turn_back(TensorView rows, Stream& stream);
  /// The same of the generated rows of a step, those that follow each other together.
  static void turn_generated_back(TensorView out, std::span<const StepRows> step, Stream& stream);

 private:
  const CacheTraits& traits_;
  FloatSpace generated_;
  FloatSpace prompt_;
};

}  // namespace kvlm
