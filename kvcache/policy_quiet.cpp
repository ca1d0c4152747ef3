// Steps in which nothing happens but that every sequence gains a row, and on a GPU that each row
// packs another one (values of KIVI): most of them. Lanes are then described once and kept, planes
// count their rows later, and the host has next to nothing to do.
#include <algorithm>

#include "kvcache/policy_cache.h"

namespace kvlm {

namespace {

// How far ahead evictions are looked for.
constexpr int kMostQuietRows = 256;

}  // namespace

/// Whether this step is the last one with a row more for each of its sequences.
bool PolicyCache::goes_on() const noexcept {
  if (kept_batch_.empty() || kept_batch_.size() != step_.size()) return false;
  for (size_t i = 0; i < step_.size(); ++i) {
    const StepRows& rows = step_[i];
    if (rows.prompt || rows.sequence != kept_batch_[i] || at(rows.sequence).quiet == 0) {
      return false;
    }
  }
  for (size_t layer = 0; layer < batches_.size(); ++layer) {
    if (room(layer) == 0) return false;
  }
  return true;
}

/// Rows that the lanes of a layer may gain as far as they were described.
int PolicyCache::room(size_t layer) const noexcept {
  return all_plain_[layer] != 0 ? plain_[layer].room() : batches_[layer].room();
}

Repetition PolicyCache::repetition() const noexcept {
  if (!goes_on_ || arena_.device().kind == DeviceKind::kCpu) return {};
  Repetition found{kept_number_, kMostQuietRows};
  for (size_t layer = 0; layer < batches_.size(); ++layer) {
    found.left = std::min(found.left, room(layer));
  }
  for (const StepRows& rows : step_) found.left = std::min(found.left, at(rows.sequence).quiet);
  return found;
}

void PolicyCache::repeated() noexcept {
  for (size_t layer = 0; layer < batches_.size(); ++layer) {
    if (all_plain_[layer] != 0) {
      plain_[layer].appended();
    } else {
      batches_[layer].appended();
    }
  }
  attended_ = shape_.layers;
}

/// Makes planes count the rows they have, and says whether keeping this step's lanes pays.
bool PolicyCache::can_keep() {
  bool keep = !layouts_.keeps_weights();
  for (const StepRows& rows : step_) {
    Sequence& sequence = at(rows.sequence);
    catch_up(sequence);
    keep = keep && !rows.prompt;
    if (!keep) continue;
    sequence.quiet = quiet_rows(sequence);
    keep = sequence.quiet > 1;
    if (keep) sequence.quiet_bytes = quiet_row_bytes(sequence);
  }
  return keep;
}

void PolicyCache::catch_up(Sequence& sequence) noexcept {
  if (sequence.uncounted == 0) return;
  for (LayerState& state : sequence.layers) {
    const auto layer = static_cast<int>(&state - sequence.layers.data());
    for (HeadState& lane : state.heads) {
      const StorePlanes& rest = lane.stores[kRest];
      state.plane_bytes -= rest.keys.bytes() + rest.values.bytes();
      count_rows(lane, layer, sequence.uncounted);
      state.plane_bytes += rest.keys.bytes() + rest.values.bytes();
    }
  }
  sequence.uncounted = 0;
}

/// Counts rows that quiet steps have stored.
void PolicyCache::count_rows(HeadState& lane, int layer, int rows) {
  for (const Part part : {Part::kKeys, Part::kValues}) {
    Plane& plane = lane.plane(kRest, part);
    if (one_packs(plane, part, layer)) {
      plane.slide(rows);
    } else {
      plane.count_rows(rows);
    }
  }
  if (parts_.retention != nullptr) {
    lane.tags.insert(lane.tags.end(), static_cast<size_t>(rows), kTextRow);
  }
}

/// Whether a layer has stored a row in this step that its planes will count later.
bool PolicyCache::holds_uncounted_row(SequenceId sequence, int layer) const noexcept {
  return in_step_ && goes_on_ && layer < attended_ &&
         std::any_of(step_.begin(), step_.end(),
                     [&](const StepRows& rows) { return rows.sequence == sequence; });
}

/// Counts the row that this step has stored and attended to, in a copy of a lane. A ring that
/// slides has packed its oldest row since, and still holds it: attention has read it from there.
void PolicyCache::show_newest(HeadState& lane) const {
  lane.stores[kRest].keys.count_rows(1);
  lane.stores[kRest].values.count_rows(1);
  if (parts_.retention != nullptr) lane.tags.push_back(kTextRow);
}

/// Whether the next row makes a window of one row full: from then on each row packs one.
bool PolicyCache::one_packs(const Plane& plane, Part part, int layer) const noexcept {
  const Quantizer* quantizer = layouts_.quantizer(kRest, layer);
  if (quantizer == nullptr || quantizer->visual_only()) return false;
  const FlushRule& flush = quantizer->plan(part, layer).flush;
  return flush.rows == 1 && plane.full() == flush.trigger - 1;
}

/// Bytes that a row adds while its sequence is quiet.
size_t PolicyCache::quiet_row_bytes(const Sequence& sequence) const noexcept {
  size_t bytes = 0;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (const HeadState& lane : sequence.layers[static_cast<size_t>(layer)].heads) {
      for (const Part part : {Part::kKeys, Part::kValues}) {
        const Plane& plane =
            part == Part::kKeys ? lane.stores[kRest].keys : lane.stores[kRest].values;
        bytes += one_packs(plane, part, layer) ? plane.layout().packed_bytes(1)
                                               : plane.layout().row_bytes();
      }
    }
  }
  return bytes;
}

/// Whether a full ring will take row after row while these lanes are kept, after the next row was
/// appended.
bool PolicyCache::will_slide(const Plane& plane, Part part, int layer) const noexcept {
  if (!keep_ || plane.packed() == 0) return false;
  const Quantizer* quantizer = layouts_.quantizer(kRest, layer);
  if (quantizer == nullptr || quantizer->visual_only()) return false;
  const FlushRule& flush = quantizer->plan(part, layer).flush;
  return flush.rows == 1 && plane.full() == flush.trigger;
}

/// Lists the rings of a layer's lanes that slide.
void PolicyCache::describe_rings(int layer, Stream& stream) {
  const Quantizer* quantizer = layouts_.quantizer(kRest, layer);
  for (const Part part : {Part::kKeys, Part::kValues}) {
    rings_.clear();
    const bool one_by_one = quantizer != nullptr && !quantizer->visual_only() &&
                            quantizer->plan(part, layer).flush.rows == 1;
    for (size_t i = 0; one_by_one && i < generated_.size(); ++i) {
      for (HeadState& lane : generated_[i].sequence->layers[static_cast<size_t>(layer)].heads) {
        const Plane& plane = lane.plane(kRest, part);
        if (will_slide(plane, part, layer)) rings_.push_back(plane.ring());
      }
    }
    const size_t index = part == Part::kKeys ? 0 : 1;
    packs_[static_cast<size_t>(layer)][index] = rings_.empty() ? 0 : 1;
    if (rings_.empty()) continue;
    const PartPlan& plan = quantizer->plan(part, layer);
    packers_[static_cast<size_t>(layer)][index].describe(plan.format, plan.rules, parts_.rows,
                                                         rings_, stream);
  }
}

/// Packs the oldest row of rings that slide.
void PolicyCache::pack_oldest(size_t layer, Stream& stream) {
  for (const size_t part : {size_t{0}, size_t{1}}) {
    if (packs_[layer][part] != 0) packers_[layer][part].run(stream);
  }
}

/// Rows that can be generated one after the other, the next included, without that a window is
/// full, a ring wraps or a slot is dropped.
int PolicyCache::quiet_rows(const Sequence& sequence) const noexcept {
  int quiet = kMostQuietRows;
  for (int layer = 0; layer < shape_.layers && quiet > 0; ++layer) {
    const Quantizer* quantizer = layouts_.quantizer(kRest, layer);
    const bool flushes = quantizer != nullptr && !quantizer->visual_only();
    // On the CPU, describing lanes anew costs little beside attending to them.
    const bool slides = arena_.device().kind == DeviceKind::kCuda && !plan_of(layer).has_key_basis;
    for (const HeadState& lane : sequence.layers[static_cast<size_t>(layer)].heads) {
      for (const Part part : {Part::kKeys, Part::kValues}) {
        const StorePlanes& planes = lane.stores[kRest];
        const Plane& plane = part == Part::kKeys ? planes.keys : planes.values;
        if (one_packs(plane, part, layer)) {
          quiet = std::min(quiet, slides ? plane.slide_room() : 0);
          continue;
        }
        quiet = std::min(quiet, plane.room_behind());
        if (!flushes) continue;
        quiet = std::min(quiet, quantizer->plan(part, layer).flush.trigger - 1 - plane.full());
      }
    }
  }
  return rows_until_eviction(sequence, quiet);
}

int PolicyCache::rows_until_eviction(const Sequence& sequence, int most) const noexcept {
  if (parts_.retention == nullptr) return most;
  DecodeView view;
  view.prompt_rows = sequence.prompt_rows;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    const LayerState& state = sequence.layers[static_cast<size_t>(layer)];
    view.layer = layer;
    view.kept = state.kept;
    view.forget = state.forget;
    view.scores = state.heads[0].scores;
    for (int rows = 1; rows <= most; ++rows) {
      view.rows = state.heads[0].slots() + rows;
      view.step = sequence.rows + rows - sequence.prompt_rows;
      if (parts_.retention->evict(view) >= 0) most = rows - 1;
    }
  }
  return most;
}

/// decode() of lanes that are kept: a row more for each of them.
void PolicyCache::decode_on(int layer, const float* q, ConstTensorView k, ConstTensorView v,
                            TensorView out, float scale, Stream& stream) {
  const auto at = static_cast<size_t>(layer);
  key_basis_.change_queries_again(layer, q, stream);
  if (all_plain_[at] != 0) {
    plain_[at].append(k.as<float>(), v.as<float>(), stream);
    return plain_[at].attend(q, out.as<float>(), scale, stream);
  }
  PackedBatch& batch = batches_[at];
  batch.append(k.as<float>(), v.as<float>(), stream);
  batch.attend(q, out.as<float>(), scale, stream);
  pack_oldest(at, stream);
}

}  // namespace kvlm
