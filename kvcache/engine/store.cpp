// Memory of sequences. open() reserves all that a sequence can need as one extent, which Placement
// divides. Decode reserves nothing more. fork() creates a sequence that reads its parent's blocks
// in place.
#include "kvcache/engine/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kvcache/plan/nominal.h"
#include "kvcache/plan/sequence_bounds.h"

namespace kvlm {

SequenceStore::SequenceStore(const CacheTraits& traits, std::shared_ptr<Arena> arena,
                             const Placement& placement, const DecodeWeights& weights,
                             const SinkRotation& sinks)
    : traits_(traits),
      placement_(placement),
      weights_(weights),
      sinks_(sinks),
      arena_(std::move(arena)) {}

SequenceId SequenceStore::open(const SequenceSize& size, const std::string& who) {
  assert(size.prompt_rows > 0 && size.prompt_rows <= size.max_rows);
  assert(size.visual_rows >= 0 && size.visual_rows <= size.prompt_rows);
  Sequence made;
  reserve(made, size, who);
  made.size = size;
  if (const size_t slot = free_slot(); slot < sequences_.size()) {
    made.layers = std::move(sequences_[slot].layers);
  } else {
    prepare_next();
    made.layers = std::exchange(next_layers_, {});
  }
  return admit(std::move(made));
}

void SequenceStore::prepare_next() {
  if (!next_layers_.empty() || free_slot() < sequences_.size()) return;
  std::vector<LayerState> layers(traits_.layers());
  for (LayerState& layer : layers) layer.heads.resize(traits_.kv_heads());
  next_layers_ = std::move(layers);
}

/// The first sequence id that is free.
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

bool SequenceStore::fits(const SequenceSize& size) const {
  const SequenceBounds bounds(traits_.plan());
  const size_t memory = bounds.memory_bound(size);
  if (!arena_->fits(memory, 1)) return false;
  const size_t staging = bounds.staging_bytes(size);
  if (staging == 0) return true;
  const ArenaExtent held = arena_->reserve(memory, {});
  return arena_->fits(staging, 1);
}

void SequenceStore::reserve(Sequence& sequence, const SequenceSize& size, const std::string& who) {
  const size_t memory = SequenceBounds(traits_.plan()).memory_bound(size);
  const size_t staging = SequenceBounds(traits_.plan()).staging_bytes(size);
  const auto refuse = [&] {
    const std::string more =
        staging == 0 ? "" : fmt::format(", and {} more during prefill", human_bytes(staging));
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("{} does not fit: a cache of {} tokens under --kv {} takes {}{}{}, and {} of "
                    "{} are free; use a smaller batch, fewer tokens or more cache memory",
                    who, size.max_rows, traits_.plan().spec, staging == 0 ? "" : "up to ",
                    human_bytes(memory), more, human_bytes(arena_->capacity() - arena_->reserved()),
                    human_bytes(arena_->capacity())));
  };
  if (!arena_->fits(memory, 1)) refuse();
  sequence.memory = std::make_shared<ArenaExtent>(arena_->reserve(memory, who, &used_));
  if (staging == 0) return;
  if (!arena_->fits(staging, 1)) {
    sequence.memory.reset();
    refuse();
  }
  sequence.prompt.staging = arena_->reserve(staging, who, &used_);
}

void SequenceStore::close(SequenceId id) noexcept {
  Sequence& sequence = at(id);
  sequence.open = sequence.prompted = sequence.on_gpu = sequence.placed = false;
  sequence.told_anew = false;
  sequence.places = -1;
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

SequenceId SequenceStore::fork(SequenceId parent, int max_rows, const std::string& who,
                               Stream& stream) {
  Sequence made = fork_counts(at(parent), max_rows);
  const size_t bytes = placement_.forked_bytes(at(parent), made);
  if (!arena_->fits(bytes, 1)) {
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format(
            "{} does not fit: a fork from {} to {} tokens under --kv {} takes up to {}, and {} of "
            "{} are free; fork fewer sequences, give them fewer tokens or use more cache memory",
            who, made.rows, max_rows, traits_.plan().spec, human_bytes(bytes),
            human_bytes(arena_->capacity() - arena_->reserved()), human_bytes(arena_->capacity())));
  }
  made.memory = std::make_shared<ArenaExtent>(arena_->reserve(bytes, who, &used_));
  const SequenceId id = admit(std::move(made));
  std::vector<ByteRange> copies;
  try {
    for (int layer = 0; layer < traits_.shape().layers; ++layer) {
      placement_.fork_layer(at(parent), at(id), layer, copies);
    }
    if (at(parent).shared > 0) at(id).read.push_back(at(parent).memory);
    for (const SequenceId counted : {parent, id}) count_buffers(at(counted));
    account(at(id));
    copy_ranges(copies, stream);
  } catch (...) {
    close(id);
    throw;
  }
  return id;
}

/// State of a fork, without buffers.
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
    state.tail = from.tail;
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

void SequenceStore::count_buffers(Sequence& sequence) noexcept {
  for (LayerState& state : sequence.layers) {
    state.buffer_bytes = 0;
    for (const HeadState& head : state.heads) {
      for (const StoreBuffers& buffers : head.stores) {
        state.buffer_bytes +=
            buffers.keys.bytes() + buffers.values.bytes() + buffers.protected_values.bytes();
      }
    }
  }
}

void SequenceStore::account(Sequence& sequence) const noexcept {
  size_t bytes = 0;
  for (const LayerState& state : sequence.layers) {
    bytes += state.buffer_bytes;
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

CacheReport SequenceStore::report(const Sequence& sequence,
                                  std::span<const int> visual_slots) const noexcept {
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
  // Scaled by the share of tokens kept.
  report.nominal_bits = nominal_bits_of(sequence, visual_slots) * report.slots / sequence.rows;
  return report;
}

double SequenceStore::nominal_bits_of(const Sequence& sequence,
                                      std::span<const int> visual_slots) const {
  const CachePlan& plan = traits_.plan();
  std::array<ScopeClaim, kStores> scopes;
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    scopes[store].packers = plan.quantizers[store];
    for (size_t layer = 0; layer < traits_.layers(); ++layer) {
      const HeadState& head = sequence.layers[layer].heads[0];
      const int visual =
          visual_slots.empty() ? head.stores[kVisual].keys.slots() : visual_slots[layer];
      // Tokens that the host has not counted are text.
      scopes[store].slots += store == kVisual ? visual : sequence.slots_of(layer) - visual;
    }
  }
  return nominal_bits(std::span(scopes).subspan(traits_.first_store()), plan.rows, plan.share);
}

}  // namespace kvlm
