#include "kvcache/layouts.h"

#include <algorithm>

#include "kvcache/arena.h"

namespace kvlm {

Plane::Layout Layouts::rows_layout() const noexcept {
  Plane::Layout layout;
  layout.dtype = plan_->rows;
  layout.head_dim = shape_->head_dim;
  layout.evicts = plan_->retention != nullptr;
  return layout;
}

Plane::Layout Layouts::plane(size_t store, KvSide side, int layer) const noexcept {
  Plane::Layout layout = rows_layout();
  if (const Quantizer* q = quantizer(store, layer)) {
    layout.once = q->visual_only();
    if (!q->packs(side)) return layout;
    layout.packing = &q->packing(side, layer);
    layout.shared = owner(side, layer) != layer;
    layout.writes = writer(side, layer) == layer;
  }
  return layout;
}

Plane::Layout Layouts::protected_values(int layer) const noexcept {
  Plane::Layout layout = rows_layout();
  const Quantizer* q = quantizer(kRest, layer);
  layout.packing = q == nullptr ? nullptr : q->protected_values();
  return layout;
}

int Layouts::owner(KvSide side, int layer) const noexcept {
  if (!plan_->share.any()) return layer;
  const std::vector<int>& owners =
      side == KvSide::kKeys ? plan_->share.key_owner : plan_->share.value_owner;
  return owners[static_cast<size_t>(layer)];
}

int Layouts::writer(KvSide side, int layer) const noexcept {
  const std::vector<int>& writers =
      side == KvSide::kKeys ? plan_->share.key_writer : plan_->share.value_writer;
  return writers.empty() ? owner(side, layer) : writers[static_cast<size_t>(layer)];
}

bool Layouts::joint() const noexcept {
  return plan_->retention != nullptr && (plan_->retention->joint() || !plan_->pairs.empty());
}

bool Layouts::per_image() const noexcept {
  return std::any_of(plan_->packers.begin(), plan_->packers.end(), [](const auto& packer) {
    return packer.quantizer != nullptr && packer.quantizer->per_image();
  });
}

PlaneCapacity Layouts::capacity(const Plane::Layout& layout, int64_t planes, int64_t ever,
                                int64_t peak, int64_t spans) const noexcept {
  if (layout.once && layout.packing != nullptr) {
    return Plane::capacity(layout, planes, planes * ever, spans, 0);
  }
  int64_t window = peak;
  if (layout.packing != nullptr) {
    const FlushRule& rule = layout.packing->flush;
    window = std::min<int64_t>(peak, std::max(rule.hold + rule.prompt_unit, rule.trigger));
  }
  return Plane::capacity(layout, planes, planes * ever, spans, planes * window);
}

PlaneCapacity Layouts::protected_capacity(int layer, int64_t planes, int64_t ever) const noexcept {
  const Plane::Layout apart = protected_values(layer);
  const FlushRule& rule = quantizer(kRest, layer)->packing(KvSide::kValues, layer).flush;
  // Each flush that reaches rows of the prompt may leave a block short.
  const int flushes = (rule.hold + rule.prompt_unit + rule.rows - 1) / rule.rows;
  const int64_t rows = ever + int64_t{flushes} * apart.block_rows();
  return Plane::capacity(apart, planes, planes * rows, 1, 0);
}

size_t Layouts::protection_bytes(int64_t ever) const noexcept {
  const int bitmaps = per_head() ? shape_->kv_heads : 1;
  return static_cast<size_t>(bitmaps) * aligned(static_cast<size_t>(ever) / 8 + 8);
}

size_t Layouts::weight_bytes(int64_t peak) const noexcept {
  return static_cast<size_t>(shape_->kv_heads) * aligned(sizeof(float) * static_cast<size_t>(peak));
}

size_t Layouts::sink_bytes() const noexcept {
  const int sinks = plan_->retention == nullptr ? 0 : plan_->retention->most_sinks();
  return aligned(sizeof(float) * static_cast<size_t>(shape_->kv_heads) *
                 static_cast<size_t>(sinks) * static_cast<size_t>(shape_->head_dim));
}

size_t Layouts::extra_bytes(int layer, int64_t peak, int64_t ever) const noexcept {
  size_t bytes = 0;
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    if (quantizer(store, layer) != nullptr) {
      bytes += aligned(quantizer(store, layer)->facts_bytes(shape_->kv_heads));
    }
  }
  if (protected_values(layer).packing != nullptr) bytes += protection_bytes(ever);
  if (keeps_weights()) bytes += weight_bytes(peak);
  return bytes + sink_bytes();
}

size_t Layouts::layer_bound(int layer, int64_t text, int64_t visual,
                            int64_t future) const noexcept {
  const int64_t planes = shape_->kv_heads;
  size_t bytes = 0;
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    int64_t rows = plan_->split ? text : text + visual;
    if (store == kVisual) rows = plan_->split ? visual : 0;
    for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      const Plane::Layout layout = plane(store, side, layer);
      const int64_t more = store == kRest || (plan_->split && !layout.once) ? future : 0;
      if (rows + more == 0) continue;
      const PlaneCapacity needed =
          capacity(layout, planes, rows + more, rows + more,
                   quantizer(store, layer) != nullptr && quantizer(store, layer)->per_image()
                       ? std::min(rows, kMaxImages)
                       : 1);
      size_t gap = kAlignment;  // behind each plane, at most
      if (layout.packing == nullptr) {
        const size_t ring = needed.ring_bytes / static_cast<size_t>(planes);
        // Rings of layers that keep other numbers of rows end elsewhere.
        gap = aligned_ring(plan_->retention == nullptr ? ring : 1) -
              (plan_->retention == nullptr ? ring : 0);
      }
      bytes += needed.bytes() + static_cast<size_t>(planes) * gap;
      // Layers that keep more rows than others round up more often.
      if (plan_->retention != nullptr && layout.packing != nullptr && !layout.once) {
        bytes += static_cast<size_t>(planes) * layout.block_bytes(layout.block_rows());
      }
    }
    const Plane::Layout apart = protected_values(layer);
    if (store == kRest && apart.packing != nullptr) {
      bytes += protected_capacity(layer, planes, text + visual).bytes() +
               static_cast<size_t>(planes) * kAlignment;
    }
  }
  const int64_t peak = text + visual + future;
  return bytes + extra_bytes(layer, peak, peak);
}

size_t Layouts::memory_bound(const SequenceSize& size) const noexcept {
  const int64_t layers = shape_->layers;
  const int64_t future = size.max_rows - size.prompt_rows;
  int64_t rows = size.prompt_rows;
  if (plan_->retention != nullptr) {
    const int64_t total =
        plan_->retention->peak_rows_total(shape_->layers, size.prompt_rows, size.max_rows);
    rows = std::min(rows, (total + layers - 1) / layers);
  }
  // The costliest mixes of text and visual rows have as many of one kind as there are.
  const int64_t visual = std::min<int64_t>(rows, size.visual_rows);
  const int64_t text = std::min<int64_t>(rows, size.prompt_rows - size.visual_rows);
  size_t most = 0;
  for (const auto& [texts, visuals] :
       {std::pair(rows - visual, visual), std::pair(text, rows - text)}) {
    size_t sum = 0;
    size_t dearest = 0;
    for (int layer = 0; layer < shape_->layers; ++layer) {
      const size_t bytes = layer_bound(layer, texts, visuals, future);
      sum += bytes;
      dearest = std::max(dearest, bytes);
    }
    // Where layers keep different numbers of rows, most may be where a row costs most.
    most =
        std::max(most, plan_->retention == nullptr ? sum : dearest * static_cast<size_t>(layers));
  }
  return most;
}

int Layouts::staged_layers() const noexcept {
  if (!stages()) return 0;
  return joint() ? shape_->layers : std::min(kPackedTogether, shape_->layers);
}

size_t Layouts::staging_bytes(const SequenceSize& size) const noexcept {
  return static_cast<size_t>(staged_layers()) * 2 * static_cast<size_t>(shape_->kv_heads) *
         static_cast<size_t>(size.prompt_rows) * rows_layout().row_bytes();
}

Reservation Layouts::reservation(const SequenceSize& size) const noexcept {
  return {Arena::rounded(memory_bound(size)), Arena::rounded(staging_bytes(size))};
}

/// What rounding up to whole blocks comes to, at most.
size_t Layouts::block_bound() const noexcept {
  size_t bytes = 0;
  for (int layer = 0; layer < shape_->layers; ++layer) {
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
        const Plane::Layout layout = plane(store, side, layer);
        bytes += layout.packing == nullptr || layout.once
                     ? kAlignment
                     : layout.block_bytes(layout.block_rows()) + layout.row_bytes();
      }
    }
  }
  return bytes * static_cast<size_t>(shape_->kv_heads);
}

size_t Layouts::session_bytes(int max_rows, int sequences) const noexcept {
  // Which prompt takes most depends on what is dropped of it, on windows, on how many pictures have
  // scales of their own. Between these prompts bounds are linear, but for whole blocks.
  constexpr int kPrompts = 64;
  size_t memory = 0;
  for (int i = 0; i <= kPrompts; ++i) {
    const int at = std::max(1, static_cast<int>(int64_t{max_rows} * i / kPrompts));
    for (const int prompt : {at, std::min(max_rows, static_cast<int>(kMaxImages))}) {
      for (const int visual : {0, std::min(prompt, static_cast<int>(kMaxImages)), prompt}) {
        memory = std::max(memory, memory_bound({prompt, visual, max_rows}));
      }
    }
  }
  return static_cast<size_t>(sequences) * Arena::rounded(memory + block_bound()) +
         Arena::rounded(staging_bytes({max_rows, 0, max_rows}));
}

}  // namespace kvlm
