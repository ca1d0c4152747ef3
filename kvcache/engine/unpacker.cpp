#include "kvcache/engine/unpacker.h"

#include "kernels/attend_packed.h"
#include "kernels/key_basis.h"
#include "kernels/row_moves.h"

namespace kvlm {

Unpacker::Unpacker(const CacheTraits& traits, ProtectedValues& protected_values)
    : traits_(traits),
      protected_values_(protected_values),
      in_basis_(traits.device()),
      apart_(traits.device()) {}

void Unpacker::unpack_packed(const KvBuffer& buffer, const HeadFacts& facts, const KeyBasis* basis,
                             float* out, Stream& stream) {
  if (buffer.packed() == 0) return;
  const PackedFormat& format = buffer.layout().packing->format;
  if (basis == nullptr) return unpack_blocks(format, buffer.blocks.all(), out, stream);
  in_basis_.grow(static_cast<size_t>(buffer.packed()) * traits_.dim());
  unpack_blocks(format, buffer.blocks.all(), in_basis_.data(), stream);
  const BasisJob job{in_basis_.data(), out, buffer.packed(), facts.key_channels.data()};
  change_basis(*basis, BasisChange::kBack, {&job, 1}, stream);
}

void Unpacker::reserve(size_t rows, size_t buffers, size_t blocks) {
  in_basis_.grow(rows * traits_.dim());
  blocks_.reserve(blocks);
  jobs_.reserve(buffers);
}

void Unpacker::unpack_together(std::span<const PackedRows> buffers, const KeyBasis* basis,
                               std::vector<ByteRange>& copies, Stream& stream) {
  blocks_.clear();
  jobs_.clear();
  size_t rows = 0;
  for (const auto& [buffer, facts, to] : buffers) {
    blocks_.insert(blocks_.end(), buffer->blocks.all().begin(), buffer->blocks.all().end());
    rows += static_cast<size_t>(buffer->packed());
  }
  if (rows == 0) return;
  in_basis_.grow(rows * traits_.dim());
  const float* from = in_basis_.data();
  unpack_blocks(buffers[0].buffer->layout().packing->format, blocks_, in_basis_.data(), stream);
  for (const auto& [buffer, facts, to] : buffers) {
    const size_t floats = static_cast<size_t>(buffer->packed()) * traits_.dim();
    if (floats == 0) continue;
    if (basis != nullptr) {
      jobs_.push_back({from, to, buffer->packed(), facts->key_channels.data()});
    } else {
      copies.push_back({reinterpret_cast<const std::byte*>(from), reinterpret_cast<std::byte*>(to),
                        floats * sizeof(float)});
    }
    from += floats;
  }
  if (basis != nullptr) change_basis(*basis, BasisChange::kBack, jobs_, stream);
}

void Unpacker::unpack_head(const HeadState& head, int layer, float* keys, float* values,
                           Stream& stream) {
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    unpack_keys(head, store, layer, keys, stream);
    unpack_values(head, store, values, stream);
    const size_t elements = static_cast<size_t>(head.stores[store].keys.slots()) * traits_.dim();
    keys += elements;
    values += elements;
  }
}

void Unpacker::unpack_keys(const HeadState& head, size_t store, int layer, float* out,
                           Stream& stream) {
  const KvBuffer& buffer = head.stores[store].keys;
  const Quantizer* quantizer = traits_.quantizer(store, layer);
  const KeyBasis* basis = quantizer == nullptr ? nullptr : quantizer->key_basis();
  unpack_packed(buffer, head.facts[store], basis, out, stream);
  widen_full(buffer, out + static_cast<size_t>(buffer.packed()) * traits_.dim(), stream);
}

void Unpacker::unpack_values(const HeadState& head, size_t store, float* out, Stream& stream) {
  const StoreBuffers& buffers = head.stores[store];
  const auto plain = static_cast<size_t>(buffers.values.packed());
  const auto apart = static_cast<size_t>(buffers.protected_values.packed());
  if (apart == 0) {
    unpack_packed(buffers.values, {}, nullptr, out, stream);
  } else {
    apart_.grow((plain + apart) * traits_.dim());
    float* protected_rows = apart_.data() + plain * traits_.dim();
    unpack_packed(buffers.values, {}, nullptr, apart_.data(), stream);
    unpack_packed(buffers.protected_values, {}, nullptr, protected_rows, stream);
    protected_values_.interleave(head, apart_.data(), protected_rows, out, stream);
  }
  widen_full(buffers.values, out + (plain + apart) * traits_.dim(), stream);
}

void Unpacker::widen_full(const KvBuffer& buffer, float* out, Stream& stream) {
  rows_.clear();
  for (int row = 0; row < buffer.full(); ++row) rows_.push_back(buffer.ring.row(row));
  widen_rows(rows_, traits_.plan().rows, traits_.shape().head_dim, out, stream);
}

}  // namespace kvlm
