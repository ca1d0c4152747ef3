#include "kvcache/policy_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/elementwise.h"
#include "kvcache/nominal.h"

namespace kvlm {

PolicyCache::PolicyCache(std::shared_ptr<const CachePlan> plan, size_t arena_bytes, Device device)
    : traits_(std::move(plan), device),
      arena_(device, arena_bytes),
      destinations_(static_cast<size_t>(shape_.kv_heads)),
      weights_(device),
      queries_(device),
      prompt_floats_(device),
      inspected_(device),
      all_plain_(static_cast<size_t>(shape_.layers)),
      packs_(static_cast<size_t>(shape_.layers)) {
  for (int layer = 0; layer < shape_.layers; ++layer) {
    batches_.emplace_back(device);
    plain_.emplace_back(device);
    packers_.push_back({RingPacker(device), RingPacker(device)});
  }
}

CacheNeeds PolicyCache::needs() const noexcept {
  CacheNeeds needs;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    const Quantizer* visual = layouts_.quantizer(kVisual, layer);
    needs.prompt_embeddings |= layouts_.protected_values(layer).plan != nullptr;
    needs.pictures_first |= visual != nullptr && visual->visual_only();
  }
  needs.prompt_queries =
      parts_.retention != nullptr && parts_.retention->needs().rows != ImportanceNeeds::Rows::kNone;
  // A layer that uses another's codes must drop rows in the same step, which a prompt that passes
  // layer by layer does not.
  needs.one_prompt = parts_.share.any() && parts_.retention != nullptr;
  // The sums of later prompts are added on the host.
  needs.one_prompt |= arena_.device().kind != DeviceKind::kCpu && layouts_.keeps_weights();
  return needs;
}

SequenceId PolicyCache::open(const SequenceSize& size, const std::string& who) {
  assert(size.prompt_rows > 0 && size.prompt_rows <= size.max_rows);
  assert(size.visual_rows >= 0 && size.visual_rows <= size.prompt_rows);
  const size_t memory = layouts_.memory_bound(size);
  const size_t staging = layouts_.staging_bytes(size);
  const auto refuse = [&] {
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("{} does not fit: {} tokens of {} cache take up to {}, {} more while the "
                    "prompt is read, and {} of {} are free; use a smaller batch, fewer "
                    "tokens or more cache memory",
                    who, size.max_rows, parts_.spec, human_bytes(memory), human_bytes(staging),
                    human_bytes(arena_.capacity() - arena_.reserved()),
                    human_bytes(arena_.capacity())));
  };
  if (!arena_.fits(memory, 1)) refuse();
  ArenaExtent kept = arena_.reserve(memory, who);
  if (!arena_.fits(staging, 1)) {
    kept = ArenaExtent();
    refuse();
  }
  size_t slot = 0;
  while (slot < sequences_.size() && sequences_[slot].open) ++slot;
  if (slot == sequences_.size()) sequences_.emplace_back();
  Sequence& sequence = sequences_[slot];
  sequence.memory = std::move(kept);
  sequence.prompt.staging = arena_.reserve(staging, who);
  sequence.open = true;
  sequence.prompted = false;
  sequence.size = size;
  sequence.rows = sequence.prompt_rows = sequence.prompt.staged = 0;
  sequence.uncounted = sequence.quiet = 0;
  sequence.placed = 0;
  sequence.layers.resize(static_cast<size_t>(shape_.layers));
  for (LayerState& layer : sequence.layers) {
    layer = LayerState();
    layer.heads.resize(heads());
  }
  sequence.modality.clear();
  sequence.prompt.importance.clear();
  sequence.prompt.sparsity.clear();
  sequence.prompt.protection.clear();
  try {
    reserve_workspace();
  } catch (const std::exception&) {
    close(static_cast<SequenceId>(slot));
    reserve_workspace();  // what the others need is there again
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("{} does not fit: the workspace to attend to {} tokens of {} cache finds "
                    "no memory beside what is held; use a smaller batch or fewer tokens",
                    who, size.max_rows, parts_.spec));
  }
  return static_cast<SequenceId>(slot);
}

void PolicyCache::reserve_workspace() {
  kept_batch_.clear();  // workspaces may move
  size_t lanes = 0;
  size_t rows = 0;  // of all lanes of one layer
  size_t most = 0;  // of one lane
  for (const Sequence& sequence : sequences_) {
    if (!sequence.open) continue;
    lanes += heads();
    const auto most_here = static_cast<size_t>(sequence.size.max_rows);
    rows += heads() * most_here;
    most = std::max(most, most_here);
  }
  const auto queries = static_cast<size_t>(shape_.q_per_kv());
  const auto grow = [](auto& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  };
  for (RowBatch& batch : plain_) {
    batch.reserve(shape_.q_per_kv(), shape_.head_dim, lanes, 2 * kStores * lanes, rows);
  }
  grow(packed_, lanes);
  grow(packed_lanes_, lanes);
  generated_.reserve(lanes / heads());
  settling_.reserve(lanes / heads());
  kept_batch_.reserve(lanes / heads());
  rings_.reserve(lanes);
  grow(runs_, lanes * kRunsPerLane);
  past_.reserve(2 * heads());
  weights_.grow(queries * rows);
  queries_.grow(lanes * queries * dim());
  const Workload load{lanes / heads(), lanes, rows, most};
  appender_.reserve(load);
  remap_.reserve(load);
  evictor_.reserve(load);
  key_basis_.reserve(load);
  window_packer_.reserve(load);
}

void PolicyCache::close(SequenceId id) noexcept {
  Sequence& sequence = at(id);
  sequence.open = false;
  if (std::find(kept_batch_.begin(), kept_batch_.end(), id) != kept_batch_.end()) {
    kept_batch_.clear();
  }
  sequence.layers.clear();
  sequence.memory = ArenaExtent();
  sequence.prompt.staging = ArenaExtent();
}

void PolicyCache::begin(std::span<const StepRows> step) {
  const CacheNeeds needs = this->needs();
  for (const StepRows& rows : step) {
    Sequence& sequence = at(rows.sequence);
    assert(sequence.open);
    assert(rows.prompt || (rows.rows == 1 && sequence.prompted));
    if (sequence.rows + rows.rows > sequence.size.max_rows) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("a sequence of {} tokens cannot take {} more: {} were reserved for it",
                      sequence.rows, rows.rows, sequence.size.max_rows));
    }
    if (sequence.prompted && rows.prompt && needs.one_prompt) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("--kv {} takes no second prompt: its layers share codes and drop rows; "
                      "prefill the conversation anew",
                      parts_.spec));
    }
    if (sequence.prompted && needs.pictures_first &&
        std::any_of(rows.modality.begin(), rows.modality.end(),
                    [](int16_t tag) { return tag != kTextRow; })) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("--kv {} packs pictures when the first prompt ends and takes no "
                              "further ones; prefill the conversation anew",
                              parts_.spec));
    }
    const auto last = std::max_element(rows.modality.begin(), rows.modality.end());
    if (last != rows.modality.end() && *last >= Layouts::kMaxImages && layouts_.per_image()) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("--kv {} gives each picture scales of its own, for up to {} pictures "
                              "of a prompt; drop span=per_image or give fewer pictures",
                              parts_.spec, Layouts::kMaxImages));
    }
    if (!sequence.prompted && !layouts_.joint() && !rows.ends_prompt) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("--kv {} packs each layer as soon as it is read: the first prompt "
                              "must come in one pass, and a part of {} rows came",
                              parts_.spec, rows.rows));
    }
    if (!sequence.prompted && sequence.rows + rows.rows > sequence.size.prompt_rows) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("a prompt of {} tokens was announced and {} came",
                              sequence.size.prompt_rows, sequence.rows + rows.rows));
    }
  }
  step_ = step;
  if (in_step_) {  // the last step has failed half way
    kept_batch_.clear();
    prompt_packer_.clear();
    window_packer_.clear();
    evictor_.clear();
  }
  in_step_ = true;
  attended_ = 0;
  goes_on_ = goes_on();
  if (!goes_on_) {
    kept_batch_.clear();
    keep_ = can_keep();
  }
  for (const StepRows& rows : step) {
    Sequence& sequence = at(rows.sequence);
    if (!rows.prompt || (sequence.prompted && parts_.retention != nullptr)) continue;
    // Rows that were generated since the last prompt are text.
    sequence.modality.resize(static_cast<size_t>(sequence.rows), kTextRow);
    sequence.modality.insert(sequence.modality.end(), rows.modality.begin(), rows.modality.end());
    sequence.modality.resize(static_cast<size_t>(sequence.rows + rows.rows), kTextRow);
  }
}

void PolicyCache::give_embeddings(ConstTensorView embeddings, Stream& stream) {
  int64_t row = 0;
  for (const StepRows& rows : step_) {
    Sequence& sequence = at(rows.sequence);
    if (!sequence.prompted) {
      sequence.prompt.protection =
          protected_values_.scores(embeddings.slice(row, rows.rows), sequence.modality, stream);
    }
    row += rows.rows;
  }
}

void PolicyCache::attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                         TensorView out, float scale, Stream& stream) {
  const float* queries = q.as<float>();
  const bool decodes =
      std::any_of(step_.begin(), step_.end(), [](const StepRows& rows) { return !rows.prompt; });
  if (decodes && out.data() == q.data()) {
    // Packed attention reads queries to its end, and its output takes their place.
    queries_.grow(static_cast<size_t>(q.elements()));
    copy(TensorView(queries_.data(), DType::kF32, q.shape(), q.device()), q, stream);
    queries = queries_.data();
  }
  attended_ = layer + 1;
  if (goes_on_) return decode_on(layer, queries, k, v, out, scale, stream);
  generated_.clear();
  int64_t row = 0;
  for (const StepRows& rows : step_) {
    Sequence& sequence = at(rows.sequence);
    if (!rows.prompt) {
      generated_.push_back({&sequence, row++, nullptr});
      continue;
    }
    const ConstTensorView q_rows = q.empty() ? q : q.slice(row, rows.rows);
    const ConstTensorView k_rows = k.slice(row, rows.rows);
    const ConstTensorView v_rows = v.slice(row, rows.rows);
    const TensorView out_rows = out.empty() ? out : out.slice(row, rows.rows);
    if (sequence.prompted) {
      attend_later_prompt(sequence, rows, layer, q_rows, k_rows, v_rows, out_rows, scale, stream);
    } else {
      attend_first_prompt(sequence, rows, layer, q_rows, k_rows, v_rows, out_rows, scale, stream);
    }
    row += rows.rows;
  }
  if (decodes) decode(layer, queries, k, v, out, scale, stream);
}

void PolicyCache::end(Stream& stream) {
  in_step_ = false;
  if (goes_on_) {
    for (const StepRows& rows : step_) {
      Sequence& sequence = at(rows.sequence);
      ++sequence.rows;
      ++sequence.uncounted;
      --sequence.quiet;
      sequence.memory.set_used(sequence.memory.used() + sequence.quiet_bytes);
    }
    step_ = {};
    return;
  }
  // Rows of a later prompt have been settled one by one as they were stored.
  settle(stream);
  for (const StepRows& rows : step_) {
    Sequence& sequence = at(rows.sequence);
    if (!sequence.prompted) {
      sequence.prompt.staged += rows.rows;
      if (rows.ends_prompt) {
        if (layouts_.joint()) {
          sequence.prompt_rows = sequence.prompt.staged;
          const std::vector<LayerSelection> selections = select(sequence, -1);
          for (int layer = 0; layer < shape_.layers; ++layer) {
            finish_layer(sequence, layer, selections[static_cast<size_t>(layer)], stream);
          }
        }
        sequence.prompt_rows = sequence.prompt.staged;
        sequence.prompted = true;
        sequence.prompt.staging = ArenaExtent();
        sequence.prompt.importance = {};
        sequence.prompt.sparsity = {};
        sequence.prompt.protection = {};
        if (parts_.retention != nullptr) sequence.modality = {};
      }
    }
    sequence.rows += rows.rows;
    sequence.quiet = std::max(0, sequence.quiet - rows.rows);
    if (rows.prompt) count_planes(sequence);
    account(sequence);
  }
  kept_number_ = Repetition::new_id();
  for (const StepRows& rows : step_) {
    if (keep_) kept_batch_.push_back(rows.sequence);
  }
  step_ = {};
}

void PolicyCache::count_planes(Sequence& sequence) noexcept {
  for (LayerState& state : sequence.layers) {
    state.plane_bytes = 0;
    for (const HeadState& lane : state.heads) {
      for (const StorePlanes& store : lane.stores) {
        state.plane_bytes +=
            store.keys.bytes() + store.values.bytes() + store.protected_values.bytes();
      }
    }
  }
}

void PolicyCache::account(Sequence& sequence) noexcept {
  size_t bytes = 0;
  for (const LayerState& state : sequence.layers) {
    bytes += state.plane_bytes;
    for (const size_t mask : state.mask_bytes) bytes += mask;
    bytes += decode_weights_.bytes(state);
    bytes += ProtectedValues::bytes(state);
  }
  sequence.memory.set_used(bytes);
  if (!sequence.prompted) {
    sequence.prompt.staging.set_used(static_cast<size_t>(layouts_.joint() ? shape_.layers : 1) * 2 *
                                     heads() * static_cast<size_t>(sequence.prompt.staged) *
                                     row_bytes());
  }
}

int PolicyCache::next_position(SequenceId id) const noexcept {
  const Sequence& sequence = at(id);
  if (!sequence.prompted || parts_.retention == nullptr ||
      !parts_.retention->positions_from_layer0()) {
    return sequence.rows;
  }
  return sequence.layers[0].heads[0].slots() + sequence.uncounted;
}

CacheReport PolicyCache::report(SequenceId id) const noexcept {
  const Sequence& sequence = at(id);
  CacheReport report;
  report.bytes = sequence.memory.used() + sequence.prompt.staging.used();
  const size_t elements = shape_.elements_per_token() * static_cast<size_t>(sequence.rows);
  report.f16_bytes = 2 * elements;
  if (elements == 0) return report;
  report.stored_bits = 8.0 * static_cast<double>(report.bytes) / static_cast<double>(elements);
  for (const LayerState& state : sequence.layers) {
    report.slots += state.heads[0].slots() + sequence.uncounted;
  }
  report.slots /= shape_.layers;
  if (!sequence.prompted) report.slots = sequence.rows;
  std::array<ScopeClaim, kStores> scopes;
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    scopes[store].packers = parts_.quantizers[store];
    for (const LayerState& state : sequence.layers) {
      scopes[store].slots += state.heads[0].stores[store].keys.slots();
      if (store == kRest) scopes[store].slots += sequence.uncounted;
    }
  }
  const double bits =
      nominal_bits(std::span(scopes).subspan(parts_.split ? size_t{kVisual} : size_t{kRest}),
                   parts_.rows, parts_.share);
  // Times the share of tokens kept.
  report.nominal_bits = bits * report.slots / sequence.rows;
  try {
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const Quantizer* packer = layouts_.quantizer(kVisual, layer);
      if (packer == nullptr || packer->remap(layer) == nullptr) continue;
      report.guarded_remaps += batches_[static_cast<size_t>(layer)].guarded_remaps();
    }
  } catch (const Error&) {
    // A GPU that is lost says so at the next step.
  }
  return report;
}

}  // namespace kvlm
