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

/// What attention reads of one KV head of a layer, visual slots first where they are stored apart.
struct HeadRows {
  std::vector<float> keys, values;  ///< (slots, head_dim)
  std::vector<int16_t> tags;        ///< (slots,) modality
  std::vector<ScoreRemap> remaps;   ///< of scores, before the softmax
};

/// Copies of stored rows on the host, for tests and tools.
class Inspector {
 public:
  Inspector(const CacheTraits& traits, Unpacker& unpacker, const VisualRemap& remap);

  /// The rows of `heads`, (kv_heads,) of a layer of `sequence`.
  std::vector<HeadRows> read(const Sequence& sequence, const std::vector<HeadState>& heads,
                             int layer, Stream& stream);

 private:
  const std::vector<float>& unpack(const std::vector<HeadState>& heads, int layer, Stream& stream);
  std::vector<int16_t> tags_of(const Sequence& sequence, const HeadState& head) const;

  const CacheTraits& traits_;
  Unpacker& unpacker_;
  const VisualRemap& remap_;
  FloatSpace floats_;           // keys and values of KV heads
  std::vector<float> on_host_;  // the same
};

}  // namespace kvlm
