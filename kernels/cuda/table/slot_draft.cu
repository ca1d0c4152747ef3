// Builds the table entries of one sequence on the host: KV heads and segments (HeadLayout), and for
// eviction the arrival numbers, scores and fixed blocks. If placed tokens are in order, the GPU
// fills in their numbers (placed_rows.cu).
#include <algorithm>
#include <cassert>
#include <numeric>

#include "kernels/cuda/attend/image_choice.h"
#include "kernels/cuda/table/slot_draft.h"

namespace kvlm::cuda::packed {

void SlotDraft::begin() {
  layout_.emplace(plan_.shape, plan_.windows, plan_.rows_alone, plan_.load.fixed_segments,
                  formats_);
  ring_rows = 0;
  weighs_slots = false;
  bytes_ = carve(nullptr);
  memory_.reserve(bytes_);
  static_cast<void>(carve(memory_.data()));
}

/// Divides `memory` among the arrays; null: only counts. Returns the bytes needed.
size_t SlotDraft::carve(std::byte* memory) {
  const TableLoad& load = plan_.load;
  size_t bytes = 0;
  const auto make = [&]<class T>(std::span<T>& of_slot, int of_head) {
    constexpr size_t kAligned = 64;
    const size_t count = static_cast<size_t>(plan_.heads_of_slot()) * static_cast<size_t>(of_head);
    of_slot = {memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + bytes), count};
    bytes += (count * sizeof(T) + kAligned - 1) / kAligned * kAligned;
  };
  make(heads, 1);
  make(segments, 2 * plan_.side_segments());
  make(tails, 2);
  make(remaps, plan_.shape.remaps);
  make(blocks, load.listed_blocks);
  make(words, load.words);
  const int places = plan_.shape.drops_packed ? load.weighed_rows : 0;
  make(weighed, plan_.compares() || plan_.shape.drops_packed ? 1 : 0);
  make(came, plan_.weighs() ? load.weighed_rows : places);
  make(scores, plan_.shape.scored ? load.weighed_rows : 0);
  make(turned, plan_.shape.turned_by.empty() ? 0 : 1);
  make(value_at, places);
  make(key_at, places);
  make(fixed, plan_.shape.drops_packed ? 2 * load.fixed_blocks : 0);
  return bytes;
}

void SlotDraft::lay(int of_slot, int layer, std::span<const TableHead> of_layer) {
  slot = of_slot;
  if (layer == 0) {  // the slot before may have failed half way
    used_blocks = used_words = 0;
    out_of_order = false;
  }
  for (size_t h = 0; h < of_layer.size(); ++h) {
    const TableHead& head = of_layer[h];
    HeadSpace space = space_of(layer, h);
    layout_->lay(layer, head, space);
    used_blocks += space.list.used_blocks;
    used_words += space.list.used_words;
    note_head(layer, head, space);
    take_weighed(head.weighed, space);
    if (space.head->placed) take_fixed(head, space);
    const size_t number = number_of(space);
    if (!turned.empty()) turned[number] = head.turned;
    std::copy(head.remaps.begin(), head.remaps.end(),
              remaps.data() + number * static_cast<size_t>(plan_.shape.remaps));
  }
}

/// Memory for the entries of a KV head. Block lists of KV heads are contiguous, so that only used
/// ones are sent.
HeadSpace SlotDraft::space_of(int layer, size_t kv_head) {
  const size_t number =
      static_cast<size_t>(layer) * static_cast<size_t>(plan_.shape.kv_heads) + kv_head;
  const auto side_segments = static_cast<size_t>(plan_.side_segments());
  const auto of_slot = static_cast<size_t>(slot);
  const auto before = static_cast<size_t>(used_words);
  return {
      slot * plan_.heads_of_slot() + static_cast<int>(number),
      heads.data() + number,
      segments.data() + number * 2 * side_segments,
      tails.data() + number * 2,
      {blocks.data() + used_blocks, words.data() + before,
       slot * static_cast<int>(blocks.size()) + used_blocks,
       plan_.words + of_slot * words.size() + before, static_cast<int>(blocks.size()) - used_blocks,
       static_cast<int>(words.size()) - used_words}};
}

/// Records the ring's size for row_splits.cu, and where a placed KV head's bitmap is.
void SlotDraft::note_head(int layer, const TableHead& head, const HeadSpace& space) {
  DeviceHead& made = *space.head;
  if (plan_.rows_alone[static_cast<size_t>(layer)] != 0 || is_image(made.fused)) {
    ring_rows = std::max(ring_rows, head.keys_gained.ring_rows);
  }
  if (made.placed && made.fused != 0) {
    made.live = plan_.row_bits + int64_t{space.index} * plan_.bit_words;
  }
}

namespace {

/// Writes the arrival number of each place, by default those of `full` tokens in order, and sets
/// the empty place in both `tails`. Returns the next arrival number.
int take_numbers(std::span<const int> from, int full, DeviceTail* tails, int* numbers) {
  if (from.empty()) {
    std::iota(numbers, numbers + full, 0);
    return full;
  }
  std::copy(from.begin(), from.end(), numbers);
  int next = 0;
  for (size_t place = 0; place < from.size(); ++place) {
    if (from[place] == WeighedRows::kNoRow) {
      for (const int side : {0, 1}) tails[side].vacated = static_cast<int>(place);
    } else {
      next = std::max(next, from[place] + 1);
    }
  }
  return next;
}

}  // namespace

/// Fills in what eviction on the GPU compares (WeighedRows).
void SlotDraft::take_weighed(const WeighedRows& rows, HeadSpace& space) {
  if (weighed.empty()) return;
  weighed[number_of(space)] = {};
  if (plan_.shape.scored) take_scores(rows, space);
  if (space.head->placed) return take_placed(rows, space);
  if (rows.by_slots) return take_by_slots(rows, space);
  if (!plan_.weighs()) return;
  const size_t number = number_of(space);
  const auto most = static_cast<size_t>(plan_.load.weighed_rows);
  assert(static_cast<size_t>(space.tails[0].full) < most && rows.came.size() <= most);
  DeviceWeighed& made = weighed[number];
  made.weights = rows.weights;
  made.least = rows.least;
  made.next =
      take_numbers(rows.came, space.tails[0].full, space.tails, came.data() + number * most);
}

/// The host evicts: the GPU only adds up weights.
void SlotDraft::take_by_slots(const WeighedRows& rows, const HeadSpace& space) {
  DeviceWeighed& made = weighed[number_of(space)];
  made.weights = rows.weights;
  made.by_slots = true;
  weighs_slots = weighs_slots || plan_.weighs();
}

/// Copies the scores of a KV head's first tokens.
void SlotDraft::take_scores(const WeighedRows& rows, const HeadSpace& space) {
  const size_t number = number_of(space);
  const auto most = static_cast<size_t>(plan_.load.weighed_rows);
  assert(rows.scores.size() <= most);
  std::copy(rows.scores.begin(), rows.scores.end(), scores.data() + number * most);
  DeviceWeighed& made = weighed[number];
  made.weights = plan_.row_scores + static_cast<size_t>(space.index) * most;
  made.least = rows.least;
  made.scored = static_cast<int>(rows.scores.size());
  made.tail = std::max(0, made.scored - rows.least.spared);
}

/// In-place eviction: arrival numbers by place, and the places of each token's key and value. If
/// tokens are in order, the GPU derives both.
void SlotDraft::take_placed(const WeighedRows& rows, const HeadSpace& space) {
  const size_t number = number_of(space);
  const auto most = static_cast<size_t>(plan_.load.weighed_rows);
  DeviceWeighed& made = weighed[number];
  made.of_numbers = plan_.shape.scored ? made.weights : rows.weights;  // of take_scores()
  made.weights = plan_.place_weights;
  if (plan_.compares()) made.weights += static_cast<size_t>(space.index) * most;
  made.least = rows.least;
  made.in_order = rows.came.empty();
  made.first_places = rows.first_places;
  if (!made.in_order) made.next = scatter_numbers(rows, number);
}

/// The same for tokens that are not in order. Returns the next arrival number.
int SlotDraft::scatter_numbers(const WeighedRows& rows, size_t number) {
  const auto most = static_cast<size_t>(plan_.load.weighed_rows);
  out_of_order = true;
  assert(rows.came.size() <= most && rows.values_came.size() <= most);
  const auto of_head = [&](auto& all) { return std::span(all).subspan(number * most, most); };
  const std::span<int> numbers = of_head(came);
  const std::span<int16_t> values = of_head(value_at);
  const std::span<int16_t> keys = of_head(key_at);
  const auto end = std::copy(rows.came.begin(), rows.came.end(), numbers.begin());
  std::fill(end, numbers.end(), WeighedRows::kNoRow);
  std::fill(values.begin(), values.end(), int16_t{-1});
  std::fill(keys.begin(), keys.end(), int16_t{-1});
  find_values(rows.values_came);
  int next = 0;
  for (size_t place = 0; place < rows.came.size(); ++place) {
    const int of = rows.came[place];
    if (of == WeighedRows::kNoRow) continue;
    values[place] = value_of_[static_cast<size_t>(of)];
    keys[static_cast<size_t>(values[place])] = static_cast<int16_t>(place);
    next = std::max(next, of + 1);
  }
  return next;
}

/// Fills value_of_, the place of each token's value by arrival number.
void SlotDraft::find_values(std::span<const int> values_came) {
  value_of_.resize(values_came.size());
  for (size_t place = 0; place < values_came.size(); ++place) {
    const int of = values_came[place];
    if (of != WeighedRows::kNoRow) value_of_[static_cast<size_t>(of)] = static_cast<int16_t>(place);
  }
}

void SlotDraft::take_fixed(const TableHead& head, const HeadSpace& space) {
  const auto most = static_cast<size_t>(plan_.load.fixed_blocks);
  DeviceFixedBlock* of_side = fixed.data() + number_of(space) * 2 * most;
  for (const std::span<const FixedBlock> of : head.fixed) {
    assert(of.size() <= most);
    DeviceFixedBlock* to = of_side;
    int end = 0;
    for (const FixedBlock& block : of) {
      end += block.rows;
      *to++ = {end, block.live, block.bytes};
    }
    of_side += most;
  }
}

}  // namespace kvlm::cuda::packed
