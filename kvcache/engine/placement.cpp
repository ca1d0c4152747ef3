// Addresses in a sequence's extent: packed blocks from its beginning; rings and extension data from
// its end. A fork reads those of its parent's blocks that never change, and copies all else into
// its own extent.
#include "kvcache/engine/placement.h"

#include <algorithm>
#include <cassert>

namespace kvlm {

namespace {

KvSide side_of(KvBuffer StoreBuffers::*side) noexcept {
  return side == &StoreBuffers::keys ? KvSide::kKeys : KvSide::kValues;
}

}  // namespace

Placement::Placement(const CacheTraits& traits, const DecodeWeights& weights,
                     const ProtectedValues& protected_values, const SinkRotation& sinks)
    : traits_(traits), weights_(weights), protected_values_(protected_values), sinks_(sinks) {}

void Placement::place_rows(Sequence& sequence, int layer) const {
  if (!sequence.layers[static_cast<size_t>(layer)].counts.empty()) return;
  const std::vector<std::array<int, kStores>> none(traits_.kv_heads());
  place(sequence, layer, none);
}

void Placement::place(Sequence& sequence, int layer,
                      std::span<const std::array<int, kStores>> counts) const {
  sequence.layers[static_cast<size_t>(layer)].counts.assign(counts.begin(), counts.end());
  for_buffers(sequence, layer,
              [&](const Site& site) { place_buffer(sequence, site, site.capacity); });
  prepare_heads(sequence, layer);
  place_extras(sequence, layer);
}

/// Calls body(site) for the buffers of a layer that ever hold tokens.
template <class Body>
void Placement::for_buffers(const Sequence& sequence, int layer, const Body& body) const {
  const Layouts& layouts = traits_.layouts();
  const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const int future = sequence.size.max_rows - sequence.prompt_rows;
  const int most = most_slots(sequence, layer);
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      const int count = state.counts[h][store];
      const Quantizer* quantizer = traits_.quantizer(store, layer);
      for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
        const BufferLayout layout = layouts.buffer(store, side, layer);
        const bool grows = store == kRest || (traits_.plan().split && !layout.once);
        const int rows = count + (grows ? future : 0);
        if (rows == 0) continue;
        const bool per_image = quantizer != nullptr && quantizer->per_image();
        const auto spans =
            per_image ? std::min<int64_t>(std::max(count, 1), Layouts::kMaxImages) : int64_t{1};
        body(Site{layer, h, store,
                  side == KvSide::kKeys ? &StoreBuffers::keys : &StoreBuffers::values, layout,
                  layouts.capacity(layout, 1, rows, std::min(rows, most), spans)});
      }
      const BufferLayout apart = layouts.protected_values(layer);
      if (store == kVisual || apart.packing == nullptr) continue;
      body(Site{layer, h, store, &StoreBuffers::protected_values, apart,
                layouts.protected_capacity(layer, 1, count)});
    }
  }
}

void Placement::place_buffer(Sequence& sequence, const Site& site,
                             const BufferCapacity& capacity) const {
  std::byte* packed = sequence.memory->data() + sequence.placed_blocks;
  sequence.placed_blocks += Layouts::aligned(capacity.packed_bytes);
  std::byte* ring = take_rest(sequence, Layouts::aligned_ring(capacity.ring_bytes));
  site.in(sequence).place(site.layout, capacity, packed, ring, owner_of(sequence, site));
}

/// The most slots of a KV head of a layer at any time.
int Placement::most_slots(const Sequence& sequence, int layer) const noexcept {
  const Retention* rule = traits_.retention();
  if (rule == nullptr) return sequence.size.max_rows;
  const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  return rule->peak_rows(state.kept, state.forget, sequence.prompt_rows, sequence.size.max_rows);
}

/// The most tokens that a KV head of a layer ever puts into kRest.
int Placement::most_rows(const Sequence& sequence, int layer) const noexcept {
  int most = 0;
  for (const auto& counts : sequence.layers[static_cast<size_t>(layer)].counts) {
    most = std::max(most, counts[kRest]);
  }
  return most + sequence.size.max_rows - sequence.prompt_rows;
}

/// Reserves the host's lists of slots.
void Placement::prepare_heads(Sequence& sequence, int layer) const {
  const auto most = static_cast<size_t>(most_slots(sequence, layer));
  for (HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
    if (traits_.retention() != nullptr) head.tags.reserve(most + 1);
    for (size_t store = 0; store < kStores; ++store) {
      const Quantizer* quantizer = traits_.quantizer(store, layer);
      if (quantizer == nullptr || quantizer->key_basis() == nullptr) continue;
      // A prompt too short to be packed is learned from in decode.
      head.facts[store].key_channels.reserve(traits_.dim());
    }
  }
}

void Placement::place_extras(Sequence& sequence, int layer) const {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const int most = most_slots(sequence, layer);
  const int ever = most_rows(sequence, layer);
  std::byte* extras = take_rest(sequence, traits_.layouts().extra_bytes(layer, most, ever));
  if (traits_.layer(layer).protects) {
    protected_values_.place(state, layer, extras, ever);
    extras += traits_.layouts().protection_bytes(ever);
  }
  if (weights_.wanted()) {
    weights_.place(state, extras, most);
    extras += traits_.layouts().weight_bytes(most);
  }
  SinkRotation::place(state, extras);
}

/// Takes the next bytes from the end of a sequence's extent.
std::byte* Placement::take_rest(Sequence& sequence, size_t bytes) const noexcept {
  sequence.placed_rest += bytes;
  assert(sequence.placed_blocks + sequence.placed_rest <= sequence.memory->reserved());
  return sequence.memory->data() + sequence.memory->reserved() - sequence.placed_rest;
}

/// The buffer with the codes, if this one shares another layer's; else null.
const KvBuffer* Placement::owner_of(const Sequence& sequence, const Site& site) const noexcept {
  if (!site.layout.shared) return nullptr;
  Site owner = site;
  owner.layer = traits_.layouts().owner(side_of(site.side), site.layer);
  return &owner.in(sequence);
}

/// Packed blocks never change.
bool Placement::blocks_stay(const Site& site) const noexcept {
  const Quantizer* quantizer = traits_.quantizer(site.store, site.layer);
  return site.side == &StoreBuffers::protected_values || quantizer == nullptr ||
         !quantizer->repacks(side_of(site.side));
}

BufferCapacity Placement::forked_capacity(const Sequence& parent, const Sequence& made,
                                          const Site& site) const noexcept {
  const KvBuffer& from = site.in(parent);
  int64_t more = from.full() + made.size.max_rows - made.rows;
  if (site.side == &StoreBuffers::protected_values) {
    // The prompt's tokens that are still unpacked.
    Site values = site;
    values.side = &StoreBuffers::values;
    const int full = values.in(parent).full();
    more = traits_.layouts().protected_capacity(site.layer, 1, full).packed_rows;
  }
  return from.blocks.forked_capacity(site.layout, blocks_stay(site), more, site.capacity.ring_rows);
}

size_t Placement::forked_bytes(const Sequence& parent, const Sequence& made) const {
  size_t bytes = 0;
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    for_buffers(made, layer, [&](const Site& site) {
      const BufferCapacity needed = forked_capacity(parent, made, site);
      bytes += Layouts::aligned(needed.packed_bytes) + Layouts::aligned_ring(needed.ring_bytes);
    });
    bytes += traits_.layouts().extra_bytes(layer, most_slots(made, layer), most_rows(made, layer));
  }
  return bytes;
}

void Placement::fork_layer(Sequence& parent, Sequence& made, int layer,
                           std::vector<ByteRange>& copies) const {
  const int holes = parent.came.empty() ? 0 : 1;  // WeighedRows: a ring has one empty place
  for_buffers(made, layer, [&](const Site& site) {
    KvBuffer& from = site.in(parent);
    KvBuffer& to = site.in(made);
    const size_t before = from.bytes();
    place_buffer(made, site, forked_capacity(parent, made, site));
    const int places = from.full() == 0 ? 0 : from.full() + holes;
    to.fork(from, blocks_stay(site), places, copies);
    parent.shared += before - from.bytes();
    made.goes_on_elsewhere |= !to.blocks.elsewhere().empty();
  });
  prepare_heads(made, layer);
  place_extras(made, layer);
  fork_extras(parent, made, layer, copies);
}

/// Copies extension state: weights, protection bitmaps, sinks.
void Placement::fork_extras(const Sequence& parent, Sequence& made, int layer,
                            std::vector<ByteRange>& copies) const {
  const LayerState& from = parent.layers[static_cast<size_t>(layer)];
  LayerState& to = made.layers[static_cast<size_t>(layer)];
  const auto copy = [&](const float* floats, float* copied, size_t count) {
    if (count == 0) return;
    copies.push_back({reinterpret_cast<const std::byte*>(floats),
                      reinterpret_cast<std::byte*>(copied), count * sizeof(float)});
  };
  const size_t holes = parent.came.empty() ? 0 : 1;
  for (size_t h = 0; h < from.heads.size() && weights_.wanted(); ++h) {
    const auto slots = static_cast<size_t>(from.heads[h].slots());
    copy(from.heads[h].weights, to.heads[h].weights, slots + holes);
  }
  ProtectedValues::copy_bits(from, to);
  copy(from.sinks, to.sinks, sinks_.bytes(from) / sizeof(float));
}

}  // namespace kvlm
