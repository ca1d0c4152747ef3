// Memory of sequences. open() sets aside what a sequence can ever need, in one extent. place()
// deals it out to the planes of a layer and to extensions, once it is known what the layer keeps.
// Decode asks for none. fork() makes a sequence that reads another one's blocks where they are.
#include "kvcache/engine/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kvcache/nominal.h"

namespace kvlm {

namespace {

KvSide side_of(Plane StorePlanes::*side) noexcept {
  return side == &StorePlanes::keys ? KvSide::kKeys : KvSide::kValues;
}

}  // namespace

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
  made.size = size;
  if (const size_t slot = free_slot(); slot < sequences_.size()) {
    made.layers = std::move(sequences_[slot].layers);
  }
  made.layers.resize(traits_.layers());
  for (LayerState& layer : made.layers) layer.heads.resize(traits_.kv_heads());
  return admit(std::move(made));
}

/// The first slot without an open sequence.
size_t SequenceStore::free_slot() const noexcept {
  size_t slot = 0;
  while (slot < sequences_.size() && sequences_[slot].open) ++slot;
  return slot;
}

SequenceId SequenceStore::admit(Sequence sequence) {
  const size_t slot = free_slot();
  if (slot == sequences_.size()) sequences_.emplace_back();
  sequence.open = true;
  sequences_[slot] = std::move(sequence);
  return static_cast<SequenceId>(slot);
}

void SequenceStore::reserve(Sequence& sequence, const SequenceSize& size, const std::string& who) {
  const size_t memory = traits_.layouts().memory_bound(size);
  const size_t staging = traits_.layouts().staging_bytes(size);
  const auto refuse = [&] {
    const std::string more =
        staging == 0 ? "" : fmt::format(", {} more while the prompt is read", human_bytes(staging));
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("{} does not fit: {} tokens of {} cache take {}{}{}, and {} of {} are free; "
                    "use a smaller batch, fewer tokens or more cache memory",
                    who, size.max_rows, traits_.plan().spec, staging == 0 ? "" : "up to ",
                    human_bytes(memory), more, human_bytes(arena_.capacity() - arena_.reserved()),
                    human_bytes(arena_.capacity())));
  };
  if (!arena_.fits(memory, 1)) refuse();
  sequence.memory = std::make_shared<ArenaExtent>(arena_.reserve(memory, who));
  if (staging == 0) return;
  if (!arena_.fits(staging, 1)) {
    sequence.memory.reset();
    refuse();
  }
  sequence.prompt.staging = arena_.reserve(staging, who);
}

void SequenceStore::close(SequenceId id) noexcept {
  Sequence& sequence = at(id);
  sequence.open = sequence.prompted = false;
  for (LayerState& layer : sequence.layers) layer.clear();
  if (sequence.memory.use_count() > 1) {  // forks read its blocks
    sequence.memory->set_used(sequence.shared);
    sequence.memory->shrink(sequence.placed_blocks);
  }
  sequence.memory.reset();
  sequence.read.clear();
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

void SequenceStore::place_rows(Sequence& sequence, int layer) const {
  if (!sequence.layers[static_cast<size_t>(layer)].counts.empty()) return;
  const std::vector<std::array<int, kStores>> none(traits_.kv_heads());
  place(sequence, layer, none);
}

void SequenceStore::place(Sequence& sequence, int layer,
                          std::span<const std::array<int, kStores>> counts) const {
  sequence.layers[static_cast<size_t>(layer)].counts.assign(counts.begin(), counts.end());
  for_planes(sequence, layer,
             [&](const Site& site) { place_plane(sequence, site, site.capacity); });
  prepare_heads(sequence, layer);
  place_extras(sequence, layer);
}

/// Calls body(site) for the planes of a layer that have rows at any time.
template <class Body>
void SequenceStore::for_planes(const Sequence& sequence, int layer, const Body& body) const {
  const Layouts& layouts = traits_.layouts();
  const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  const int future = sequence.size.max_rows - sequence.prompt_rows;
  const int most = most_slots(sequence, layer);
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      const int count = state.counts[h][store];
      const Quantizer* quantizer = traits_.quantizer(store, layer);
      for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
        const Plane::Layout layout = layouts.plane(store, side, layer);
        const bool grows = store == kRest || (traits_.plan().split && !layout.once);
        const int rows = count + (grows ? future : 0);
        if (rows == 0) continue;
        const bool per_image = quantizer != nullptr && quantizer->per_image();
        const auto spans =
            per_image ? std::min<int64_t>(std::max(count, 1), Layouts::kMaxImages) : int64_t{1};
        body(Site{layer, h, store,
                  side == KvSide::kKeys ? &StorePlanes::keys : &StorePlanes::values, layout,
                  layouts.capacity(layout, 1, rows, std::min(rows, most), spans)});
      }
      const Plane::Layout apart = layouts.protected_values(layer);
      if (store == kVisual || apart.packing == nullptr) continue;
      body(Site{layer, h, store, &StorePlanes::protected_values, apart,
                layouts.protected_capacity(layer, 1, count)});
    }
  }
}

void SequenceStore::place_plane(Sequence& sequence, const Site& site,
                                const PlaneCapacity& capacity) const {
  std::byte* packed = sequence.memory->data() + sequence.placed_blocks;
  sequence.placed_blocks += Layouts::aligned(capacity.packed_bytes);
  std::byte* ring = take_rest(sequence, Layouts::aligned_ring(capacity.ring_bytes));
  site.in(sequence).place(site.layout, capacity, packed, ring, owner_of(sequence, site));
}

/// Slots that a KV head of a layer holds at a time, at most.
int SequenceStore::most_slots(const Sequence& sequence, int layer) const noexcept {
  const Retention* rule = traits_.retention();
  if (rule == nullptr) return sequence.size.max_rows;
  const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  return rule->peak_rows(state.kept, state.forget, sequence.prompt_rows, sequence.size.max_rows);
}

/// Rows that a KV head of a layer ever puts into kRest, at most.
int SequenceStore::most_rows(const Sequence& sequence, int layer) const noexcept {
  int most = 0;
  for (const auto& counts : sequence.layers[static_cast<size_t>(layer)].counts) {
    most = std::max(most, counts[kRest]);
  }
  return most + sequence.size.max_rows - sequence.prompt_rows;
}

/// Makes room for what the host keeps of each slot.
void SequenceStore::prepare_heads(Sequence& sequence, int layer) const {
  const auto most = static_cast<size_t>(most_slots(sequence, layer));
  for (HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
    if (traits_.retention() != nullptr) head.tags.reserve(most + 1);
    for (size_t store = 0; store < kStores; ++store) {
      const Quantizer* quantizer = traits_.quantizer(store, layer);
      if (quantizer == nullptr || quantizer->key_basis() == nullptr) continue;
      // A short prompt is learned from in decode.
      head.facts[store].key_channels.reserve(traits_.dim());
    }
  }
}

void SequenceStore::place_extras(Sequence& sequence, int layer) const {
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

/// The next bytes from the end of a sequence's memory.
std::byte* SequenceStore::take_rest(Sequence& sequence, size_t bytes) const noexcept {
  sequence.placed_rest += bytes;
  assert(sequence.placed_blocks + sequence.placed_rest <= sequence.memory->reserved());
  return sequence.memory->data() + sequence.memory->reserved() - sequence.placed_rest;
}

/// The plane that holds the codes of a plane that shares them, else null.
const Plane* SequenceStore::owner_of(const Sequence& sequence, const Site& site) const noexcept {
  if (!site.layout.shared) return nullptr;
  Site owner = site;
  owner.layer = traits_.layouts().owner(side_of(site.side), site.layer);
  return &owner.in(sequence);
}

// A fork reads the blocks of its parent that are never written again. It has memory of its own for
// all else, which is copied: full rows, blocks that are being filled or that a policy packs anew,
// attention weights, bitmaps and sinks.

SequenceId SequenceStore::fork(SequenceId parent, int max_rows, const std::string& who,
                               Stream& stream) {
  Sequence made = fork_counts(at(parent), max_rows);
  const size_t bytes = forked_bytes(at(parent), made);
  if (!arena_.fits(bytes, 1)) {
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("{} does not fit: a fork of {} tokens to {} of {} cache takes up to {}, and {} "
                    "of {} are free; fork fewer, give them fewer tokens or use more cache memory",
                    who, made.rows, max_rows, traits_.plan().spec, human_bytes(bytes),
                    human_bytes(arena_.capacity() - arena_.reserved()),
                    human_bytes(arena_.capacity())));
  }
  made.memory = std::make_shared<ArenaExtent>(arena_.reserve(bytes, who));
  const SequenceId id = admit(std::move(made));
  std::vector<ByteRange> copies;
  try {
    for (int layer = 0; layer < traits_.shape().layers; ++layer) {
      fork_layer(at(parent), at(id), layer, copies);
    }
    if (at(parent).shared > 0) at(id).read.push_back(at(parent).memory);
    for (const SequenceId counted : {parent, id}) count_planes(at(counted));
    account(at(id));
    copy_ranges(copies, stream);
  } catch (...) {
    close(id);
    throw;
  }
  return id;
}

/// What the host knows of a fork, without planes.
Sequence SequenceStore::fork_counts(const Sequence& parent, int max_rows) const {
  Sequence made;
  made.prompted = true;
  made.size = parent.size;
  made.size.max_rows = max_rows;
  made.rows = parent.rows;
  made.came = parent.came;
  made.prompt_rows = parent.prompt_rows;
  made.read = parent.read;
  made.modality = parent.modality;
  for (const LayerState& from : parent.layers) {
    LayerState& state = made.layers.emplace_back();
    state.counts = from.counts;
    state.kept = from.kept;
    state.forget = from.forget;
    state.mask_bytes = from.mask_bytes;
    state.sink_rows = from.sink_rows;
    state.rotated_by = from.rotated_by;
    for (const HeadState& head : from.heads) {
      HeadState& copied = state.heads.emplace_back();
      copied.facts = head.facts;
      copied.tags = head.tags;
      copied.scores = head.scores;
    }
  }
  return made;
}

/// No packed block is ever written again.
bool SequenceStore::blocks_stay(const Site& site) const noexcept {
  const Quantizer* quantizer = traits_.quantizer(site.store, site.layer);
  return site.side == &StorePlanes::protected_values || quantizer == nullptr ||
         !quantizer->repacks(side_of(site.side));
}

PlaneCapacity SequenceStore::forked_capacity(const Sequence& parent, const Sequence& made,
                                             const Site& site) const noexcept {
  const Plane& from = site.in(parent);
  int64_t more = from.full() + made.size.max_rows - made.rows;
  if (site.side == &StorePlanes::protected_values) {
    // Those of the prompt that are still full.
    Site values = site;
    values.side = &StorePlanes::values;
    const int full = values.in(parent).full();
    more = traits_.layouts().protected_capacity(site.layer, 1, full).packed_rows;
  }
  return from.forked_capacity(site.layout, blocks_stay(site), more, site.capacity.ring_rows);
}

size_t SequenceStore::forked_bytes(const Sequence& parent, const Sequence& made) const {
  size_t bytes = 0;
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    for_planes(made, layer, [&](const Site& site) {
      const PlaneCapacity needed = forked_capacity(parent, made, site);
      bytes += Layouts::aligned(needed.packed_bytes) + Layouts::aligned_ring(needed.ring_bytes);
    });
    bytes += traits_.layouts().extra_bytes(layer, most_slots(made, layer), most_rows(made, layer));
  }
  return bytes;
}

void SequenceStore::fork_layer(Sequence& parent, Sequence& made, int layer,
                               std::vector<ByteRange>& copies) const {
  const int holes = parent.came.empty() ? 0 : 1;  // WeighedRows: one place of a ring has no row
  for_planes(made, layer, [&](const Site& site) {
    Plane& from = site.in(parent);
    Plane& to = site.in(made);
    const size_t before = from.bytes();
    place_plane(made, site, forked_capacity(parent, made, site));
    const int places = from.full() == 0 ? 0 : from.full() + holes;
    to.fork(from, blocks_stay(site), places, copies);
    parent.shared += before - from.bytes();
    made.goes_on_elsewhere |= to.goes_on_elsewhere();
  });
  prepare_heads(made, layer);
  place_extras(made, layer);
  fork_extras(parent, made, layer, copies);
}

/// Copies what lies beside the planes of a layer.
void SequenceStore::fork_extras(const Sequence& parent, Sequence& made, int layer,
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
  sequence.memory->set_used(bytes + sequence.shared);
  if (sequence.prompted || !traits_.layouts().stages()) return;
  const auto layers = static_cast<size_t>(traits_.layouts().staged_layers());
  sequence.prompt.staging.set_used(layers * 2 * traits_.kv_heads() *
                                   static_cast<size_t>(sequence.prompt.staged) *
                                   traits_.row_bytes());
}

CacheReport SequenceStore::report(const Sequence& sequence) const noexcept {
  CacheReport report;
  if (!sequence.open) return report;
  report.bytes = sequence.memory->used() + sequence.prompt.staging.used();
  if (sequence.memory.use_count() > 1) report.bytes -= sequence.shared;
  for (const std::shared_ptr<ArenaExtent>& read : sequence.read) {
    if (read.use_count() == 1) report.bytes += read->used();
  }
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
