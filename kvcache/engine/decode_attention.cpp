// One layer of a decode step on the CPU. Each KV head is described to the kernels as segments:
// consecutive slots that are stored alike. KV heads without packed tokens go to RowBatch, the
// others to attend_packed().
#include "kvcache/engine/decode_attention.h"

#include <atomic>
#include <cassert>
#include <utility>

#include "kvcache/engine/for_sequences.h"
#include "kvcache/extensions/protected_values.h"

namespace kvlm {

namespace {

/// Adds a KV head of unpacked tokens, of `dtype`. A ring that wraps is two segments.
void add_full(const PackedHead& packed, const HeadState& head, DType dtype, RowBatch& batch) {
  std::array<KeyValueRows, 2 * kStores> rows;
  size_t count = 0;
  for (const StoreBuffers& buffers : head.stores) {
    const int full = buffers.keys.full();
    const int first = buffers.keys.ring.before_wrap();
    for (const auto& [begin, size] : {std::pair(0, first), std::pair(first, full - first)}) {
      if (size == 0) continue;
      rows[count++] = {buffers.keys.ring.row(begin), buffers.values.ring.row(begin), dtype, size};
    }
  }
  batch.add(packed.q, std::span(rows).first(count), packed.out);
}

}  // namespace

DecodeAttention::DecodeAttention(const CacheTraits& traits, RowAppender& appender,
                                 KeyBasisChange& key_basis, VisualRemap& remap,
                                 DecodeWeights& weights)
    : traits_(traits),
      appender_(appender),
      key_basis_(key_basis),
      remap_(remap),
      decode_weights_(weights),
      weights_(traits.device()) {}

void DecodeAttention::reserve(const Workload& load) {
  const CacheShape& shape = traits_.shape();
  const auto grow = [](auto& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  };
  full_batch_.reserve(shape.q_per_kv(), shape.head_dim, load.heads, 2 * kStores * load.heads,
                      load.rows);
  rows_.reserve(load.sequences);
  grow(packed_, load.heads);
  grow(heads_, load.heads);
  grow(segments_, load.heads * kSegmentsPerHead);
  weights_.grow(traits_.q_per_kv() * load.rows);
}

void DecodeAttention::attend(int layer, const float* q, ConstTensorView k, ConstTensorView v,
                             TensorView out, float scale, Stream& stream) {
  assert(rows_.size() * traits_.kv_heads() <= packed_.size());
  place_weights();
  key_basis_.start_queries(layer);
  const size_t full = describe(layer, q, out.as<float>(), stream);
  store_rows(k, v, stream);
  const size_t packed = attend_full(full, scale, stream);
  key_basis_.change_queries(layer, q, stream);
  attend_packed_heads(packed, scale, stream);
}

/// Assigns each token its part of weights_.
void DecodeAttention::place_weights() noexcept {
  float* weights = weights_.data();
  for (Row& row : rows_) {
    row.weights = weights;
    weights +=
        traits_.kv_heads() * traits_.q_per_kv() * static_cast<size_t>(row.sequence->size.max_rows);
  }
}

/// Tokens in consecutive rows are stored in one call.
void DecodeAttention::store_rows(ConstTensorView k, ConstTensorView v, Stream& stream) {
  for (size_t first = 0; first < rows_.size();) {
    size_t end = first + 1;
    while (end < rows_.size() && rows_[end].row == rows_[end - 1].row + 1) ++end;
    const auto count = static_cast<int64_t>(end - first);
    appender_.store(k.slice(rows_[first].row, count), v.slice(rows_[first].row, count),
                    first * traits_.kv_heads(), stream);
    first = end;
  }
}

/// Describes all KV heads. Returns how many have no packed tokens.
size_t DecodeAttention::describe(int layer, const float* q, float* out, Stream& stream) {
  // On one thread: queries that change basis are appended to a list.
  if (traits_.layer(layer).has_key_basis) return describe_rows(0, rows_.size(), layer, q, out);
  std::atomic<size_t> full{0};
  for_sequences(rows_.size(), traits_.kv_heads(), stream, [&](size_t begin, size_t end) {
    full += describe_rows(begin, end, layer, q, out);
  });
  return full;
}

/// Appends tokens [first, last) and describes their KV heads. Returns how many have no packed
/// tokens.
size_t DecodeAttention::describe_rows(size_t first, size_t last, int layer, const float* q,
                                      float* out) {
  const size_t row_elements = static_cast<size_t>(traits_.shape().q_heads) * traits_.dim();
  const size_t head_elements = traits_.q_per_kv() * traits_.dim();
  SlotSegment* segments = segments_.data() + first * traits_.kv_heads() * kSegmentsPerHead;
  size_t full = 0;
  for (size_t i = first; i < last; ++i) {
    const Row& row = rows_[i];
    LayerState& state = row.sequence->layers[static_cast<size_t>(layer)];
    appender_.append(state, layer, kTextRow, i * traits_.kv_heads());
    const size_t most = traits_.q_per_kv() * static_cast<size_t>(row.sequence->size.max_rows);
    for (size_t h = 0; h < traits_.kv_heads(); ++h) {
      prefetch(i, last, layer, h);
      const size_t index = i * traits_.kv_heads() + h;
      PackedHead& packed = packed_[index];
      const size_t offset = static_cast<size_t>(row.row) * row_elements + h * head_elements;
      packed.q = q + offset;
      packed.out = out + offset;
      packed.weights = row.weights + h * most;
      segments += describe_head(state.heads[h], layer, index, segments);
      if (packed.slots == 0) ++full;
    }
  }
  return full;
}

/// Describes KV head number `index` for attend_packed(), with 0 slots if it has no packed tokens.
/// Returns the number of segments written to `memory`.
size_t DecodeAttention::describe_head(HeadState& head, int layer, size_t index,
                                      SlotSegment* memory) {
  PackedHead& packed = packed_[index];
  heads_[index] = &head;
  packed.slots = 0;
  packed.guarded_remaps = 0;
  packed.weights_wanted = head.weights != nullptr;
  if (is_full(head, layer)) return 0;
  SegmentList segments(memory);
  for (size_t store = traits_.first_store(); store < kStores; ++store) {
    packed.slots += head.stores[store].keys.slots();
    add_key_segments(head, store, layer, index, segments);
  }
  packed.keys = segments.from(0);
  add_value_segments(head, layer, segments);
  assert(static_cast<size_t>(segments.size()) <= kSegmentsPerHead);
  packed.values = segments.from(static_cast<int>(packed.keys.size()));
  packed.remaps = remap_.describe(index, head.stores[kVisual], layer, /*places=*/false);
  return static_cast<size_t>(segments.size());
}

/// Adds the keys of a store, with queries in their basis.
void DecodeAttention::add_key_segments(const HeadState& head, size_t store, int layer, size_t index,
                                       SegmentList& segments) {
  const KvBuffer& keys = head.stores[store].keys;
  const int first = segments.size();
  keys.blocks.add_to(segments);
  keys.ring.add_to(segments, keys.layout().dtype);
  if (!traits_.layer(layer).has_key_basis || keys.packed() == 0) return;
  const float* q = key_basis_.add_queries(layer, store, index, packed_[index].q, head.facts[store]);
  for (int i = first; i < segments.size() && q != nullptr; ++i) {
    if (segments[i].format != nullptr) segments[i].q = q;
  }
}

void DecodeAttention::add_value_segments(const HeadState& head, int layer, SegmentList& segments) {
  for (size_t store = traits_.first_store(); store < kStores; ++store) {
    const KvBuffer& values = head.stores[store].values;
    if (store == kRest && traits_.layer(layer).protects) {
      ProtectedValues::add_packed(head, segments);
    } else {
      values.blocks.add_to(segments);
    }
    values.ring.add_to(segments, values.layout().dtype);
  }
}

/// Nothing is packed, and no weights are needed. Skips buffers that this layer never uses: each
/// read is a cache miss.
bool DecodeAttention::is_full(const HeadState& head, int layer) const noexcept {
  return head.weights == nullptr &&
         (!traits_.plan().split || head.stores[kVisual].full_alike(/*protects=*/false)) &&
         head.stores[kRest].full_alike(traits_.layer(layer).protects);
}

/// Prefetches the KV head of the next few tokens before `last`. Each level of pointers is fetched
/// one token ahead of the next level.
void DecodeAttention::prefetch(size_t i, size_t last, int layer, size_t head) const noexcept {
  const auto state = [&](size_t ahead) -> const LayerState* {
    if (i + ahead >= last) return nullptr;
    return &rows_[i + ahead].sequence->layers[static_cast<size_t>(layer)];
  };
  const auto for_buffers = [&](const LayerState& of, const auto& body) {
    for (size_t store = traits_.first_store(); store < kStores; ++store) {
      body(of.heads[head].stores[store].keys);
      body(of.heads[head].stores[store].values);
    }
  };
  if (const LayerState* far = state(3)) __builtin_prefetch(far);
  if (const LayerState* next = state(2)) {
    for_buffers(*next, [](const KvBuffer& buffer) { buffer.prefetch(); });
  }
  if (const LayerState* near = state(1)) {
    for_buffers(*near, [](const KvBuffer& buffer) { buffer.blocks.prefetch(); });
  }
}

/// Computes attention of the `full` KV heads without packed tokens. Moves the others to the front
/// of packed_ and returns their number.
size_t DecodeAttention::attend_full(size_t full, float scale, Stream& stream) {
  const size_t count = rows_.size() * traits_.kv_heads();
  if (full == 0) return count;
  full_batch_.start(traits_.shape().q_per_kv(), traits_.shape().head_dim);
  size_t packed = 0;
  for (size_t i = 0; i < count; ++i) {
    if (packed_[i].slots == 0) {
      add_full(packed_[i], *heads_[i], traits_.plan().rows, full_batch_);
      continue;
    }
    heads_[packed] = heads_[i];
    packed_[packed++] = packed_[i];
  }
  full_batch_.attend(scale, stream);
  return packed;
}

/// Computes attention of the first `count` KV heads of packed_.
void DecodeAttention::attend_packed_heads(size_t count, float scale, Stream& stream) {
  if (count == 0) return;
  const std::span<PackedHead> packed = std::span(packed_).first(count);
  attend_packed(packed, traits_.shape().q_per_kv(), traits_.shape().head_dim, scale, stream);
  for (const PackedHead& head : packed) clamped_ += head.guarded_remaps;
  decode_weights_.add(packed, heads_, stream);
}

}  // namespace kvlm
