// When a step has ended that described its KV heads, steady_rows() says how many rows can follow
// before a window of many rows is full, a ring wraps or a rule drops a slot. As long as the same
// sequences step on, and that number lasts, steps are steady.
#include "kvcache/engine/steady_steps.h"

#include <algorithm>

namespace kvlm {

namespace {

// How far ahead evictions are looked for.
constexpr int kMostSteadyRows = 256;

}  // namespace

SteadySteps::SteadySteps(const CacheTraits& traits, SequenceStore& store,
                         DecodeAttention& attention)
    : traits_(traits), store_(store), attention_(attention) {}

bool SteadySteps::begin(std::span<const StepRows> step) {
  steady_ = continues(step);
  if (!steady_) {
    batch_.clear();
    attention_.start_step(can_persist(step));
  }
  return steady_;
}

/// Whether a step is the last one with a row more for each of its sequences.
bool SteadySteps::continues(std::span<const StepRows> step) const noexcept {
  if (batch_.empty() || batch_.size() != step.size()) return false;
  for (size_t i = 0; i < step.size(); ++i) {
    const StepRows& rows = step[i];
    if (rows.prompt || rows.sequence != batch_[i] || store_.at(rows.sequence).steady == 0) {
      return false;
    }
  }
  return attention_.capacity() > 0;
}

/// Makes planes count the rows they have, and says whether keeping this step's descriptions pays.
bool SteadySteps::can_persist(std::span<const StepRows> step) {
  bool persists = !traits_.layouts().keeps_weights();
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    catch_up(sequence);
    persists = persists && !rows.prompt;
    if (!persists) continue;
    sequence.steady = steady_rows(sequence);
    persists = sequence.steady > 1;
    if (persists) sequence.steady_bytes = bytes_of_row(sequence);
  }
  return persists;
}

void SteadySteps::end_steady(std::span<const StepRows> step) noexcept {
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    ++sequence.rows;
    ++sequence.uncounted;
    --sequence.steady;
    sequence.memory.set_used(sequence.memory.used() + sequence.steady_bytes);
  }
}

void SteadySteps::end(std::span<const StepRows> step) {
  number_ = Repetition::new_id();
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    sequence.steady = std::max(0, sequence.steady - rows.rows);
    if (attention_.persists()) batch_.push_back(rows.sequence);
  }
}

void SteadySteps::forget(SequenceId sequence) noexcept {
  if (std::find(batch_.begin(), batch_.end(), sequence) != batch_.end()) batch_.clear();
}

Repetition SteadySteps::repetition(std::span<const StepRows> step) const noexcept {
  if (!steady_ || !traits_.on_gpu()) return {};
  Repetition found{number_, std::min(kMostSteadyRows, attention_.capacity())};
  for (const StepRows& rows : step) {
    found.left = std::min(found.left, store_.at(rows.sequence).steady);
  }
  return found;
}

void SteadySteps::catch_up(Sequence& sequence) const noexcept {
  if (sequence.uncounted == 0) return;
  for (LayerState& state : sequence.layers) {
    const auto layer = static_cast<int>(&state - sequence.layers.data());
    for (HeadState& head : state.heads) {
      const StorePlanes& rest = head.stores[kRest];
      state.plane_bytes -= rest.keys.bytes() + rest.values.bytes();
      count_rows(head, layer, sequence.uncounted);
      state.plane_bytes += rest.keys.bytes() + rest.values.bytes();
    }
  }
  sequence.uncounted = 0;
}

/// Counts rows that steady steps have stored.
void SteadySteps::count_rows(HeadState& head, int layer, int rows) const {
  for (const Part part : {Part::kKeys, Part::kValues}) {
    Plane& plane = head.plane(kRest, part);
    if (packs_next(plane, part, layer)) {
      plane.slide(rows);
    } else {
      plane.count_rows(rows);
    }
  }
  if (traits_.retention() == nullptr) return;
  head.tags.insert(head.tags.end(), static_cast<size_t>(rows), kTextRow);
}

/// A ring that slides has packed its oldest row since, and still holds it: attention has read it
/// from there.
void SteadySteps::count_newest(HeadState& head) const {
  head.stores[kRest].keys.count_rows(1);
  head.stores[kRest].values.count_rows(1);
  if (traits_.retention() != nullptr) head.tags.push_back(kTextRow);
}

/// Whether the next row makes a window of one row full: from then on each row packs one.
bool SteadySteps::packs_next(const Plane& plane, Part part, int layer) const noexcept {
  const FlushRule* rule = traits_.flush_rule(part, layer);
  return rule != nullptr && rule->rows == 1 && plane.full() == rule->trigger - 1;
}

/// Bytes that a row adds while its sequence is steady.
size_t SteadySteps::bytes_of_row(const Sequence& sequence) const noexcept {
  size_t bytes = 0;
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    for (const HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      for (const Part part : {Part::kKeys, Part::kValues}) {
        const Plane& plane = head.plane(kRest, part);
        bytes += packs_next(plane, part, layer) ? plane.layout().packed_bytes(1)
                                                : plane.layout().row_bytes();
      }
    }
  }
  return bytes;
}

/// Rows that can be generated one after the other, the next included, before a window is full, a
/// ring wraps or a slot is dropped.
int SteadySteps::steady_rows(const Sequence& sequence) const noexcept {
  int rows = kMostSteadyRows;
  for (int layer = 0; layer < traits_.shape().layers && rows > 0; ++layer) {
    for (const HeadState& head : sequence.layers[static_cast<size_t>(layer)].heads) {
      rows = std::min(rows, steady_rows_of(head, layer));
    }
  }
  return rows_until_eviction(sequence, rows);
}

/// The same of one KV head, as long as no slot is dropped.
int SteadySteps::steady_rows_of(const HeadState& head, int layer) const noexcept {
  // On the CPU, describing KV heads anew costs little beside attending to them.
  const bool slides = traits_.on_gpu() && !traits_.layer(layer).has_key_basis;
  int rows = kMostSteadyRows;
  for (const Part part : {Part::kKeys, Part::kValues}) {
    const Plane& plane = head.plane(kRest, part);
    if (packs_next(plane, part, layer)) {
      rows = std::min(rows, slides ? plane.slide_room() : 0);
      continue;
    }
    rows = std::min(rows, plane.room_behind());
    const FlushRule* rule = traits_.flush_rule(part, layer);
    if (rule != nullptr) rows = std::min(rows, rule->trigger - 1 - plane.full());
  }
  return rows;
}

int SteadySteps::rows_until_eviction(const Sequence& sequence, int most) const noexcept {
  if (traits_.retention() == nullptr) return most;
  DecodeView view;
  view.prompt_rows = sequence.prompt_rows;
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
    view.layer = layer;
    view.kept = state.kept;
    view.forget = state.forget;
    view.scores = state.heads[0].scores;
    for (int rows = 1; rows <= most; ++rows) {
      view.rows = state.heads[0].slots() + rows;
      view.step = sequence.rows + rows - sequence.prompt_rows;
      if (traits_.retention()->evict(view) >= 0) most = rows - 1;
    }
  }
  return most;
}

}  // namespace kvlm
