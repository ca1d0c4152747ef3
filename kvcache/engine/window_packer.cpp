// Packs full residual windows, layer by layer. Most quantizers pack only new tokens, so one call
// packs those of many sequences (flush_together). A quantizer that repacks old tokens, or packs
// keys in another basis, takes as many sequences per call as the workspace holds (flush_anew).
#include "kvcache/engine/window_packer.h"

#include <algorithm>
#include <cassert>

#include "kernels/base/error.h"
#include "kernels/row_moves.h"
#include "kvcache/engine/for_sequences.h"

namespace kvlm {

namespace {

int& due(LayerState& state, const Window& window) noexcept {
  return state.due[window.store][static_cast<size_t>(window.side)];
}

/// Values of kRest that may be protected.
bool protects(const Quantizer& quantizer, const Window& window) noexcept {
  return window.store == kRest && window.side == KvSide::kValues &&
         quantizer.protected_values() != nullptr;
}

/// Bytes of the buffers that a window is flushed to.
size_t buffer_bytes(const HeadState& head, const Window& window) noexcept {
  const StoreBuffers& buffers = head.stores[window.store];
  return buffers.buffer(window.side).bytes() +
         (window.side == KvSide::kValues ? buffers.protected_values.bytes() : 0);
}

bool is_due(const HeadState& head, const Window& window) noexcept {
  return head.buffer(window.store, window.side).full() >= window.packing->flush.trigger;
}

}  // namespace

WindowPacker::WindowPacker(const CacheTraits& traits, Unpacker& unpacker, KeyBasisChange& key_basis,
                           ProtectedValues& protected_values)
    : traits_(traits),
      unpacker_(unpacker),
      key_basis_(key_basis),
      protected_values_(protected_values),
      floats_(traits.device()),
      fresh_(traits.device()) {}

void WindowPacker::reserve(const Workload& load) {
  flushed_.reserve(load.sequences);
  for (int layer = 0; layer < traits_.shape().layers; ++layer) {
    for (const Window& window : traits_.layer(layer).windows) {
      reserve_window(load, window, *traits_.quantizer(window.store, layer));
    }
  }
  queue_.reserve(sources_.capacity() + load.heads);
}

void WindowPacker::reserve_window(const Workload& load, const Window& window,
                                  const Quantizer& quantizer) {
  const auto added = static_cast<size_t>(window.packing->flush.rows);
  if (window.anew) {
    const size_t of_head = quantizer.repacks(window.side) ? load.longest + added : added;
    const size_t one = traits_.kv_heads() * of_head;
    const size_t many = std::max(one, std::min(load.heads * of_head, kAnewTogether));
    try {
      reserve_anew(many, std::min(load.sequences, many / one), window, quantizer);
    } catch (const Error&) {  // if memory is short, one sequence at a time
      if (many == one) throw;
      reserve_anew(one, 1, window, quantizer);
    }
    return;
  }
  const size_t some = std::max(kSequencesTogether * traits_.kv_heads() * added, kRowsTogether);
  const size_t rows = std::min(load.heads * added, some);
  if (jobs_.size() < rows) jobs_.resize(rows);
  floats_.grow(rows * traits_.dim());
  sources_.reserve(rows);
}

/// Allocates to repack `rows` tokens of `sequences` sequences in one call.
void WindowPacker::reserve_anew(size_t rows, size_t sequences, const Window& window,
                                const Quantizer& quantizer) {
  const size_t heads = sequences * traits_.kv_heads();
  floats_.grow(rows * traits_.dim());
  if (quantizer.repacks(window.side)) {
    const auto added = static_cast<size_t>(window.packing->flush.rows);
    fresh_.grow(heads * added * traits_.dim());
    const auto block_rows = std::max<size_t>(1, window.packing->format.block_rows);
    unpacker_.reserve(rows, heads, rows / block_rows + 2 * heads);
    packed_.reserve(heads);
    copies_.reserve(2 * heads);
  }
  if (quantizer.key_basis() != nullptr) key_basis_.reserve_keys(rows, sequences);
  if (protects(quantizer, window)) protected_values_.reserve(rows, heads);
  sources_.reserve(rows);
  anew_.reserve(heads);
  learning_.reserve(sequences);
  keys_.reserve(heads);
  anew_rows_ = std::max(anew_rows_, rows);
}

void WindowPacker::flush(std::span<Sequence* const> sequences, int layer, Stream& stream) {
  for (const Window& window : traits_.layer(layer).windows) {
    list_full(sequences, layer, window);
    if (window.anew) {
      flush_anew(layer, window, stream);
    } else {
      flush_together(window, stream);
    }
  }
}

void WindowPacker::list_full(std::span<Sequence* const> sequences, int layer,
                             const Window& window) {
  constexpr size_t kAhead = 8;
  const auto at = static_cast<size_t>(layer);
  flushed_.clear();
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (i + kAhead < sequences.size()) __builtin_prefetch(&sequences[i + kAhead]->layers[at]);
    LayerState& state = sequences[i]->layers[at];
    if (due(state, window) > 0) flushed_.push_back({&state});
  }
}

/// Packs the oldest tokens of all full windows of flushed_, as many per call as the workspace
/// holds.
void WindowPacker::flush_together(const Window& window, Stream& stream) {
  const auto added = static_cast<size_t>(window.packing->flush.rows);
  for (size_t first = 0; first < flushed_.size();) {
    size_t rows = 0;
    size_t end = first;
    for (; end < flushed_.size(); ++end) {
      const size_t more = static_cast<size_t>(due(*flushed_[end].state, window)) * added;
      if (rows + more > jobs_.size()) break;
      flushed_[end].row = rows;
      rows += more;
    }
    assert(end > first);
    flush_some(std::span(flushed_).subspan(first, end - first), rows, window, stream);
    first = end;
  }
}

void WindowPacker::flush_some(std::span<Flushed> some, size_t rows, const Window& window,
                              Stream& stream) {
  sources_.resize(rows);
  for_sequences(some.size(), traits_.kv_heads(), stream, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) take_rows(some.subspan(i, end - i), window);
  });
  size_t jobs = 0;
  close_up_jobs(some, jobs);
  widen_rows(sources_, traits_.plan().rows, traits_.shape().head_dim, floats_.data(), stream);
  pack(window.packing->format, window.packing->rules, std::span(jobs_).first(jobs), stream);
}

/// Moves the oldest tokens of a sequence's full windows to packed blocks: lists their addresses and
/// the jobs. The sequence is the first of `next`.
void WindowPacker::take_rows(std::span<Flushed> next, const Window& window) {
  Flushed& flushed = next[0];
  const int added = window.packing->flush.rows;
  const std::byte** source = sources_.data() + flushed.row;
  const float* x = floats_.data() + flushed.row * traits_.dim();
  PackJob* job = jobs_.data() + flushed.row;
  const size_t row_bytes = traits_.dim() * sizeof(float);
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    const auto ahead = [&](size_t sequences) -> const KvBuffer& {
      return next[sequences].state->heads[h].buffer(window.store, window.side);
    };
    if (next.size() > 2) ahead(2).prefetch();
    if (next.size() > 1) ahead(1).blocks.prefetch();
    KvBuffer& buffer = flushed.state->heads[h].buffer(window.store, window.side);
    if (buffer.full() < window.packing->flush.trigger) continue;
    flushed.state->buffer_bytes -= buffer.bytes();
    for (int row = 0; row < added; ++row) *source++ = buffer.ring.row(row);
    for_pack_jobs(buffer, x, row_bytes, added, [&](const PackJob& made) { *job++ = made; });
    buffer.ring.pop(added);
    flushed.state->buffer_bytes += buffer.bytes();
    x += static_cast<size_t>(added) * traits_.dim();
  }
  flushed.jobs = static_cast<size_t>(job - jobs_.data()) - flushed.row;
}

/// Makes the jobs of `some` contiguous, since a job may have many tokens, and counts them.
void WindowPacker::close_up_jobs(std::span<const Flushed> some, size_t& jobs) {
  for (const Flushed& flushed : some) {
    if (jobs < flushed.row) {
      std::copy_n(jobs_.data() + flushed.row, flushed.jobs, jobs_.data() + jobs);
    }
    jobs += flushed.jobs;
  }
}

/// Flushes the windows of flushed_ for a quantizer that repacks old tokens or changes the keys'
/// basis.
void WindowPacker::flush_anew(int layer, const Window& window, Stream& stream) {
  const Quantizer& quantizer = *traits_.quantizer(window.store, layer);
  for (size_t first = 0; first < flushed_.size();) {
    first = list_anew(first, quantizer, window);
    gather_anew(quantizer, window, stream);
    pack_anew(quantizer, window, stream);
    for (const Anew& rows : anew_) {
      rows.head->buffer(window.store, window.side).ring.pop(window.packing->flush.rows);
      rows.state->buffer_bytes += buffer_bytes(*rows.head, window);
    }
  }
}

/// Lists the KV heads of flushed_ from `first` on in anew_: of one sequence, and of the next ones
/// with as many tokens, while the workspace lasts. Returns where the next list begins.
size_t WindowPacker::list_anew(size_t first, const Quantizer& quantizer, const Window& window) {
  const bool repacks = quantizer.repacks(window.side);
  const int added = window.packing->flush.rows;
  const size_t most_heads = repacks ? packed_.capacity() : anew_.capacity();
  size_t rows = 0;
  anew_.clear();
  for (; first < flushed_.size(); ++first) {
    LayerState& state = *flushed_[first].state;
    const size_t listed = anew_.size();
    const size_t before = rows;
    bool fits = true;
    for (HeadState& head : state.heads) {
      if (!is_due(head, window)) continue;
      const KvBuffer& buffer = head.buffer(window.store, window.side);
      const int old = repacks ? buffer.packed() : 0;
      const int first_slot =
          window.side == KvSide::kValues && window.store == kRest ? head.packed_values() : 0;
      fits = fits && (listed == 0 || old + added == anew_[0].rows);
      const bool room =
          rows + static_cast<size_t>(old + added) <= anew_rows_ && anew_.size() < most_heads;
      fits = fits && (listed == 0 || room);
      if (!fits) break;
      anew_.push_back(
          {&state, &head, floats_.data() + rows * traits_.dim(), old, old + added, first_slot});
      rows += static_cast<size_t>(old + added);
    }
    if (fits) {
      // KV heads of a layer fill their windows together and learn together.
      assert((anew_.size() - listed) % state.heads.size() == 0);
      continue;
    }
    anew_.resize(listed);
    rows = before;
    break;
  }
  for (const Anew& of : anew_) of.state->buffer_bytes -= buffer_bytes(*of.head, window);
  return first;
}

/// Gathers the tokens of anew_ as floats in the model's basis: old ones first, if they are
/// repacked.
void WindowPacker::gather_anew(const Quantizer& quantizer, const Window& window, Stream& stream) {
  const CachePlan& plan = traits_.plan();
  const bool repacks = quantizer.repacks(window.side);
  const int added = window.packing->flush.rows;
  const size_t fresh_floats = static_cast<size_t>(added) * traits_.dim();
  sources_.clear();
  packed_.clear();
  copies_.clear();
  const float* fresh = fresh_.data();
  for (const Anew& of : anew_) {
    const KvBuffer& buffer = of.head->buffer(window.store, window.side);
    for (int row = 0; row < added; ++row) sources_.push_back(buffer.ring.row(row));
    if (!repacks) continue;
    packed_.push_back({&buffer, &of.head->facts[window.store], of.x});
    float* behind = of.x + static_cast<size_t>(of.old) * traits_.dim();
    copies_.push_back({reinterpret_cast<const std::byte*>(fresh),
                       reinterpret_cast<std::byte*>(behind), fresh_floats * sizeof(float)});
    fresh += fresh_floats;
  }
  widen_rows(sources_, plan.rows, plan.shape.head_dim, repacks ? fresh_.data() : floats_.data(),
             stream);
  if (!repacks) return;
  const KeyBasis* basis = window.side == KvSide::kKeys ? quantizer.key_basis() : nullptr;
  unpacker_.unpack_together(packed_, basis, copies_, stream);
  copy_ranges(copies_, stream);
  for (const Anew& of : anew_) of.head->buffer(window.store, window.side).blocks.clear();
}

void WindowPacker::pack_anew(const Quantizer& quantizer, const Window& window, Stream& stream) {
  if (protects(quantizer, window)) return pack_protected_anew(quantizer, window, stream);
  if (window.side == KvSide::kKeys && quantizer.key_basis() != nullptr) {
    queue_keys_anew(quantizer, window, stream);
  } else {
    for (const Anew& rows : anew_) {
      queue_.add(*window.packing, rows.head->buffer(window.store, window.side), {rows.x},
                 rows.rows);
    }
  }
  queue_.run(stream);
}

/// Packs the values of anew_; protected ones go to their own buffer.
void WindowPacker::pack_protected_anew(const Quantizer& quantizer, const Window& window,
                                       Stream& stream) {
  size_t rows = 0;
  for (const Anew& values : anew_) rows += static_cast<size_t>(values.rows);
  protected_values_.start(rows);
  for (const Anew& values : anew_) {
    protected_values_.add(*values.head, values.x, values.old, values.rows, values.first_slot);
  }
  protected_values_.pack(*window.packing, *quantizer.protected_values(), stream);
}

/// Queues the keys of anew_, transformed to the quantizer's basis.
void WindowPacker::queue_keys_anew(const Quantizer& quantizer, const Window& window,
                                   Stream& stream) {
  learn_anew(quantizer, window, stream);
  size_t rows = 0;
  for (const Anew& keys : anew_) rows += static_cast<size_t>(keys.rows);
  key_basis_.start_keys(rows);
  for (const Anew& keys : anew_) {
    const float* x = key_basis_.add_keys(keys.x, keys.rows, keys.head->facts[window.store]);
    queue_.add(*window.packing, keys.head->stores[window.store].keys, {x}, keys.rows);
  }
  key_basis_.change_keys(*quantizer.key_basis(), stream);
}

/// Learns the basis of keys in anew_, if it is unknown or relearned at every flush.
void WindowPacker::learn_anew(const Quantizer& quantizer, const Window& window, Stream& stream) {
  learning_.clear();
  keys_.clear();
  for (const Anew& keys : anew_) {
    const bool known = !keys.state->heads[0].facts[window.store].key_channels.empty();
    if (known && !quantizer.repacks(KvSide::kKeys)) continue;
    if (learning_.empty() || learning_.back() != keys.state) learning_.push_back(keys.state);
    keys_.push_back(keys.x);
  }
  if (learning_.empty()) return;
  key_basis_.learn(quantizer, learning_, window.store, keys_, anew_.back().rows, stream);
}

}  // namespace kvlm
