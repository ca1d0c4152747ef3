// What a DecodeTable can serve and what room it takes: bounds of a sequence before its prompt has
// ended, and what it has afterwards.
#include "kvcache/engine/table_load.h"

#include <algorithm>
#include <array>

namespace kvlm {

namespace {

constexpr std::array kSides{KvSide::kKeys, KvSide::kValues};
// Rows of a block that is listed, at most.
constexpr int kAnyBlock = 2048;

/// Rows of a KV head at a time, at most.
int peak_rows(const CacheTraits& traits, const Sequence& sequence) noexcept {
  return traits.retention()->peak_rows_of_layer(traits.shape().layers, sequence.size.prompt_rows,
                                                sequence.size.max_rows);
}

/// Places of a side of a KV head whose packed rows a table drops, at most.
int places(const CacheTraits& traits, const Sequence& sequence, int layer, KvSide side) noexcept {
  int most = 0;
  if (sequence.prompted) {
    for (const HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      most = std::max(most, head.plane(kVisual, side).places() + head.plane(kRest, side).places());
    }
    return most;
  }
  const int peak = peak_rows(traits, sequence);
  const int ever = peak + sequence.size.max_rows - sequence.size.prompt_rows;
  const Plane::Layout layout = traits.layouts().plane(kRest, side, layer);
  const PlaneCapacity capacity = traits.layouts().capacity(layout, 1, ever, peak, 1);
  const int visual = traits.plan().split ? std::min(peak, sequence.size.visual_rows) : 0;
  return visual + static_cast<int>(capacity.blocks) * layout.block_rows() +
         static_cast<int>(capacity.ring_rows);
}

/// The same of all its KV heads.
int places(const CacheTraits& traits, const Sequence& sequence) noexcept {
  int most = 0;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    for (const KvSide side : kSides) {
      most = std::max(most, places(traits, sequence, layer, side));
    }
  }
  return most;
}

/// Places of weighed rows, at most.
int weighed_rows(const CacheTraits& traits, std::span<const Sequence> sequences) noexcept {
  int most = 0;
  for (const Sequence& sequence : sequences) {
    if (!sequence.open) continue;
    // A bound may be more than there will be.
    most = std::max(most, traits.table().places ? std::min(places(traits, sequence), kMostPlaces)
                                                : peak_rows(traits, sequence));
  }
  return most;
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

/// Whether a table can find the rows that are packed without asking where each lies: none was
/// evicted.
bool lies_evenly(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (!traits.evicts()) return true;
  for (int layer = 0; layer < traits.shape().layers; ++layer) {
    for (const HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      for (const KvSide side : kSides) {
        if (!traits.host_flushes(layer, side) && !head.plane(kRest, side).is_even()) return false;
        if (head.plane(kVisual, side).has_lost_rows()) return false;
      }
    }
  }
  return true;
}

/// Whether packed rows of a sequence may go and others come: it has not too many, and no fork reads
/// them.
bool may_place(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (!traits.table().places || places(traits, sequence) > kMostPlaces) return false;
  for (const LayerState& layer : sequence.layers) {
    for (const HeadState& head : layer.heads) {
      for (const KvSide side : kSides) {
        if (!head.plane(kRest, side).owns_blocks()) return false;
        const Plane& visual = head.plane(kVisual, side);
        if (visual.full() > 0 || visual.shares_blocks()) return false;
      }
    }
  }
  return true;
}

}  // namespace

TableLoad table_load(const CacheTraits& traits, std::span<const Sequence> sequences,
                     const Workload& load, const FixedRuns& runs) {
  TableLoad most;
  most.slots = static_cast<int>(load.slots);
  most.longest = static_cast<int>(load.longest);
  const bool protects = traits.needs().prompt_embeddings;
  if (runs.most > 0) {
    // Of each fixed run, a block a picture or one for every few rows.
    constexpr int kLeastBlock = 8;
    const int of_run = traits.layouts().per_image() || runs.host_windows
                           ? static_cast<int>(Layouts::kMaxImages) + most.longest / kLeastBlock + 2
                           : 0;
    most.listed_blocks = of_run * runs.most;
  }
  if (traits.evicts() && traits.retention()->rerotates()) {
    for (const Sequence& sequence : sequences) {
      if (sequence.open) most.turns = std::max(most.turns, sequence.size.max_rows);
    }
  }
  if (protects) most.words = 2 * (most.longest / 64 + 1);
  if (traits.evicts())
    most.words += most.listed_blocks * (kAnyBlock / 64);  // bitmaps of their rows
  if (traits.table().weighs || traits.table().scores || traits.table().places) {
    most.weighed_rows = weighed_rows(traits, sequences);
  }
  if (traits.table().places && traits.plan().split) {
    most.fixed_blocks = static_cast<int>(Layouts::kMaxImages);
  }
  if (traits.table().places) most.blocks = most.weighed_rows / least_block_rows(traits) + 1;
  return most;
}

TableLoad placed_load(const CacheTraits& traits, const Sequence& sequence) noexcept {
  TableLoad load;
  load.weighed_rows = places(traits, sequence);
  load.blocks = load.weighed_rows / least_block_rows(traits) + 1;
  for (const LayerState& layer : sequence.layers) {
    for (const HeadState& head : layer.heads) {
      const auto blocks = static_cast<int>(head.stores[kVisual].keys.blocks().size());
      load.fixed_blocks = std::max(load.fixed_blocks, blocks);
    }
  }
  return load;
}

bool fits_table(const CacheTraits& traits, const Sequence& sequence) noexcept {
  if (sequence.goes_on_elsewhere) return false;
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
