#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attend_packed.h"
#include "kvcache/engine/float_space.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/engine/unpacker.h"
#include "kvcache/extensions/visual_remap.h"

namespace kvlm {

/// What attention reads of one KV head of a layer; visual slots come first if stored separately.
struct HeadRows {
  std::vector<float> keys, values;  ///< (slots, head_dim)
  std::vector<int16_t> tags;        ///< (slots,) modality
  std::vector<ScoreRemap> remaps;   ///< applied to scores before the softmax
};

/// Copies stored tokens to the host, for tests and tools.
class Inspector {
 public:
  Inspector(const CacheTraits& traits, Unpacker& unpacker, const VisualRemap& remap);

  /// The stored tokens of `heads`, (kv_heads,) of a layer of `sequence`.
  std::vector<HeadRows> read(const Sequence& sequence, const std::vector<HeadState>& heads,
                             int layer, Stream& stream);

 private:
  const std::vector<float>& unpack(const std::vector<HeadState>& heads, int layer, Stream& stream);
  void turn_back(const std::vector<HeadState>& heads, Rotated rotated, Stream& stream);
  std::vector<int16_t> tags_of(const Sequence& sequence, const HeadState& head) const;

  const CacheTraits& traits_;
  Unpacker& unpacker_;
  const VisualRemap& remap_;
  FloatSpace floats_;           // keys and values, on the device
  std::vector<float> on_host_;  // copy of floats_
};

}  // namespace kvlm
