// Windows that are full, packed layer by layer. Most quantizers pack new rows only, so the rows of
// many sequences go in one call (flush_together). A quantizer that packs old rows again, or keys in
// another basis, takes as many sequences together as there is room for their rows (flush_anew).
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

/// Values of kRest that can be protected.
bool protects(const Quantizer& quantizer, const Window& window) noexcept {
  return window.store == kRest && window.side == KvSide::kValues &&
         quantizer.protected_values() != nullptr;
}

/// Bytes of the planes that a window flushes to.
size_t plane_bytes(const HeadState& head, const Window& window) noexcept {
  const StorePlanes& planes = head.stores[window.store];
  return planes.plane(window.side).bytes() +
         (window.side == KvSide::kValues ? planes.protected_values.bytes() : 0);
}

bool is_due(const HeadState& head, const Window& window) noexcept {
  return head.plane(window.store, window.side).full() >= window.packing->flush.trigger;
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
    } catch (const Error&) {  // where memory is short, one sequence after the other
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

/// Room for `rows` rows of `sequences` sequences that are packed anew together.
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

/// Packs the oldest rows of every plane of flushed_ whose window is full, as many at once as there
/// is room for.
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

/// Moves the oldest rows of full windows of the first of `next` to packed blocks: lists the rows
/// and the jobs that will do it.
void WindowPacker::take_rows(std::span<Flushed> next, const Window& window) {
  Flushed& flushed = next[0];
  const int added = window.packing->flush.rows;
  const std::byte** source = sources_.data() + flushed.row;
  const float* x = floats_.data() + flushed.row * traits_.dim();
  PackJob* job = jobs_.data() + flushed.row;
  const size_t row_bytes = traits_.dim() * sizeof(float);
  for (size_t h = 0; h < traits_.kv_heads(); ++h) {
    const auto ahead = [&](size_t sequences) -> const Plane& {
      return next[sequences].state->heads[h].plane(window.store, window.side);
    };
    if (next.size() > 2) ahead(2).prefetch();
    if (next.size() > 1) ahead(1).blocks.prefetch();
    Plane& plane = flushed.state->heads[h].plane(window.store, window.side);
    if (plane.full() < window.packing->flush.trigger) continue;
    flushed.state->plane_bytes -= plane.bytes();
    for (int row = 0; row < added; ++row) *source++ = plane.ring.row(row);
    for_pack_jobs(plane, x, row_bytes, added, [&](const PackJob& made) { *job++ = made; });
    plane.ring.pop(added);
    flushed.state->plane_bytes += plane.bytes();
    x += static_cast<size_t>(added) * traits_.dim();
  }
  flushed.jobs = static_cast<size_t>(job - jobs_.data()) - flushed.row;
}

/// Moves the jobs of `some` side by side, as a job may be many rows, and counts them.
void WindowPacker::close_up_jobs(std::span<const Flushed> some, size_t& jobs) {
  for (const Flushed& flushed : some) {
    if (jobs < flushed.row) {
      std::copy_n(jobs_.data() + flushed.row, flushed.jobs, jobs_.data() + jobs);
    }
    jobs += flushed.jobs;
  }
}

/// Flushes the windows of flushed_ for a quantizer that packs old rows again or changes the basis
/// of keys.
void WindowPacker::flush_anew(int layer, const Window& window, Stream& stream) {
  const Quantizer& quantizer = *traits_.quantizer(window.store, layer);
  for (size_t first = 0; first < flushed_.size();) {
    first = list_anew(first, quantizer, window);
    gather_anew(quantizer, window, stream);
    pack_anew(quantizer, window, stream);
    for (const Anew& rows : anew_) {
      rows.head->plane(window.store, window.side).ring.pop(window.packing->flush.rows);
      rows.state->plane_bytes += plane_bytes(*rows.head, window);
    }
  }
}

/// Lists in anew_ KV heads of flushed_ from number `first` on: of one sequence, and of those behind
/// it whose heads have as many rows, as far as there is room. Returns where the next list begins.
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
      const Plane& plane = head.plane(window.store, window.side);
      const int old = repacks ? plane.packed() : 0;
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
      // KV heads of a layer fill their windows together, and learn together.
      assert((anew_.size() - listed) % state.heads.size() == 0);
      continue;
    }
    anew_.resize(listed);
    rows = before;
    break;
  }
  for (const Anew& of : anew_) of.state->plane_bytes -= plane_bytes(*of.head, window);
  return first;
}

/// Gathers the rows of anew_ as floats in the model's basis: those that were packed first if they
/// are packed again.
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
    const Plane& plane = of.head->plane(window.store, window.side);
    for (int row = 0; row < added; ++row) sources_.push_back(plane.ring.row(row));
    if (!repacks) continue;
    packed_.push_back({&plane, &of.head->facts[window.store], of.x});
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
  for (const Anew& of : anew_) of.head->plane(window.store, window.side).blocks.clear();
}

void WindowPacker::pack_anew(const Quantizer& quantizer, const Window& window, Stream& stream) {
  if (protects(quantizer, window)) return pack_protected_anew(quantizer, window, stream);
  if (window.side == KvSide::kKeys && quantizer.key_basis() != nullptr) {
    queue_keys_anew(quantizer, window, stream);
  } else {
    for (const Anew& rows : anew_) {
      queue_.add(*window.packing, rows.head->plane(window.store, window.side), {rows.x}, rows.rows);
    }
  }
  queue_.run(stream);
}

/// Packs the values of anew_, those of protected rows apart.
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

/// Queues the keys of anew_ in the quantizer's basis.
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

/// Learns the basis of the keys of anew_ from them, where it was not learned before or is anew.
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
