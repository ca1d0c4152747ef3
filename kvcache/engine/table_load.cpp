// What a DecodeTable supports, and the capacity it needs: bounds before a sequence's prompt has
// ended, exact figures afterwards.
#include "kvcache/engine/table_load.h"

#include <algorithm>
#include <array>

namespace kvlm {

namespace {

/// The most tokens of a KV head at any time.
int peak_rows(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (traits.retention() == nullptr) return sequence.size.max_rows;
  return traits.retention()->peak_rows_of_layer(traits.shape().layers, sequence.size.prompt_rows,
                                                sequence.size.max_rows);
}

/// Upper bound of all tokens that a KV head ever stores.
int rows_ever(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (traits.retention() == nullptr) return sequence.size.max_rows;
  return peak_rows(traits, sequence) + sequence.size.max_rows - sequence.size.prompt_rows;
}

/// Upper bound of the places in a K or V buffer with in-place eviction, before the prompt's
/// selection is known.
int places_bound(const CacheTraits& traits, const Sequence& sequence, int layer,
                 KvSide side) noexcept {
  const int peak = peak_rows(traits, sequence);
  const int ever = rows_ever(traits, sequence);
  const BufferLayout layout = traits.layouts().buffer(kRest, side, layer);
  const BufferCapacity capacity = traits.layouts().capacity(layout, 1, ever, peak, 1);
  const int visual = traits.plan().split ? std::min(peak, sequence.size.visual_rows) : 0;
  return visual + static_cast<int>(capacity.blocks) * layout.block_rows() +
         static_cast<int>(capacity.ring_rows);
}

/// The most tokens of a KV head with an arrival number or weight.
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
  return std::min(most, kMostPlaces);  // the bound may exceed what is used
}

/// Tokens of the shortest block.
int least_block_rows(const CacheTraits& traits) noexcept {
  int least = kMostPlaces;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    for (const KvSide side : kSides) {
      const int rows = traits.layouts().buffer(kRest, side, layer).block_rows();
      if (rows > 0) least = std::min(least, rows);
    }
  }
  return least;
}

/// Some block has lost a token.
bool has_lost_rows(const KvBuffer& buffer) noexcept {
  return std::any_of(buffer.blocks.all().begin(), buffer.blocks.all().end(),
                     [](const PackedBlock& block) { return block.live != nullptr; });
}

/// Block addresses follow from one stride: no packed token was evicted.
bool lies_evenly(const CacheTraits& traits, const Sequence& sequence) noexcept {
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    for (const HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      for (const KvSide side : kSides) {
        const bool counted = !traits.host_flushes(layer, side) || traits.table().places;
        if (counted && !head.buffer(kRest, side).blocks.is_even()) return false;
        if (has_lost_rows(head.buffer(kVisual, side))) return false;
      }
    }
  }
  return true;
}

/// Packed tokens of a sequence may be evicted in place: it has few enough places, and no fork reads
/// its blocks.
bool may_place(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (!traits.table().places || sequence.places > kMostPlaces) return false;
  for (const LayerState& layer : sequence.layers) {
    for (const HeadState& head : layer.heads) {
      for (const KvSide side : kSides) {
        if (!head.buffer(kRest, side).owns_blocks()) return false;
        const KvBuffer& visual = head.buffer(kVisual, side);
        if (visual.full() > 0 || visual.blocks.memory().is_shared()) return false;
      }
    }
  }
  return true;
}

/// Number of fixed segments of a KV head's side, before its growing part.
///   forked  some blocks may be another sequence's
int fixed_segments(const CacheTraits& traits, int layer, KvSide side, bool forked) noexcept {
  const int visual = traits.plan().split ? 3 : 0;  // packed tokens, and a ring in two segments
  if (traits.layer(layer).protects) return visual + 2;
  if (traits.host_flushes(layer, side)) return visual + 1;
  const bool packs = traits.flush_rule(side, layer) != nullptr;
  return visual + (packs && (forked || traits.evicts()) ? 1 : 0);
}

int fixed_segments(const CacheTraits& traits, bool forked) noexcept {
  int most = 0;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    for (const KvSide side : kSides) {
      most = std::max(most, fixed_segments(traits, layer, side, forked));
    }
  }
  return most;
}

/// The sequence reads others' blocks that are not at one stride: a fork of a fork.
bool shares_unevenly(const Sequence& sequence) noexcept {
  if (!sequence.open || !sequence.goes_on_elsewhere) return false;
  return std::any_of(sequence.layers.begin(), sequence.layers.end(), [](const LayerState& layer) {
    const StoreBuffers& rest = layer.heads[0].stores[kRest];
    return !lie_evenly(rest.keys.blocks.elsewhere()) || !lie_evenly(rest.values.blocks.elsewhere());
  });
}

/// The host flushes some windows, into blocks at any address.
bool has_host_windows(const CacheTraits& traits) noexcept {
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    const LayerTraits& of = traits.layer(layer);
    if (of.protects || of.host_flushes[0] || of.host_flushes[1]) return true;
    if (traits.plan().split && !of.windows.empty()) return true;
  }
  return false;
}

/// The most blocks in the fixed segments of a KV head, where long blocks count as several.
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
      const BufferLayout layout = layouts.buffer(store, side, layer);
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
  most.fixed_segments = fixed_segments(traits, forked);
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
    for (int layer = 0; uneven && most.fixed_segments > 0 && layer < traits.shape().layers;
         ++layer) {
      most.listed_blocks = std::max(most.listed_blocks, listed_blocks(traits, sequence, layer));
    }
    if (traits.evicts() && traits.retention()->rerotates()) {
      most.turns = std::max(most.turns, sequence.size.max_rows);
    }
  }
  if (traits.needs().prompt_embeddings) most.words = 2 * (most.longest / 64 + 1);
  // Bitmaps of evicted tokens.
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
            std::max(most, head.buffer(kVisual, side).places() + head.buffer(kRest, side).places());
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
            has_host_windows(traits) ? head.buffer(kRest, side).blocks.all().size() : 0;
        const auto blocks = static_cast<int>(head.buffer(kVisual, side).blocks.all().size() + rest);
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
  view.tail = state.tail;
  view.scored = static_cast<int>(state.heads[0].scores.size());
  return traits.retention()->least_weight(view);
}

}  // namespace kvlm
