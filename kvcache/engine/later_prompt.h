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

/// Prompts on top of what is stored: their rows attend exactly, to each other and to what is
/// stored, as floats if some of it is packed. Then they are stored as decode stores rows, as many
/// together as nothing follows: neither a flush nor a choice of what to drop.
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
  FloatSpace floats_;               // what a layer of a sequence has stored, unpacked
  std::vector<KeyValueRows> past_;  // (kv_heads,) what it has stored
  std::vector<double> sums_;        // (kv_heads, columns) of the new rows' attention
};

}  // namespace kvlm
