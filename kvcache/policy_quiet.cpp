// Steps in which nothing happens but that every sequence gains a row: most of them where text stays
// in full rows or is packed many rows at a time (where rows are packed one by one, as values of
// KIVI are, there is none). Lanes are then described once and kept, planes count their rows later,
// and the host has next to nothing to do.
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
    // Queries that are turned are listed anew at every step.
    for (const std::vector<BasisJob>& jobs : query_jobs_[layer]) {
      if (!jobs.empty()) return {};
    }
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
  }
  return keep;
}

void PolicyCache::catch_up(Sequence& sequence) noexcept {
  if (sequence.uncounted == 0) return;
  for (LayerState& state : sequence.layers) {
    state.plane_bytes += static_cast<size_t>(sequence.uncounted) * 2 * heads() * row_bytes();
    for (Lane& lane : state.lanes) {
      lane.stores[kRest].keys.count_rows(sequence.uncounted);
      lane.stores[kRest].values.count_rows(sequence.uncounted);
      if (parts_.retention != nullptr) {
        lane.tags.insert(lane.tags.end(), static_cast<size_t>(sequence.uncounted), kTextRow);
      }
    }
  }
  sequence.uncounted = 0;
}

/// Rows that can be generated one after the other, the next included, without that a window is
/// full, a ring wraps or a slot is dropped.
int PolicyCache::quiet_rows(const Sequence& sequence) const noexcept {
  int quiet = kMostQuietRows;
  for (int layer = 0; layer < shape_.layers && quiet > 0; ++layer) {
    const Quantizer* quantizer = layouts_.quantizer(kRest, layer);
    const bool flushes = quantizer != nullptr && !quantizer->visual_only();
    for (const Lane& lane : sequence.layers[static_cast<size_t>(layer)].lanes) {
      for (const Part part : {Part::kKeys, Part::kValues}) {
        const StorePlanes& planes = lane.stores[kRest];
        const Plane& plane = part == Part::kKeys ? planes.keys : planes.values;
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
    for (int rows = 1; rows <= most; ++rows) {
      view.rows = state.lanes[0].slots() + rows;
      view.step = sequence.rows + rows - sequence.prompt_rows;
      if (parts_.retention->evict(view) >= 0) most = rows - 1;
    }
  }
  return most;
}

/// Brings this layer's queries into the bases of packed keys.
void PolicyCache::turn_queries(int layer, Stream& stream) {
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    const auto& jobs = query_jobs_[static_cast<size_t>(layer)][store];
    if (jobs.empty()) continue;
    change_basis(*layouts_.quantizer(store, layer)->key_basis(), BasisChange::kQuery, jobs, stream);
  }
}

/// decode() of lanes that are kept: a row more for each of them.
void PolicyCache::decode_on(int layer, const float* q, ConstTensorView k, ConstTensorView v,
                            TensorView out, float scale, Stream& stream) {
  const auto at = static_cast<size_t>(layer);
  for (std::vector<BasisJob>& jobs : query_jobs_[at]) {
    for (BasisJob& job : jobs) job.from = q + (job.from - queries_of_[at]);
  }
  queries_of_[at] = q;
  turn_queries(layer, stream);
  if (all_plain_[at] != 0) {
    plain_[at].append(k.as<float>(), v.as<float>(), stream);
    return plain_[at].attend(q, out.as<float>(), scale, stream);
  }
  PackedBatch& batch = batches_[at];
  batch.append(k.as<float>(), v.as<float>(), stream);
  batch.attend(q, out.as<float>(), scale, stream);
}

}  // namespace kvlm
