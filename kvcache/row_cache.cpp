#include "kvcache/row_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <vector>

#include "kernels/attention.h"
#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/row_batch.h"
#include "kernels/row_moves.h"
#include "kernels/store_rows.h"
#include "kvcache/arena.h"
#include "kvcache/engine/step_checks.h"

// The cache without a policy: an extent of the arena a layer holds a sequence's rows, keys then
// values of each KV head, in the order in which they came. A prompt attends to its rows as they are
// given; generated rows attend to what is stored (RowBatch). A step that goes on from the last one
// uses its description again.
namespace kvlm {

namespace {

/// K and V of one layer: [K of each kv_head | V of each kv_head], each (max_rows, head_dim).
size_t layer_bytes(DType format, const CacheShape& shape, int rows) {
  return 2 * static_cast<size_t>(shape.kv_heads) * static_cast<size_t>(rows) *
         static_cast<size_t>(shape.head_dim) * dtype_bytes(format);
}

class RowCache final : public KvCache {
 public:
  RowCache(DType format, const CacheShape& shape, size_t arena_bytes, Device device)
      : format_(format),
        shape_(shape),
        spec_(dtype_name(format)),
        arena_(device, arena_bytes),
        destinations_(static_cast<size_t>(shape.kv_heads)) {
    for (int layer = 0; layer < shape.layers; ++layer) batches_.emplace_back(device);
  }

  const CacheShape& shape() const noexcept override { return shape_; }
  const std::string& spec() const noexcept override { return spec_; }
  CacheNeeds needs() const noexcept override { return {}; }

  SequenceId open(const SequenceSize& size, const std::string& who) override;
  SequenceId fork(SequenceId parent, int max_rows, const std::string& who, Stream& stream) override;
  void close(SequenceId sequence) noexcept override;
  void begin(std::span<const StepRows> step, Stream& stream) override;
  void give_embeddings(ConstTensorView, Stream&) override {}
  void attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream) override;
  Repetition repetition() const noexcept override;
  void repeated() noexcept override;
  void end(Stream& stream) override;

  int tokens(SequenceId sequence) const noexcept override { return at(sequence).rows; }
  size_t bytes() const noexcept override { return arena_.used(); }
  CacheReport report(SequenceId sequence) const noexcept override;

 private:
  struct Sequence {
    bool open = false;
    bool prompted = false;  // the first prompt has ended
    int max_rows = 0;
    int rows = 0;                     // complete in every layer
    std::vector<ArenaExtent> layers;  // one a layer
  };

  Sequence& at(SequenceId id) noexcept { return sequences_[static_cast<size_t>(id)]; }
  const Sequence& at(SequenceId id) const noexcept { return sequences_[static_cast<size_t>(id)]; }

  size_t row_bytes() const noexcept {
    return static_cast<size_t>(shape_.head_dim) * dtype_bytes(format_);
  }
  /// First row of one kv_head's keys (part 0) or values (part 1).
  std::byte* rows_of(const Sequence& sequence, int layer, int part, int head) const noexcept {
    const size_t plane = static_cast<size_t>(part) * static_cast<size_t>(shape_.kv_heads) +
                         static_cast<size_t>(head);
    return sequence.layers[static_cast<size_t>(layer)].data() +
           plane * static_cast<size_t>(sequence.max_rows) * row_bytes();
  }

  void append(Sequence& sequence, int layer, ConstTensorView k, ConstTensorView v, Stream& stream);
  void append_row(Sequence& sequence, int layer);
  void store_new(ConstTensorView k, ConstTensorView v, Stream& stream);
  bool goes_on() const noexcept;
  void attend_step(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                   TensorView out, float scale, Stream& stream);
  void attend_prompt(const Sequence& sequence, int layer, ConstTensorView q, ConstTensorView k,
                     ConstTensorView v, TensorView out, float scale, Stream& stream);

  DType format_;
  CacheShape shape_;
  std::string spec_;
  Arena arena_;
  std::vector<Sequence> sequences_;
  std::span<const StepRows> step_;

  // Workspaces sized by open(), so that decode allocates nothing.
  std::vector<RowDestination> destinations_;  // (kv_heads,)
  std::vector<KeyValueRows> past_;            // (kv_heads,)
  std::vector<std::byte*> new_keys_;          // (rows of a step, kv_heads)
  std::vector<std::byte*> new_values_;
  std::vector<RowBatch> batches_;  // (layers,) generated rows

  // A step with a row more for each sequence of the last one finds its lanes described.
  std::vector<SequenceId> kept_batch_;  // empty: none are
  uint64_t kept_number_ = 0;            // of these lanes
  bool goes_on_ = false;
  bool in_step_ = false;
};

SequenceId RowCache::open(const SequenceSize& size, const std::string& who) {
  const int max_rows = size.max_rows;  // rows cost the same whoever wrote them
  assert(size.prompt_rows >= 0 && size.prompt_rows <= max_rows);
  const size_t bytes = layer_bytes(format_, shape_, max_rows);
  const auto layers = static_cast<size_t>(shape_.layers);
  if (!arena_.fits(bytes, layers)) {
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("{} does not fit: {} tokens of {} cache take {}, and {} of {} are free; "
                    "use a smaller batch, fewer tokens or more cache memory",
                    who, max_rows, spec_, human_bytes(layers * Arena::rounded(bytes)),
                    human_bytes(arena_.capacity() - arena_.reserved()),
                    human_bytes(arena_.capacity())));
  }
  size_t slot = 0;
  while (slot < sequences_.size() && sequences_[slot].open) ++slot;
  if (slot == sequences_.size()) sequences_.emplace_back();
  Sequence& sequence = sequences_[slot];
  sequence.layers.reserve(layers);
  for (size_t layer = 0; layer < layers; ++layer) {
    sequence.layers.push_back(arena_.reserve(bytes, who));
  }
  sequence.max_rows = max_rows;
  sequence.rows = 0;
  sequence.open = true;
  sequence.prompted = false;

  size_t lanes = 0;
  size_t rows = 0;
  const auto kv_heads = static_cast<size_t>(shape_.kv_heads);
  for (const Sequence& s : sequences_) {
    if (!s.open) continue;
    lanes += kv_heads;
    rows += kv_heads * static_cast<size_t>(s.max_rows);
  }
  for (RowBatch& batch : batches_) {
    batch.reserve(shape_.q_per_kv(), shape_.head_dim, lanes, lanes, rows);
  }
  kept_batch_.reserve(lanes / kv_heads);
  past_.reserve(kv_heads);
  new_keys_.reserve(lanes);
  new_values_.reserve(lanes);
  return static_cast<SequenceId>(slot);
}

/// Rows of a fork are copied: attention of prompts reads those of a KV head side by side.
SequenceId RowCache::fork(SequenceId parent, int max_rows, const std::string& who, Stream& stream) {
  const bool prompted = static_cast<size_t>(parent) < sequences_.size() && at(parent).prompted;
  check_fork(prompted, prompted ? at(parent).rows : 0, max_rows);
  const SequenceId id = open({max_rows, 0, max_rows}, who);
  const Sequence& from = at(parent);
  Sequence& made = at(id);
  std::vector<ByteRange> copies;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (int part = 0; part < 2; ++part) {
      for (int head = 0; head < shape_.kv_heads; ++head) {
        copies.push_back({rows_of(from, layer, part, head), rows_of(made, layer, part, head),
                          static_cast<size_t>(from.rows) * row_bytes()});
      }
    }
    made.layers[static_cast<size_t>(layer)].set_used(layer_bytes(format_, shape_, from.rows));
  }
  made.rows = from.rows;
  made.prompted = true;
  try {
    copy_ranges(copies, stream);
  } catch (...) {
    close(id);
    throw;
  }
  return id;
}

void RowCache::close(SequenceId id) noexcept {
  Sequence& sequence = at(id);
  if (std::find(kept_batch_.begin(), kept_batch_.end(), id) != kept_batch_.end()) {
    kept_batch_.clear();
  }
  sequence.layers.clear();
  sequence.rows = 0;
  sequence.open = sequence.prompted = false;
}

void RowCache::begin(std::span<const StepRows> step, Stream&) {
  for (const StepRows& rows : step) {
    const Sequence& sequence = at(rows.sequence);
    assert(sequence.open);
    assert(rows.prompt || rows.rows == 1);
    if (sequence.rows + rows.rows > sequence.max_rows) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("a sequence of {} tokens cannot take {} more: {} were reserved for it",
                      sequence.rows, rows.rows, sequence.max_rows));
    }
  }
  step_ = step;
  if (in_step_) kept_batch_.clear();  // the last step has failed half way
  new_keys_.clear();
  new_values_.clear();
  in_step_ = true;
  goes_on_ = goes_on();
  if (!goes_on_) kept_batch_.clear();
}

/// Whether this step is the last one with a row more for each of its sequences.
bool RowCache::goes_on() const noexcept {
  if (kept_batch_.empty() || kept_batch_.size() != step_.size()) return false;
  for (size_t i = 0; i < step_.size(); ++i) {
    if (step_[i].prompt || step_[i].sequence != kept_batch_[i]) return false;
  }
  return std::all_of(batches_.begin(), batches_.end(),
                     [](const RowBatch& batch) { return batch.room() > 0; });
}

void RowCache::append(Sequence& sequence, int layer, ConstTensorView k, ConstTensorView v,
                      Stream& stream) {
  const int added = static_cast<int>(k.shape()[0]);
  for (int part = 0; part < 2; ++part) {
    for (int head = 0; head < shape_.kv_heads; ++head) {
      destinations_[static_cast<size_t>(head)].data =
          rows_of(sequence, layer, part, head) + static_cast<size_t>(sequence.rows) * row_bytes();
    }
    store_rows(destinations_, format_, part == 0 ? k : v, stream);
  }
  sequence.layers[static_cast<size_t>(layer)].set_used(
      layer_bytes(format_, shape_, sequence.rows + added));
}

/// Makes room for one row in every head of a layer: store_new() fills it.
void RowCache::append_row(Sequence& sequence, int layer) {
  const size_t before = static_cast<size_t>(sequence.rows) * row_bytes();
  for (int head = 0; head < shape_.kv_heads; ++head) {
    new_keys_.push_back(rows_of(sequence, layer, 0, head) + before);
    new_values_.push_back(rows_of(sequence, layer, 1, head) + before);
  }
  sequence.layers[static_cast<size_t>(layer)].set_used(
      layer_bytes(format_, shape_, sequence.rows + 1));
}

/// Stores what append_row() made room for, (rows, kv_heads, head_dim) of each.
void RowCache::store_new(ConstTensorView k, ConstTensorView v, Stream& stream) {
  narrow_rows(new_keys_, format_, shape_.head_dim, k.as<float>(), stream);
  narrow_rows(new_values_, format_, shape_.head_dim, v.as<float>(), stream);
  new_keys_.clear();
  new_values_.clear();
}

void RowCache::attend_prompt(const Sequence& sequence, int layer, ConstTensorView q,
                             ConstTensorView k, ConstTensorView v, TensorView out, float scale,
                             Stream& stream) {
  if (q.empty()) return;
  past_.clear();
  if (sequence.rows > 0) {
    for (int head = 0; head < shape_.kv_heads; ++head) {
      past_.push_back({rows_of(sequence, layer, 0, head), rows_of(sequence, layer, 1, head),
                       format_, sequence.rows});
    }
  }
  attention(out, q, k, v, past_, /*causal=*/true, scale, shape_.multiply, stream);
}

void RowCache::attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                      TensorView out, float scale, Stream& stream) {
  if (!goes_on_) return attend_step(layer, q, k, v, out, scale, stream);
  RowBatch& batch = batches_[static_cast<size_t>(layer)];
  batch.append(k.as<float>(), v.as<float>(), stream);
  batch.attend(q.as<float>(), out.as<float>(), scale, stream);
}

/// attend() of a step that is not the last one's repetition.
void RowCache::attend_step(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                           TensorView out, float scale, Stream& stream) {
  RowBatch& batch = batches_[static_cast<size_t>(layer)];
  batch.start(shape_.q_per_kv(), shape_.head_dim);
  bool keep = true;
  int64_t row = 0;
  int64_t first_new = 0;  // generated rows that follow each other are stored together
  const auto store_rows_before = [&](int64_t end) {
    if (new_keys_.empty()) return;
    store_new(k.slice(first_new, end - first_new), v.slice(first_new, end - first_new), stream);
  };
  for (const StepRows& rows : step_) {
    Sequence& sequence = at(rows.sequence);
    keep = keep && !rows.prompt;
    if (rows.prompt) store_rows_before(row);
    const ConstTensorView k_rows = k.slice(row, rows.rows);
    const ConstTensorView v_rows = v.slice(row, rows.rows);
    if (rows.prompt) {
      const ConstTensorView q_rows = q.empty() ? q : q.slice(row, rows.rows);
      const TensorView out_rows = out.empty() ? out : out.slice(row, rows.rows);
      attend_prompt(sequence, layer, q_rows, k_rows, v_rows, out_rows, scale, stream);
      append(sequence, layer, k_rows, v_rows, stream);
    } else {
      if (new_keys_.empty()) first_new = row;
      append_row(sequence, layer);
      const float* q_row = q.slice(row, 1).as<float>();
      float* out_row = out.slice(row, 1).as<float>();
      for (int head = 0; head < shape_.kv_heads; ++head) {
        const size_t offset =
            static_cast<size_t>(head * shape_.q_per_kv()) * static_cast<size_t>(shape_.head_dim);
        const KeyValueRows held{rows_of(sequence, layer, 0, head),
                                rows_of(sequence, layer, 1, head), format_, sequence.rows + 1};
        batch.add(q_row + offset, {&held, 1}, out_row + offset);
      }
    }
    row += rows.rows;
  }
  store_rows_before(row);
  if (step_.empty() ||
      std::all_of(step_.begin(), step_.end(), [](const StepRows& rows) { return rows.prompt; })) {
    return;
  }
  batch.describe(q.as<float>(), out.as<float>(), keep, stream);
  batch.attend(q.as<float>(), out.as<float>(), scale, stream);
}

Repetition RowCache::repetition() const noexcept {
  if (!goes_on_ || arena_.device().kind == DeviceKind::kCpu) return {};
  int left = batches_[0].room();
  for (const StepRows& rows : step_) {
    const Sequence& sequence = at(rows.sequence);
    left = std::min(left, sequence.max_rows - sequence.rows);
  }
  return {kept_number_, left};
}

void RowCache::repeated() noexcept {
  for (RowBatch& batch : batches_) batch.appended();
}

void RowCache::end(Stream&) {
  in_step_ = false;
  const bool generated =
      std::none_of(step_.begin(), step_.end(), [](const StepRows& rows) { return rows.prompt; });
  if (!goes_on_) kept_number_ = Repetition::new_id();
  for (const StepRows& rows : step_) {
    Sequence& sequence = at(rows.sequence);
    sequence.rows += rows.rows;
    sequence.prompted |= rows.ends_prompt;
    if (generated && !goes_on_) kept_batch_.push_back(rows.sequence);
    if (!goes_on_) continue;
    for (ArenaExtent& layer : sequence.layers) {
      layer.set_used(layer_bytes(format_, shape_, sequence.rows));
    }
  }
  step_ = {};
}

CacheReport RowCache::report(SequenceId id) const noexcept {
  const Sequence& sequence = at(id);
  CacheReport report;
  for (const ArenaExtent& layer : sequence.layers) report.bytes += layer.used();
  const size_t elements = shape_.elements_per_token() * static_cast<size_t>(sequence.rows);
  report.f16_bytes = 2 * elements;
  report.nominal_bits = 8.0 * static_cast<double>(dtype_bytes(format_));
  report.stored_bits =
      elements == 0 ? 0 : 8.0 * static_cast<double>(report.bytes) / static_cast<double>(elements);
  report.slots = sequence.rows;
  return report;
}

}  // namespace

std::unique_ptr<KvCache> make_row_cache(DType format, const CacheShape& shape, size_t arena_bytes,
                                        Device device) {
  return std::make_unique<RowCache>(format, shape, arena_bytes, device);
}

size_t row_cache_reserved_bytes(DType format, const CacheShape& shape, int max_rows) noexcept {
  return static_cast<size_t>(shape.layers) * Arena::rounded(layer_bytes(format, shape, max_rows));
}

}  // namespace kvlm
