// Memory of sequences. open() sets aside what a sequence can ever need, in one extent. place()
// deals it out to the planes of a layer and to extensions, once it is known what the layer keeps.
// Decode asks for none.
#include "kvcache/engine/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kvcache/nominal.h"

namespace kvlm {

SequenceStore::SequenceStore(const CacheTraits& traits, size_t arena_bytes,
                             const DecodeWeights& weights, const ProtectedValues& protected_values,
                             const SinkRotation& sinks)
    : traits_(traits),
      weights_(weights),
      protected_values_(protected_values),
      sinks_(sinks),
      arena_(traits.device(), arena_bytes) {}

SequenceId SequenceStore::open(const SequenceSize& size, const std::string& who) {
  assert(size.prompt_rows > 0 && size.prompt_rows <= size.max_rows);
  assert(size.visual_rows >= 0 && size.visual_rows <= size.prompt_rows);
  Sequence made;
  reserve(made, size, who);
  made.open = true;
  made.size = size;
  size_t slot = 0;
  while (slot < sequences_.size() && sequences_[slot].open) ++slot;
  if (slot == sequences_.size()) sequences_.emplace_back();
  made.layers = std::move(sequences_[slot].layers);
  made.layers.resize(traits_.layers());
  for (LayerState& layer : made.layers) layer.heads.resize(traits_.kv_heads());
  sequences_[slot] = std::move(made);
  return static_cast<SequenceId>(slot);
}

void SequenceStore::reserve(Sequence& sequence, const SequenceSize& size, const std::string& who) {
  const size_t memory = traits_.layouts().memory_bound(size);
  const size_t staging = traits_.layouts().staging_bytes(size);
  const auto refuse = [&] {
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("{} does not fit: {} tokens of {} cache take up to {}, {} more while the "
                    "prompt is read, and {} of {} are free; use a smaller batch, fewer "
                    "tokens or more cache memory",
                    who, size.max_rows, traits_.plan().spec, human_bytes(memory),
                    human_bytes(staging), human_bytes(arena_.capacity() - arena_.reserved()),
                    human_bytes(arena_.capacity())));
  };
  if (!arena_.fits(memory, 1)) refuse();
  sequence.memory = arena_.reserve(memory, who);
  if (!arena_.fits(staging, 1)) {
    sequence.memory = ArenaExtent();
    refuse();
  }
  sequence.prompt.staging = arena_.reserve(staging, who);
}

void SequenceStore::close(SequenceId id) noexcept {
  Sequence& sequence = at(id);
  sequence.open = false;
  for (LayerState& layer : sequence.layers) layer.clear();
  sequence.memory = ArenaExtent();
  sequence.prompt = {};
}

Workload SequenceStore::workload() const noexcept {
  Workload load;
  for (const Sequence& sequence : sequences_) {
    if (!sequence.open) continue;
    const auto rows = static_cast<size_t>(sequence.size.max_rows);
    load.slots = static_cast<size_t>(&sequence - sequences_.data()) + 1;
    ++load.sequences;
    load.heads += traits_.kv_heads();
    load.rows += traits_.kv_heads() * rows;
    load.longest = std::max(load.longest, rows);
  }
  return load;
}

void SequenceStore::place(Sequence& sequence, int layer,
                          std::span<const std::array<int, kStores>> counts, double forget) const {
  LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const int future = sequence.size.max_rows - sequence.prompt_rows;
  const Retention* rule = traits_.retention();
  const int most = rule == nullptr ? sequence.size.max_rows
                                   : rule->peak_rows(state.kept, forget, sequence.prompt_rows,
                                                     sequence.size.max_rows);
  int ever = 0;
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    place_stores(sequence, layer, h, counts[h], most);
    state.heads[h].tags.reserve(static_cast<size_t>(most) + 1);
    ever = std::max(ever, counts[h][kRest] + future);
  }
  std::byte* extras = sequence.memory.data() + sequence.placed;
  sequence.placed += traits_.layouts().extra_bytes(layer, most, ever);
  assert(sequence.placed <= sequence.memory.reserved());
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

/// Places the planes of a KV head, whose stores get `counts` rows of the prompt and never have more
/// than `most`.
void SequenceStore::place_stores(Sequence& sequence, int layer, size_t head,
                                 const std::array<int, kStores>& counts, int most) const {
  const Layouts& layouts = traits_.layouts();
  HeadState& state = sequence.layers[static_cast<size_t>(layer)].heads[head];
  const int future = sequence.size.max_rows - sequence.prompt_rows;
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    StorePlanes& planes = state.stores[store];
    const int count = counts[store];
    const Quantizer* quantizer = traits_.quantizer(store, layer);
    for (const Part part : {Part::kKeys, Part::kValues}) {
      const Plane::Layout layout = layouts.plane(store, part, layer);
      const bool grows = store == kRest || (traits_.plan().split && !layout.once);
      const int rows = count + (grows ? future : 0);
      if (rows == 0) continue;
      const bool per_image = quantizer != nullptr && quantizer->per_image();
      const auto spans =
          per_image ? std::min<int64_t>(std::max(count, 1), Layouts::kMaxImages) : int64_t{1};
      place_plane(sequence, planes.plane(part), layout,
                  layouts.capacity(layout, 1, rows, std::min(rows, most), spans),
                  layout.shared ? owner_of(sequence, layer, head, store, part) : nullptr);
    }
    const Plane::Layout apart = layouts.protected_values(layer);
    if (store == kRest && apart.plan != nullptr) {
      place_plane(sequence, planes.protected_values, apart,
                  layouts.protected_capacity(layer, 1, count), nullptr);
    }
    if (quantizer != nullptr && quantizer->key_basis() != nullptr) {
      // A short prompt is learned from in decode.
      state.facts[store].key_channels.reserve(traits_.dim());
    }
  }
}

void SequenceStore::place_plane(Sequence& sequence, Plane& plane, const Plane::Layout& layout,
                                const PlaneCapacity& capacity, const Plane* owner) const {
  plane.place(layout, capacity, sequence.memory.data() + sequence.placed, owner);
  sequence.placed += Layouts::aligned(capacity.bytes());
}

/// The plane that holds the codes of a plane that shares them.
const Plane* SequenceStore::owner_of(const Sequence& sequence, int layer, size_t head, size_t store,
                                     Part part) const noexcept {
  const auto from = static_cast<size_t>(traits_.layouts().owner(part, layer));
  return &sequence.layers[from].heads[head].plane(store, part);
}

void SequenceStore::count_planes(Sequence& sequence) noexcept {
  for (LayerState& state : sequence.layers) {
    state.plane_bytes = 0;
    for (const HeadState& head : state.heads) {
      for (const StorePlanes& planes : head.stores) {
        state.plane_bytes +=
            planes.keys.bytes() + planes.values.bytes() + planes.protected_values.bytes();
      }
    }
  }
}

void SequenceStore::account(Sequence& sequence) const noexcept {
  size_t bytes = 0;
  for (const LayerState& state : sequence.layers) {
    bytes += state.plane_bytes;
    for (const size_t mask : state.mask_bytes) bytes += mask;
    bytes += weights_.bytes(state) + ProtectedValues::bytes(state) + sinks_.bytes(state);
  }
  sequence.memory.set_used(bytes);
  if (sequence.prompted) return;
  const auto layers = static_cast<size_t>(traits_.layouts().staged_layers());
  sequence.prompt.staging.set_used(layers * 2 * traits_.kv_heads() *
                                   static_cast<size_t>(sequence.prompt.staged) *
                                   traits_.row_bytes());
}

CacheReport SequenceStore::report(const Sequence& sequence) const noexcept {
  CacheReport report;
  report.bytes = sequence.memory.used() + sequence.prompt.staging.used();
  const size_t elements = traits_.shape().elements_per_token() * static_cast<size_t>(sequence.rows);
  report.f16_bytes = 2 * elements;
  if (elements == 0) return report;
  report.stored_bits = 8.0 * static_cast<double>(report.bytes) / static_cast<double>(elements);
  for (size_t layer = 0; layer < traits_.layers(); ++layer) {
    report.slots += sequence.slots_of(layer);
  }
  report.slots /= traits_.shape().layers;
  if (!sequence.prompted) report.slots = sequence.rows;
  // Times the share of tokens kept.
  report.nominal_bits = nominal_bits_of(sequence) * report.slots / sequence.rows;
  return report;
}

double SequenceStore::nominal_bits_of(const Sequence& sequence) const {
  const CachePlan& plan = traits_.plan();
  std::array<ScopeClaim, kStores> scopes;
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    scopes[store].packers = plan.quantizers[store];
    for (size_t layer = 0; layer < traits_.layers(); ++layer) {
      const HeadState& head = sequence.layers[layer].heads[0];
      scopes[store].slots += head.stores[store].keys.slots();
      // Those that the host has not counted are text.
      if (store == kRest) scopes[store].slots += sequence.slots_of(layer) - head.slots();
    }
  }
  return nominal_bits(std::span(scopes).subspan(traits_.first_store()), plan.rows, plan.share);
}

}  // namespace kvlm
