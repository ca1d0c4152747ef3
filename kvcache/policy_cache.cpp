// The order of the engine's stages: open, begin, attend, end, report.
#include "kvcache/policy_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <numeric>
#include <utility>

#include "kernels/base/error.h"
#include "kvcache/engine/row_order.h"
#include "kvcache/engine/step_checks.h"

namespace kvlm {

namespace {

/// After attention of generated tokens: flushes full windows, then evicts. Layers that share codes
/// find them through the other layer's blocks, so all layers are flushed before any evicts. Tokens
/// of later prompts were flushed and evicted as they were stored.
void settle(std::span<Sequence* const> sequences, int layers, WindowPacker& packer,
            Evictor& evictor, Stream& stream) {
  for (int layer = 0; layer < layers; ++layer) packer.flush(sequences, layer, stream);
  evictor.evict(sequences, stream);
}

}  // namespace

PolicyCache::PolicyCache(std::shared_ptr<const CachePlan> plan, std::shared_ptr<Arena> arena)
    : traits_(std::move(plan), arena->device()),
      store_(traits_, arena, placement_, decode_weights_, sinks_),
      queries_(arena->device()) {}

PolicyCache::PolicyCache(std::shared_ptr<const CachePlan> plan, size_t arena_bytes, Device device)
    : PolicyCache(std::move(plan), std::make_shared<Arena>(device, arena_bytes)) {}

SequenceId PolicyCache::open(const SequenceSize& size, const std::string& who) {
  return admit(store_.open(size, who), who);
}

SequenceId PolicyCache::fork(SequenceId parent, int max_rows, const std::string& who,
                             Stream& stream) {
  const bool prompted =
      static_cast<size_t>(parent) < store_.all().size() && store_.at(parent).prompted;
  check_fork(prompted, prompted ? store_.at(parent).rows : 0, max_rows);
  gpu_.catch_up(store_.at(parent));
  return admit(store_.fork(parent, max_rows, who, stream), who);
}

/// Allocates workspaces for an admitted sequence; if that fails, closes it and throws.
SequenceId PolicyCache::admit(SequenceId id, const std::string& who) {
  const int max_rows = store_.at(id).size.max_rows;
  try {
    reserve_workspaces();
  } catch (const std::exception&) {
    close(id);
    reserve_workspaces();  // restores those of the other sequences
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("{} does not fit: out of memory for the attention workspace of {} "
                            "tokens under --kv {}; use a smaller batch or fewer tokens",
                            who, max_rows, plan().spec));
  }
  return id;
}

/// Grows all workspaces for the open sequences, so that decode allocates nothing.
void PolicyCache::reserve_workspaces() {
  const Workload load = store_.workload();
  settling_.reserve(load.sequences);
  queries_.grow(load.heads * traits_.q_per_kv() * traits_.dim());
  rotation_.reserve(load);
  appender_.reserve(load);
  key_basis_.reserve(load);
  remap_.reserve(load);
  window_packer_.reserve(load);
  evictor_.reserve(load);
  prompts_.reserve();
  if (!gpu_.serves()) decode_.reserve(load);
  gpu_.reserve(load);
}

void PolicyCache::close(SequenceId id) noexcept { store_.close(id); }

void PolicyCache::begin(std::span<const StepRows> step, Stream& stream) {
  for (size_t i = 0; i < step.size(); ++i) {
    if (i + SequenceStore::kAhead < step.size()) {
      store_.prefetch(step[i + SequenceStore::kAhead].sequence);
    }
    const StepRows& rows = step[i];
    const Sequence& sequence = store_.at(rows.sequence);
    assert(sequence.open);
    assert(rows.prompt || (rows.rows == 1 && sequence.prompted));
    check_rows(traits_, sequence, rows);
  }
  abandon_step();
  step_ = step;
  in_step_ = true;
  guarded_remaps_.reset();
  attended_ = 0;
  if (gpu_.serves()) gpu_.begin(step, stream);
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    if (!rows.prompt || (sequence.prompted && traits_.retention() != nullptr)) continue;
    // Tokens generated since the last prompt are text.
    sequence.modality.resize(static_cast<size_t>(sequence.rows), kTextRow);
    sequence.modality.insert(sequence.modality.end(), rows.modality.begin(), rows.modality.end());
    sequence.modality.resize(static_cast<size_t>(sequence.rows + rows.rows), kTextRow);
  }
}

/// Forgets a step that has failed, if there is one.
void PolicyCache::abandon_step() {
  if (!in_step_) return;
  if (gpu_.serves()) gpu_.give_up();
  prompt_packer_.clear();
  protected_values_.clear();
  window_packer_.clear();
  evictor_.clear();
}

void PolicyCache::give_embeddings(ConstTensorView embeddings, Stream& stream) {
  int64_t first = 0;
  for (const StepRows& rows : step_) {
    Sequence& sequence = store_.at(rows.sequence);
    if (!sequence.prompted) {
      sequence.prompt.protection =
          protected_values_.scores(embeddings.slice(first, rows.rows), sequence.modality, stream);
    }
    first += rows.rows;
  }
}

void PolicyCache::attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                         TensorView out, float scale, Stream& stream) {
  attended_ = layer + 1;
  const auto is_prompt = [](const StepRows& rows) { return rows.prompt; };
  const bool decodes = !std::all_of(step_.begin(), step_.end(), is_prompt);
  const bool prompts = std::any_of(step_.begin(), step_.end(), is_prompt);
  const QkvRows given{q, k, v};
  const QkvRows stored = rotation_.turned(layer, given, !prompts, stream);
  // Packed attention reads queries while it writes outputs; attention of unpacked tokens does not.
  const bool in_place =
      traits_.holds_rows_alone(layer) && (!gpu_.serves() || gpu_.attends_in_place(layer));
  const bool apart = decodes && !in_place && out.data() == stored.q.data();
  const ConstTensorView queries = apart ? queries_.copy_of(stored.q, stream) : stored.q;
  int64_t first = 0;
  decode_.start_layer();
  for (const StepRows& rows : step_) {
    if (rows.prompt) {
      attend_prompt(rows, layer, given.slice(first, rows.rows), stored.slice(first, rows.rows),
                    out.empty() ? out : out.slice(first, rows.rows), scale, stream);
    } else if (!gpu_.serves()) {
      decode_.add(store_.at(rows.sequence), first);
    }
    first += rows.rows;
  }
  if (decodes && gpu_.serves()) {
    gpu_.attend(layer, queries.as<float>(), stored.k, stored.v, out, scale, stream);
  } else if (decodes) {
    decode_.attend(layer, queries.as<float>(), stored.k, stored.v, out, scale, stream);
  }
  if (rotation_.rotated(layer) == Rotated::kKeysAndValues && decodes) {
    Rotation::turn_generated_back(out, step_, stream);
  }
}

/// Attention of prompt tokens: in the given basis if the sequence has no stored tokens, else in the
/// basis of the stored ones.
void PolicyCache::attend_prompt(const StepRows& rows, int layer, const QkvRows& given,
                                const QkvRows& stored, TensorView out, float scale,
                                Stream& stream) {
  Sequence& sequence = store_.at(rows.sequence);
  const bool begins = !sequence.prompted && sequence.prompt.staged == 0;
  if (sequence.prompted) {
    later_prompts_.attend(sequence, rows, layer, stored.q, stored.k, stored.v, out, scale, stream);
  } else {
    prompts_.attend(sequence, rows, layer, begins ? given : stored, stored, out, scale, stream);
    if (prompts_.ends_group(rows, layer)) {
      if (prompts_.waits()) gpu_.prepare_sequences(stream);
      prompts_.finish_group(sequence, rows, layer, stream);
    }
  }
  if (rotation_.rotated(layer) == Rotated::kKeysAndValues && !begins) {
    Rotation::turn_back(out, stream);
  }
}

uint64_t PolicyCache::repetition() const noexcept {
  const bool alike = std::all_of(step_.begin(), step_.end(), [&](const StepRows& rows) {
    return !rows.prompt && store_.at(rows.sequence).on_gpu;
  });
  return alike ? gpu_.repetition() : 0;
}

void PolicyCache::repeated() noexcept { attended_ = shape().layers; }

void PolicyCache::pause() {
  assert(in_step_ && std::ranges::all_of(step_, [&](const StepRows& rows) {
           return rows.prompt && !store_.at(rows.sequence).prompted;
         }));
  paused_step_ = std::exchange(step_, {});
  paused_attended_ = attended_;
  in_step_ = false;
}

void PolicyCache::resume() {
  abandon_step();
  step_ = std::exchange(paused_step_, {});
  attended_ = paused_attended_;
  in_step_ = true;
}

void PolicyCache::end(Stream& stream) {
  guarded_remaps_.reset();
  const std::span<const StepRows> step = std::exchange(step_, {});
  settling_.clear();
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    if (!rows.prompt && !sequence.on_gpu) settling_.push_back(&sequence);
  }
  if (gpu_.serves()) {
    const std::span<Sequence* const> taken_back = gpu_.end(step, stream);
    settling_.insert(settling_.end(), taken_back.begin(), taken_back.end());
  }
  if (!settling_.empty()) settle(settling_, shape().layers, window_packer_, evictor_, stream);
  if (std::ranges::any_of(step, &StepRows::prompt)) gpu_.prepare_sequences(stream);
  for (const StepRows& rows : step) {
    Sequence& sequence = store_.at(rows.sequence);
    if (!sequence.prompted) prompts_.end(sequence, rows, stream);
    sequence.rows += rows.rows;
    if (rows.prompt) SequenceStore::count_buffers(sequence);
    if (!sequence.on_gpu) store_.account(sequence);
  }
  if (gpu_.serves()) gpu_.end_prompts(step, prompts_.waits(), stream);
  in_step_ = false;
}

int PolicyCache::next_position(SequenceId id) const noexcept {
  const Sequence& sequence = store_.at(id);
  const Retention* rule = traits_.retention();
  if (!sequence.prompted || rule == nullptr || !rule->positions_from_layer0()) {
    return sequence.rows;
  }
  return sequence.slots_of(0);
}

size_t PolicyCache::bytes() const noexcept {
  try {
    gpu_.count_bytes();
  } catch (const Error&) {
    // If the GPU is lost, the next step reports it.
  }
  return store_.bytes();
}

CacheReport PolicyCache::report(SequenceId id) const noexcept {
  static_cast<void>(bytes());  // updates bytes that only the GPU counts
  const Sequence& sequence = store_.at(id);
  std::vector<int> visual_slots;
  int64_t guarded = 0;
  try {
    visual_slots = gpu_.reader().visual_slots(sequence);
    if (sequence.rows > 0) guarded = guarded_remaps();
  } catch (const Error&) {
  }
  CacheReport report = store_.report(sequence, visual_slots);
  report.guarded_remaps = guarded;
  return report;
}

/// The count covers all sequences and changes only in steps. Reading it waits for the GPU, so one
/// result is cached for all sequences that end with a step.
int64_t PolicyCache::guarded_remaps() const {
  if (guarded_remaps_) return *guarded_remaps_;
  int64_t count = 0;
  for (int layer = 0; layer < shape().layers; ++layer) {
    if (!traits_.layer(layer).remaps) continue;
    if (gpu_.serves()) count += gpu_.guarded_remaps(layer);
  }
  count += decode_.guarded_remaps();
  guarded_remaps_ = count;
  return count;
}

const LayerState& PolicyCache::layer(SequenceId sequence, int layer) {
  gpu_.catch_up(store_.at(sequence));
  return store_.at(sequence).layers[static_cast<size_t>(layer)];
}

std::vector<HeadRows> PolicyCache::inspect(SequenceId id, int layer, Stream& stream) {
  const Sequence& sequence = store_.at(id);
  // The step has stored a token that the host has not counted.
  const bool newest = in_step_ && sequence.on_gpu && layer < attended_ &&
                      std::any_of(step_.begin(), step_.end(),
                                  [&](const StepRows& rows) { return rows.sequence == id; });
  if (sequence.drops_on_gpu()) {
    return inspector_.read(sequence, gpu_.reader().heads_now(sequence, layer, newest), layer,
                           stream);
  }
  std::vector<HeadState> heads = this->layer(id, layer).heads;
  if (newest || !sequence.came.empty()) {
    for (HeadState& head : heads) counts_.count_newest(head);
  }
  std::vector<HeadRows> rows = inspector_.read(sequence, heads, layer, stream);
  for (size_t h = 0; h < rows.size() && !sequence.came.empty(); ++h) {
    const size_t head = static_cast<size_t>(layer) * rows.size() + h;
    put_in_order(rows[h], sequence.came[head], newest, traits_.dim());
  }
  return rows;
}

CachedLayer PolicyCache::cached_prompt(SequenceId id, int layer, Stream& stream) {
  const Sequence& sequence = store_.at(id);
  if (!sequence.size.records || !sequence.prompted || sequence.rows != sequence.prompt_rows) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("a sequence of {} tokens shows what it holds of a prompt of {}; expected "
                    "one that was opened to record it, before its first generated token",
                    sequence.rows, sequence.prompt_rows));
  }
  const std::vector<HeadRows> heads = inspect(id, layer, stream);
  const LayerState& state = this->layer(id, layer);
  const size_t dim = traits_.dim();
  const auto slots = heads.front().tags.size();
  CachedLayer found;
  found.slots = static_cast<int>(slots);
  found.keys.resize(heads.size() * slots * dim);
  found.values.resize(found.keys.size());
  found.kept.resize(heads.size() * slots);
  found.tags.resize(found.kept.size());
  for (size_t h = 0; h < heads.size(); ++h) {
    const std::vector<int16_t>& tags =
        traits_.retention() != nullptr ? state.heads[h].tags : sequence.modality;
    std::vector<size_t> order(slots);  // by place in memory: which of the kept tokens
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_partition(order.begin(), order.end(),
                          [&](size_t i) { return traits_.store_of(tags[i]) == kVisual; });
    const std::vector<std::vector<int32_t>>& selected = state.selected;
    for (size_t place = 0; place < slots; ++place) {
      const size_t to = h * slots + order[place];
      const auto copy = [&](const std::vector<float>& from, std::vector<float>& into) {
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(place * dim), dim,
                    into.begin() + static_cast<std::ptrdiff_t>(to * dim));
      };
      copy(heads[h].keys, found.keys);
      copy(heads[h].values, found.values);
      found.tags[to] = heads[h].tags[place];
      found.kept[to] = selected.empty() ? static_cast<int32_t>(order[place])
                                        : selected[selected.size() > 1 ? h : 0][order[place]];
    }
  }
  return found;
}

}  // namespace kvlm
