#include "kvcache/engine/inspector.h"

#include <algorithm>

#include "kernels/base/tensor.h"
#include "kernels/elementwise.h"
#include "kvcache/extensions/rotation.h"

namespace kvlm {

Inspector::Inspector(const CacheTraits& traits, Unpacker& unpacker, const VisualRemap& remap)
    : traits_(traits), unpacker_(unpacker), remap_(remap), floats_(traits.device()) {}

std::vector<HeadRows> Inspector::read(const Sequence& sequence, const std::vector<HeadState>& heads,
                                      int layer, Stream& stream) {
  auto from = unpack(heads, layer, stream).cbegin();
  std::vector<HeadRows> found;
  for (const HeadState& head : heads) {
    const auto count = static_cast<std::ptrdiff_t>(head.slots()) * traits_.shape().head_dim;
    HeadRows& rows = found.emplace_back();
    rows.keys.assign(from, from + count);
    rows.values.assign(from + count, from + 2 * count);
    rows.tags = tags_of(sequence, head);
    rows.remaps = remap_.list(head.stores[kVisual], layer);
    from += 2 * count;
  }
  return found;
}

/// Rotates what unpack() made back to the basis of the model.
void Inspector::turn_back(const std::vector<HeadState>& heads, Rotated rotated, Stream& stream) {
  if (rotated == Rotated::kNothing) return;
  const auto dim = static_cast<int64_t>(traits_.dim());
  float* at = floats_.data();
  for (const HeadState& head : heads) {
    const int64_t rows = head.slots();
    const int64_t turned = rotated == Rotated::kKeysAndValues ? 2 * rows : rows;
    Rotation::turn_back(TensorView(at, DType::kF32, {turned, dim}, traits_.device()), stream);
    at += 2 * rows * dim;
  }
}

/// Keys, then values, for each KV head in turn.
const std::vector<float>& Inspector::unpack(const std::vector<HeadState>& heads, int layer,
                                            Stream& stream) {
  size_t elements = 0;
  for (const HeadState& head : heads) {
    elements += 2 * static_cast<size_t>(head.slots()) * traits_.dim();
  }
  floats_.grow(elements);
  float* to = floats_.data();
  for (const HeadState& head : heads) {
    const size_t of_keys = static_cast<size_t>(head.slots()) * traits_.dim();
    unpacker_.unpack_head(head, layer, to, to + of_keys, stream);
    to += 2 * of_keys;
  }
  turn_back(heads, traits_.plan().rotated(layer), stream);
  if (on_host_.size() < elements) on_host_.resize(elements);
  const Shape shape{static_cast<int64_t>(elements)};
  copy(TensorView(on_host_.data(), DType::kF32, shape),
       ConstTensorView(floats_.data(), DType::kF32, shape, traits_.device()), stream);
  return on_host_;
}

std::vector<int16_t> Inspector::tags_of(const Sequence& sequence, const HeadState& head) const {
  std::vector<int16_t> tags = traits_.retention() != nullptr ? head.tags : sequence.modality;
  tags.resize(static_cast<size_t>(head.slots()), kTextRow);
  std::stable_partition(tags.begin(), tags.end(),
                        [&](int16_t tag) { return traits_.store_of(tag) == kVisual; });
  return tags;
}

}  // namespace kvlm
