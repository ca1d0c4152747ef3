// Upper bound of a sequence's memory for any selection: per layer the buffers for the most
// expensive mix of text and visual tokens, plus rounding.
#include "kvcache/plan/sequence_bounds.h"

#include <algorithm>

#include "kvcache/arena.h"

namespace kvlm {

size_t SequenceBounds::layer_bound(int layer, int64_t text, int64_t visual,
                                   int64_t future) const noexcept {
  const int64_t buffers = shape_->kv_heads;
  size_t bytes = 0;
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    int64_t rows = plan_->split ? text : text + visual;
    if (store == kVisual) rows = plan_->split ? visual : 0;
    for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      const BufferLayout layout = layouts_.buffer(store, side, layer);
      const int64_t more = store == kRest || (plan_->split && !layout.once) ? future : 0;
      if (rows + more == 0) continue;
      const BufferCapacity needed =
          layouts_.capacity(layout, buffers, rows + more, rows + more,
                            layouts_.quantizer(store, layer) != nullptr &&
                                    layouts_.quantizer(store, layer)->per_image()
                                ? std::min(rows, Layouts::kMaxImages)
                                : 1);
      size_t gap = Layouts::kAlignment;  // after each buffer, at most
      if (layout.packing == nullptr) {
        const size_t ring = needed.ring_bytes / static_cast<size_t>(buffers);
        // Layers with other numbers of tokens have rings with other remainders.
        gap = Layouts::aligned_ring(plan_->retention == nullptr ? ring : 1) -
              (plan_->retention == nullptr ? ring : 0);
      }
      bytes += needed.bytes() + static_cast<size_t>(buffers) * gap;
      // Layers with more tokens than others round up more often.
      if (plan_->retention != nullptr && layout.packing != nullptr && !layout.once) {
        bytes += static_cast<size_t>(buffers) * layout.block_bytes(layout.block_rows());
      }
    }
    const BufferLayout apart = layouts_.protected_values(layer);
    if (store == kRest && apart.packing != nullptr) {
      bytes += layouts_.protected_capacity(layer, buffers, text + visual).bytes() +
               static_cast<size_t>(buffers) * Layouts::kAlignment;
    }
  }
  const int64_t peak = text + visual + future;
  return bytes + layouts_.extra_bytes(layer, peak, peak);
}

size_t SequenceBounds::memory_bound(const SequenceSize& size) const noexcept {
  const int64_t layers = shape_->layers;
  const int64_t future = size.max_rows - size.prompt_rows;
  int64_t rows = size.prompt_rows;
  if (plan_->retention != nullptr) {
    const int64_t total =
        plan_->retention->peak_rows_total(shape_->layers, size.prompt_rows, size.max_rows);
    rows = std::min(rows, (total + layers - 1) / layers);
  }
  // The most expensive mixes have as many tokens of one kind as possible.
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
    // Layers may keep different numbers of tokens: most may be in the layer where one costs most.
    most =
        std::max(most, plan_->retention == nullptr ? sum : dearest * static_cast<size_t>(layers));
  }
  return most;
}

size_t SequenceBounds::staging_bytes(const SequenceSize& size) const noexcept {
  return static_cast<size_t>(layouts_.staged_layers()) * 2 * static_cast<size_t>(shape_->kv_heads) *
         static_cast<size_t>(size.prompt_rows) * static_cast<size_t>(shape_->head_dim) *
         dtype_bytes(plan_->rows);
}

Reservation SequenceBounds::reservation(const SequenceSize& size) const noexcept {
  return {Arena::rounded(memory_bound(size)), Arena::rounded(staging_bytes(size))};
}

/// Upper bound of what rounding up to whole blocks adds.
size_t SequenceBounds::block_bound() const noexcept {
  size_t bytes = 0;
  for (int layer = 0; layer < shape_->layers; ++layer) {
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
        const BufferLayout layout = layouts_.buffer(store, side, layer);
        bytes += layout.packing == nullptr || layout.once
                     ? Layouts::kAlignment
                     : layout.block_bytes(layout.block_rows()) + layout.row_bytes();
      }
    }
  }
  return bytes * static_cast<size_t>(shape_->kv_heads);
}

size_t SequenceBounds::session_bytes(int max_rows, int sequences) const noexcept {
  // Which prompt takes most memory depends on its eviction, windows, and number of images with own
  // scales. Between the prompts tried here the bound is linear, up to whole blocks.
  constexpr int kPrompts = 64;
  size_t memory = 0;
  for (int i = 0; i <= kPrompts; ++i) {
    const int at = std::max(1, static_cast<int>(int64_t{max_rows} * i / kPrompts));
    for (const int prompt : {at, std::min(max_rows, static_cast<int>(Layouts::kMaxImages))}) {
      for (const int visual :
           {0, std::min(prompt, static_cast<int>(Layouts::kMaxImages)), prompt}) {
        memory = std::max(memory, memory_bound({prompt, visual, max_rows}));
      }
    }
  }
  return static_cast<size_t>(sequences) * Arena::rounded(memory + block_bound()) +
         Arena::rounded(staging_bytes({max_rows, 0, max_rows}));
}

}  // namespace kvlm
