#include "kvcache/engine/table_reader.h"

#include <algorithm>

#include "kvcache/engine/for_sequences.h"
#include "kvcache/engine/placed_rows.h"
#include "kvcache/engine/row_order.h"

namespace kvlm {

namespace {

/// Sequence.came from the table's copy of a sequence.
std::vector<std::vector<int>> came_of(const CacheTraits& traits, const Sequence& sequence,
                                      std::span<const int> all) {
  const auto places =
      static_cast<std::ptrdiff_t>(all.size() / (traits.layers() * traits.kv_heads()));
  std::vector<std::vector<int>> came;
  auto first = all.begin();
  for (size_t layer = 0; layer < traits.layers(); ++layer) {
    const int slots = sequence.slots_of(layer);
    for (size_t h = 0; h < traits.kv_heads(); ++h, first += places) {
      forget_newest(came.emplace_back(first, first + slots + 1));
    }
  }
  return came;
}

}  // namespace

void TableReader::take_back(std::span<Sequence* const> sequences, Stream& stream) {
  // A copy takes about as much memory as a draft, and is kept for reuse.
  copies_.resize(static_cast<size_t>(table_->drafts()));
  for (size_t first = 0; first < sequences.size(); first += copies_.size()) {
    const auto some = sequences.subspan(first, std::min(copies_.size(), sequences.size() - first));
    for (size_t i = 0; i < some.size(); ++i) {
      if (some[i]->drops_on_gpu()) read_placed(*some[i], copies_[i]);
    }
    const size_t heads = traits_.layers() * traits_.kv_heads();
    for_sequences(some.size(), heads, stream, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        if (some[i]->drops_on_gpu()) {
          take_placed(*some[i], copies_[i]);
        } else {
          count_rows(*some[i]);
        }
        counts_.count_due(*some[i]);
      }
    });
    for (size_t i = 0; i < some.size(); ++i) {
      if (some[i]->drops_on_gpu()) end_placed(*some[i], copies_[i]);
      some[i]->on_gpu = false;
    }
  }
}

void TableReader::catch_up(Sequence& sequence) const {
  if (!sequence.drops_on_gpu()) return count_rows(sequence);
  if (sequence.uncounted > 0) {
    PlacedCopy copy;
    read_placed(sequence, copy);
    take_placed(sequence, copy);
    end_placed(sequence, copy);
  }
  sequence.on_gpu = false;  // arrival numbers restart at the next upload
}

/// Updates the host's state of a sequence without in-place eviction.
void TableReader::count_rows(Sequence& sequence) const {
  if (sequence.told_anew) return counts_.count_rows(sequence);
  if (traits_.table().weighs && sequence.uncounted > 0) {
    sequence.came = came_of(traits_, sequence, table_->came(slot_of(sequence)));
  }
  counts_.catch_up(sequence);
}

void TableReader::read_placed(const Sequence& sequence, PlacedCopy& to) const {
  table_->read_placed(slot_of(sequence), 0, traits_.shape().layers, to);
}

std::vector<HeadState> TableReader::heads_now(const Sequence& sequence, int layer,
                                              bool newest) const {
  PlacedCopy copy;
  table_->read_placed(slot_of(sequence), layer, 1, copy);
  const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
  std::vector<HeadState> heads = state.heads;
  for (size_t h = 0; h < heads.size(); ++h) {
    const int known = heads[h].slots() + sequence.uncounted + (newest ? 1 : 0);
    PlacedRows rows = copy.rows(h);
    static_cast<void>(kvlm::take_placed(traits_.layer(layer), heads[h], rows, known));
  }
  return heads;
}

/// Updates the host's state of a sequence with in-place eviction. Reorders the weights in `copy` by
/// slot, KV head by KV head.
void TableReader::take_placed(Sequence& sequence, PlacedCopy& copy) const {
  size_t table_head = 0;
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    for (HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      const int known = head.slots() + sequence.uncounted;
      PlacedRows rows = copy.rows(table_head);
      const std::vector<float> weights = kvlm::take_placed(traits_.layer(layer), head, rows, known);
      std::copy(weights.begin(), weights.end(), copy.weights.data() + table_head * copy.places);
      ++table_head;
    }
  }
  sequence.uncounted = 0;
  SequenceStore::count_buffers(sequence);
}

/// Writes the weights of such a sequence back to the cache, and reports its bytes to the arena.
void TableReader::end_placed(Sequence& sequence, const PlacedCopy& copy) const {
  std::vector<float> weights;  // of a layer, contiguous
  for (size_t layer = 0; layer < traits_.layers() && !copy.weights.empty(); ++layer) {
    const std::vector<HeadState>& heads = sequence.layers[layer].heads;
    if (heads[0].weights == nullptr) continue;
    weights.clear();
    for (size_t h = 0; h < heads.size(); ++h) {
      weights.resize(static_cast<size_t>(heads[h].weights - heads[0].weights));
      const auto first = copy.weights.begin() +
                         static_cast<std::ptrdiff_t>((layer * heads.size() + h) * copy.places);
      weights.insert(weights.end(), first, first + heads[h].slots());
    }
    table_->put_weights(weights, heads[0].weights);
  }
  store_.account(sequence);
}

std::vector<int> TableReader::visual_slots(const Sequence& sequence) const {
  std::vector<int> slots;
  if (!sequence.drops_on_gpu() || !traits_.plan().split) return slots;
  PlacedCopy copy;
  read_placed(sequence, copy);
  for (size_t layer = 0; layer < traits_.layers(); ++layer) {
    const std::vector<int> came = copy.rows(layer * traits_.kv_heads()).sides[0].came;
    const KvBuffer& visual = sequence.layers[layer].heads[0].stores[kVisual].keys;
    slots.push_back(
        static_cast<int>(std::count_if(came.begin(), came.begin() + visual.places(),
                                       [](int number) { return number != WeighedRows::kNoRow; })));
  }
  return slots;
}

}  // namespace kvlm
