#include "kvcache/plan/layouts.h"

#include <algorithm>

namespace kvlm {

BufferLayout Layouts::rows_layout() const noexcept {
  BufferLayout layout;
  layout.dtype = plan_->rows;
  layout.head_dim = shape_->head_dim;
  layout.evicts = plan_->retention != nullptr;
  return layout;
}

BufferLayout Layouts::buffer(size_t store, KvSide side, int layer) const noexcept {
  BufferLayout layout = rows_layout();
  if (const Quantizer* q = quantizer(store, layer)) {
    layout.once = q->visual_only();
    if (!q->packs(side)) return layout;
    layout.packing = &q->packing(side, layer);
    layout.shared = owner(side, layer) != layer;
    layout.writes = writer(side, layer) == layer || layout.packing->rules[0].merge != 0;
  }
  return layout;
}

BufferLayout Layouts::protected_values(int layer) const noexcept {
  BufferLayout layout = rows_layout();
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

BufferCapacity Layouts::capacity(const BufferLayout& layout, int64_t buffers, int64_t ever,
                                 int64_t peak, int64_t spans) const noexcept {
  if (layout.once && layout.packing != nullptr) {
    return layout.capacity(buffers, buffers * ever, spans, 0);
  }
  int64_t window = peak;
  if (layout.packing != nullptr) {
    const FlushRule& rule = layout.packing->flush;
    window = std::min<int64_t>(peak, std::max(rule.hold + rule.prompt_unit, rule.trigger));
  }
  return layout.capacity(buffers, buffers * ever, spans, buffers * window);
}

BufferCapacity Layouts::protected_capacity(int layer, int64_t buffers,
                                           int64_t ever) const noexcept {
  const BufferLayout apart = protected_values(layer);
  const FlushRule& rule = quantizer(kRest, layer)->packing(KvSide::kValues, layer).flush;
  // Each flush of prompt tokens may leave a short block.
  const int flushes = (rule.hold + rule.prompt_unit + rule.rows - 1) / rule.rows;
  const int64_t rows = ever + int64_t{flushes} * apart.block_rows();
  return apart.capacity(buffers, buffers * rows, 1, 0);
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

int Layouts::staged_layers() const noexcept {
  if (!stages()) return 0;
  return joint() ? shape_->layers : std::min(kPackedTogether, shape_->layers);
}

}  // namespace kvlm
