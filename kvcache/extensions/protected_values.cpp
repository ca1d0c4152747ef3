// Values of VidKV's protected tokens. The bitmap of a KV head has a bit for each value slot of
// kRest. It is set at the end of the prompt, read whenever values are packed, and updated by
// eviction.
#include "kvcache/extensions/protected_values.h"

#include <algorithm>
#include <bit>

#include "kernels/base/tensor.h"
#include "kernels/elementwise.h"
#include "kernels/row_moves.h"

namespace kvlm {

namespace {

/// Removes bit i of n: later bits move down by one.
void erase_bit(uint64_t* bits, int i, int n) noexcept {
  const int last = (n - 1) / 64;
  int word = i / 64;
  const uint64_t low = (uint64_t{1} << (i % 64)) - 1;
  bits[word] = (bits[word] & low) | (bits[word] >> 1 & ~low);
  for (; word < last; ++word) {
    bits[word] |= bits[word + 1] << 63;
    bits[word + 1] >>= 1;
  }
}

}  // namespace

ProtectedValues::ProtectedValues(const CacheTraits& traits)
    : traits_(traits), sorted_(traits.device()) {}

std::vector<float> ProtectedValues::scores(ConstTensorView embeddings,
                                           std::span<const int16_t> modality,
                                           Stream& stream) const {
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    if (!traits_.layer(layer).protects) continue;
    // Scores depend on input embeddings only, so they hold for all layers.
    Tensor on_host(DType::kF32, embeddings.shape());
    copy(on_host, embeddings, stream);
    return traits_.quantizer(kRest, layer)->protection_scores(on_host, modality);
  }
  return {};
}

void ProtectedValues::place(LayerState& state, int layer, std::byte* memory, int64_t ever) const {
  if (!traits_.layer(layer).protects) return;
  const bool per_head = traits_.layouts().per_head();
  state.protection_bitmaps = per_head ? traits_.shape().kv_heads : 1;
  const auto bitmaps = static_cast<size_t>(state.protection_bitmaps);
  const size_t words = traits_.layouts().protection_bytes(ever) / bitmaps / sizeof(uint64_t);
  auto* bits = reinterpret_cast<uint64_t*>(memory);
  if (traits_.on_gpu()) {
    // The host decides, so it keeps the bits; a GPU gets them with each layer's segments.
    state.protection.resize(bitmaps * words);
    bits = state.protection.data();
  }
  std::fill_n(bits, bitmaps * words, uint64_t{0});
  for (size_t h = 0; h < state.heads.size(); ++h) {
    state.heads[h].protected_bits = bits + (per_head ? h : 0) * words;
  }
}

void ProtectedValues::copy_bits(const LayerState& from, LayerState& to) noexcept {
  for (size_t h = 0; h < static_cast<size_t>(from.protection_bitmaps); ++h) {
    const StoreBuffers& rest = from.heads[h].stores[kRest];
    const int slots = rest.values.slots() + rest.protected_values.packed();
    std::copy_n(from.heads[h].protected_bits, static_cast<size_t>(slots + 63) / 64,
                to.heads[h].protected_bits);
  }
}

size_t ProtectedValues::bytes(const LayerState& state) noexcept {
  size_t bytes = 0;
  for (int i = 0; i < state.protection_bitmaps; ++i) {
    bytes += static_cast<size_t>(state.heads[static_cast<size_t>(i)].packed_values() + 7) / 8;
  }
  return bytes;
}

void ProtectedValues::choose(const Sequence& sequence, int layer, HeadState& head,
                             std::span<const int32_t> rows) const {
  std::vector<float> scores;
  std::vector<int16_t> modality;
  for (const int32_t row : rows) {
    scores.push_back(sequence.prompt.protection[static_cast<size_t>(row)]);
    modality.push_back(sequence.modality[static_cast<size_t>(row)]);
  }
  for (const int32_t slot : traits_.quantizer(kRest, layer)->protect(scores, modality)) {
    head.protected_bits[slot / 64] |= uint64_t{1} << (slot % 64);
  }
}

void ProtectedValues::reserve(size_t rows, size_t heads) {
  sorted_.grow(rows * traits_.dim());
  heads_.reserve(heads);
  rows_.reserve(rows);
  queue_.reserve(rows);
}

void ProtectedValues::start(size_t rows) {
  sorted_.grow(rows * traits_.dim());
  sorted_rows_ = 0;
  heads_.clear();
  rows_.clear();
}

void ProtectedValues::add(HeadState& head, const float* values, int old, int rows, int first) {
  Sorted sorted{&head.stores[kRest], sorted_.data() + sorted_rows_ * traits_.dim(), 0, 0};
  for (const bool apart : {false, true}) {
    for (int row = 0; row < rows; ++row) {
      const bool here = row >= old && is_protected(head, first + row - old);
      if (here != apart) continue;
      const float* x = values + static_cast<size_t>(row) * traits_.dim();
      rows_.push_back(reinterpret_cast<const std::byte*>(x));
      ++(apart ? sorted.apart : sorted.plain);
    }
  }
  sorted_rows_ += static_cast<size_t>(rows);
  heads_.push_back(sorted);
}

void ProtectedValues::pack(const Packing& packing, const Packing& apart, Stream& stream) {
  widen_rows(rows_, DType::kF32, traits_.shape().head_dim, sorted_.data(), stream);
  for (const Sorted& head : heads_) {
    queue_.add(packing, head.buffers->values, {head.x}, head.plain);
  }
  queue_.run(stream);
  for (const Sorted& head : heads_) {
    const float* x = head.x + static_cast<size_t>(head.plain) * traits_.dim();
    queue_.add(apart, head.buffers->protected_values, {x}, head.apart);
  }
  queue_.run(stream);
}

void ProtectedValues::add_packed(const HeadState& head, SegmentList& segments) {
  const StoreBuffers& rest = head.stores[kRest];
  const int first = segments.size();
  rest.values.blocks.add_to(segments);
  if (rest.protected_values.packed() == 0) return;
  SlotSegment apart;
  apart.slots = rest.protected_values.packed();
  apart.format = &rest.protected_values.layout().packing->format;
  apart.blocks = rest.protected_values.blocks.all();
  apart.selection = head.protected_bits;
  apart.selected_bit = true;
  apart.selected_of = head.packed_values();
  apart.selection_ends = true;
  if (rest.values.packed() == 0) return segments.insert(first, apart);
  SlotSegment& others = segments[first];
  others.selection = head.protected_bits;
  others.selected_of = apart.selected_of;
  segments.insert(first + 1, apart);
}

void ProtectedValues::interleave(const HeadState& head, const float* plain, const float* apart,
                                 float* out, Stream& stream) {
  rows_.clear();
  for (int slot = 0; slot < head.packed_values(); ++slot) {
    const float*& row = is_protected(head, slot) ? apart : plain;
    rows_.push_back(reinterpret_cast<const std::byte*>(row));
    row += traits_.dim();
  }
  widen_rows(rows_, DType::kF32, traits_.shape().head_dim, out, stream);
}

void ProtectedValues::erase(HeadState& head, int slot) noexcept {
  const StoreBuffers& rest = head.stores[kRest];
  const int slots = rest.values.slots() + rest.protected_values.packed();
  erase_bit(head.protected_bits, slot, slots + 1);
}

int ProtectedValues::protected_before(const HeadState& head, int slot) noexcept {
  int count = 0;
  for (int word = 0; word < slot / 64; ++word) count += std::popcount(head.protected_bits[word]);
  const uint64_t low = (uint64_t{1} << (slot % 64)) - 1;
  return count + std::popcount(head.protected_bits[slot / 64] & low);
}

}  // namespace kvlm
