#pragma once

#include <vector>

#include "kernels/attention.h"
#include "kvcache/engine/evictor.h"
#include "kvcache/engine/float_space.h"
#include "kvcache/engine/row_appender.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/engine/unpacker.h"
#include "kvcache/engine/window_packer.h"

namespace kvlm {

/// Prompts after the first. Their tokens attend exactly, to each other and to stored tokens, which
/// are unpacked to floats if any is packed. Then they are stored as in decode, in groups that need
/// neither a flush nor an eviction in between.
class LaterPrompt {
 public:
  LaterPrompt(const CacheTraits& traits, Unpacker& unpacker, RowAppender& appender,
              WindowPacker& packer, Evictor& evictor);

  void attend(Sequence& sequence, const StepRows& rows, int layer, ConstTensorView q,
              ConstTensorView k, ConstTensorView v, TensorView out, float scale, Stream& stream);

 private:
  bool find_stored(const LayerState& state);
  void unpack(const LayerState& state, int layer, Stream& stream);
  void sum_weights(LayerState& state, ConstTensorView q, ConstTensorView k, float scale,
                   Stream& stream);
  int rows_at_once(const LayerState& state, int layer, int left) const noexcept;
  void store_rows(Sequence& sequence, const StepRows& rows, int row, int count, int layer,
                  ConstTensorView k, ConstTensorView v, Stream& stream);

  const CacheTraits& traits_;
  Unpacker& unpacker_;
  RowAppender& appender_;
  WindowPacker& packer_;
  Evictor& evictor_;
  FloatSpace floats_;               // the stored tokens of a layer, if unpacked
  std::vector<KeyValueRows> past_;  // (kv_heads,) the stored tokens of a layer
  std::vector<double> sums_;        // (kv_heads, columns) attention sums of the new tokens
};

}  // namespace kvlm
