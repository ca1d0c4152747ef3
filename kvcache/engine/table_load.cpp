// What a DecodeTable can serve and what room it takes: bounds of a sequence before its prompt has
// ended, and what it has afterwards.
#include "kvcache/engine/table_load.h"

#include <algorithm>
#include <array>

namespace kvlm {

namespace {

/// Rows of a KV head at a time, at most.
int peak_rows(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (traits.retention() == nullptr) return sequence.size.max_rows;
  return traits.retention()->peak_rows_of_layer(traits.shape().layers, sequence.size.prompt_rows,
                                                sequence.size.max_rows);
}

/// Rows that a KV head ever has, at most.
int rows_ever(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (traits.retention() == nullptr) return sequence.size.max_rows;
  return peak_rows(traits, sequence) + sequence.size.max_rows - sequence.size.prompt_rows;
}

/// Places of a side of a KV head whose packed rows a table drops, before anybody knows what the
/// prompt leaves: at least as many as there will be.
int places_bound(const CacheTraits& traits, const Sequence& sequence, int layer,
                 KvSide side) noexcept {
  const int peak = peak_rows(traits, sequence);
  const int ever = rows_ever(traits, sequence);
  const PlaneLayout layout = traits.layouts().plane(kRest, side, layer);
  const PlaneCapacity capacity = traits.layouts().capacity(layout, 1, ever, peak, 1);
  const int visual = traits.plan().split ? std::min(peak, sequence.size.visual_rows) : 0;
  return visual + static_cast<int>(capacity.blocks) * layout.block_rows() +
         static_cast<int>(capacity.ring_rows);
}

/// Rows of a KV head that are numbered or weighed by places, at most.
int weighed_rows(const CacheTraits& traits, const Sequence& sequence) noexcept {
  const TableDrops& drops = traits.table();
  if (!drops.places) return drops.weighs || drops.scores ? peak_rows(traits, sequence) : 0;
  if (sequence.prompted) {
    return std::min(sequence.places >= 0 ? sequence.places : most_places(sequence), kMostPlaces);
  }
  int most = 0;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    for (const KvSide side : kSides) {
      most = std::max(most, places_bound(traits, sequence, layer, side));
    }
  }
  return std::min(most, kMostPlaces);  // a bound may be more than there will be
}

/// The rows of the shortest blocks.
int least_block_rows(const CacheTraits& traits) noexcept {
  int least = kMostPlaces;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    for (const KvSide side : kSides) {
      const int rows = traits.layouts().plane(kRest, side, layer).block_rows();
      if (rows > 0) least = std::min(least, rows);
    }
  }
  return least;
}

/// Some packed row was evicted whose block is still on the list.
bool has_lost_rows(const Plane& plane) noexcept {
  return std::any_of(plane.blocks.all().begin(), plane.blocks.all().end(),
                     [](const PackedBlock& block) { return block.live != nullptr; });
}

/// Whether a table can find the rows that are packed without asking where each lies: none was
/// evicted.
bool lies_evenly(const CacheTraits& traits, const Sequence& sequence) noexcept {
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    for (const HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      for (const KvSide side : kSides) {
        const bool counted = !traits.host_flushes(layer, side) || traits.table().places;
        if (counted && !head.plane(kRest, side).blocks.is_even()) return false;
        if (has_lost_rows(head.plane(kVisual, side))) return false;
      }
    }
  }
  return true;
}

/// Whether packed rows of a sequence may go and others come: it has not too many, and no fork reads
/// them.
bool may_place(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (!traits.table().places || sequence.places > kMostPlaces) return false;
  for (const LayerState& layer : sequence.layers) {
    for (const HeadState& head : layer.heads) {
      for (const KvSide side : kSides) {
        if (!head.plane(kRest, side).owns_blocks()) return false;
        const Plane& visual = head.plane(kVisual, side);
        if (visual.full() > 0 || visual.blocks.memory().is_shared()) return false;
      }
    }
  }
  return true;
}

/// What a DecodeTable is told of once of a KV head's side: in front of what the side gains.
///   forked  some blocks may be those of another sequence
int fixed_runs(const CacheTraits& traits, int layer, KvSide side, bool forked) noexcept {
  const int visual = traits.plan().split ? 3 : 0;  // packed rows, and full ones of a ring
  if (traits.layer(layer).protects) return visual + 2;
  if (traits.host_flushes(layer, side)) return visual + 1;
  const bool packs = traits.flush_rule(side, layer) != nullptr;
  return visual + (packs && (forked || traits.evicts()) ? 1 : 0);
}

int fixed_runs(const CacheTraits& traits, bool forked) noexcept {
  int most = 0;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    for (const KvSide side : kSides) {
      most = std::max(most, fixed_runs(traits, layer, side, forked));
    }
  }
  return most;
}

/// Some sequence reads blocks of others, which do not lie evenly: those of a fork's fork.
bool shares_unevenly(const Sequence& sequence) noexcept {
  if (!sequence.open || !sequence.goes_on_elsewhere) return false;
  return std::any_of(sequence.layers.begin(), sequence.layers.end(), [](const LayerState& layer) {
    const StorePlanes& rest = layer.heads[0].stores[kRest];
    return !lie_evenly(rest.keys.blocks.elsewhere()) || !lie_evenly(rest.values.blocks.elsewhere());
  });
}

/// Some windows are flushed by the host, into blocks that may lie anywhere.
bool has_host_windows(const CacheTraits& traits) noexcept {
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    const LayerTraits& of = traits.layer(layer);
    if (of.protects || of.host_flushes[0] || of.host_flushes[1]) return true;
    if (traits.plan().split && !of.windows.empty()) return true;
  }
  return false;
}

/// Blocks of the fixed runs of a KV head, at most, with those that are cut because they are long.
int listed_blocks(const CacheTraits& traits, const Sequence& sequence, int layer) {
  constexpr int kLeastCut = 256;
  const Layouts& layouts = traits.layouts();
  const int peak = peak_rows(traits, sequence);
  const int ever = rows_ever(traits, sequence);
  int64_t blocks = 0;
  for (const KvSide side : kSides) {
    blocks += ever / kLeastCut + 2;
    if (traits.plan().split) blocks += Layouts::kMaxImages;
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      const PlaneLayout layout = layouts.plane(store, side, layer);
      if (layout.packing == nullptr || layout.once) continue;
      blocks += layouts.capacity(layout, 1, ever, peak, 1).blocks;
    }
  }
  if (traits.layer(layer).protects) blocks += layouts.protected_capacity(layer, 1, ever).blocks;
  return static_cast<int>(blocks);
}

}  // namespace

TableLoad table_load(const CacheTraits& traits, std::span<const Sequence> sequences,
                     const Workload& load) {
  TableLoad most;
  most.slots = static_cast<int>(load.slots);
  most.longest = static_cast<int>(load.longest);
  const bool forked = std::any_of(sequences.begin(), sequences.end(), [](const Sequence& sequence) {
    return sequence.open && sequence.goes_on_elsewhere;
  });
  most.fixed_runs = fixed_runs(traits, forked);
  const bool uneven =
      traits.evicts() || traits.layouts().per_image() || has_host_windows(traits) ||
      (forked &&
       (traits.plan().split || std::any_of(sequences.begin(), sequences.end(), shares_unevenly)));
  const Sequence* last = nullptr;
  for (const Sequence& sequence : sequences) {
    if (!sequence.open) continue;
    most.weighed_rows = std::max(most.weighed_rows, weighed_rows(traits, sequence));
    if (last != nullptr && last->size == sequence.size) continue;
    last = &sequence;
    for (int layer = 0; uneven && most.fixed_runs > 0 && layer < traits.shape().layers; ++layer) {
      most.listed_blocks = std::max(most.listed_blocks, listed_blocks(traits, sequence, layer));
    }
    if (traits.evicts() && traits.retention()->rerotates()) {
      most.turns = std::max(most.turns, sequence.size.max_rows);
    }
  }
  if (traits.needs().prompt_embeddings) most.words = 2 * (most.longest / 64 + 1);
  // Bitmaps of their rows.
  if (traits.evicts()) most.words += 2 * (most.longest / 64 + 1) + most.listed_blocks;
  if (traits.table().places) {
    if (traits.plan().split) most.fixed_blocks = static_cast<int>(Layouts::kMaxImages);
    if (has_host_windows(traits)) most.fixed_blocks += most.listed_blocks;
  }
  if (traits.table().places) most.blocks = most.weighed_rows / least_block_rows(traits) + 1;
  return most;
}

int most_places(const Sequence& sequence) noexcept {
  int most = 0;
  for (const LayerState& layer : sequence.layers) {
    for (const HeadState& head : layer.heads) {
      for (const KvSide side : kSides) {
        most =
            std::max(most, head.plane(kVisual, side).places() + head.plane(kRest, side).places());
      }
    }
  }
  return most;
}

TableLoad placed_load(const CacheTraits& traits, const Sequence& sequence) noexcept {
  TableLoad load;
  load.weighed_rows = sequence.places;
  load.blocks = load.weighed_rows / least_block_rows(traits) + 1;
  for (const LayerState& layer : sequence.layers) {
    for (const HeadState& head : layer.heads) {
      for (const KvSide side : kSides) {
        // Those of kRest, too, if the host packs them.
        const size_t rest =
            has_host_windows(traits) ? head.plane(kRest, side).blocks.all().size() : 0;
        const auto blocks = static_cast<int>(head.plane(kVisual, side).blocks.all().size() + rest);
        load.fixed_blocks = std::max(load.fixed_blocks, blocks);
      }
    }
  }
  return load;
}

bool table_counts(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (!traits.evicts()) return true;
  if (!traits.table().counts || sequence.goes_on_elsewhere) return false;
  if (!traits.table().weighs && !traits.table().scores) {
    return (!sequence.placed && lies_evenly(traits, sequence)) || may_place(traits, sequence);
  }
  if (traits.table().places && !may_place(traits, sequence)) return false;
  if (traits.table().scores) return true;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
    if (state.heads[0].slots() != state.kept || !least_weight(traits, sequence, layer)) {
      return false;
    }
  }
  return true;
}

bool will_be_placed(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (sequence.placed || !traits.table().places) return sequence.placed;
  return traits.table().weighs || traits.table().scores || !lies_evenly(traits, sequence);
}

std::optional<LeastWeight> least_weight(const CacheTraits& traits, const Sequence& sequence,
                                        int layer) noexcept {
  const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  DecodeView view;
  view.rows = state.heads[0].slots() + 1;
  view.prompt_rows = sequence.prompt_rows;
  view.step = sequence.rows + 1 - sequence.prompt_rows;
  view.kept = state.kept;
  view.forget = state.forget;
  view.scored = static_cast<int>(state.heads[0].scores.size());
  return traits.retention()->least_weight(view);
}

}  // namespace kvlm
