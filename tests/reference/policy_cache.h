#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/merge_rows.h"
#include "kernels/pack.h"
#include "kvcache/policy_cache.h"
#include "tests/reference/basis.h"
#include "tests/reference/row_cache.h"

namespace kvlm::reference {

/// One sequence of a cache of policies, the slow and plain way: every slot is a list entry with its
/// key and value as attention sees them, dequantized; attention is in double. Shares with the cache
/// the policies themselves (quantizers, retention) and the packing of one block, which have tests
/// of their own; nothing of how rows, blocks, bitmaps, rings and bytes are kept.
class PolicySequence {
 public:
  PolicySequence(const CacheParts& parts, const CacheShape& shape, Stream& stream)
      : parts_(&parts), shape_(shape), stream_(&stream) {
    layers_.resize(static_cast<size_t>(shape.layers));
    for (Layer& layer : layers_) layer.lanes.resize(kv_heads());
  }

  size_t rows() const noexcept { return rows_; }
  /// Slots of a lane.
  size_t slots(int layer, size_t head) const {
    return layers_[static_cast<size_t>(layer)].lanes[head].slots.size();
  }
  /// Tokens of a lane's slots.
  std::vector<int> tokens(int layer, size_t head) const {
    std::vector<int> all;
    for (const Slot& slot : layers_[static_cast<size_t>(layer)].lanes[head].slots) {
      all.push_back(slot.token);
    }
    return all;
  }

  /// A pass over one layer; layers in order, then end(). Returns (rows, q_heads * head_dim).
  std::vector<std::vector<double>> attend(int layer, const float* q, const float* k, const float* v,
                                          size_t rows, bool prompt,
                                          const std::vector<int16_t>& modality, double scale) {
    Layer& state = layers_[static_cast<size_t>(layer)];
    std::vector<std::vector<double>> out(rows);
    added_ = rows;
    if (prompt && !prompted_) {
      modality_ = modality;
      state.importance.assign(kv_heads() * rows, 0.0);
      std::vector<std::vector<double>> weights;
      const auto [first, last] = summed_rows(rows, modality);
      summed_ = {static_cast<int32_t>(first), static_cast<int32_t>(last)};
      double small = 0;
      double entries = 0;
      for (size_t r = 0; r < rows; ++r) {
        for (size_t head = 0; head < q_heads(); ++head) {
          std::vector<Slot> seen;
          for (size_t j = 0; j <= r; ++j) seen.push_back(given(k, v, j, head / q_per_kv()));
          std::vector<double> weight;
          append(out[r], attend_slots(q + (r * q_heads() + head) * dim(), seen, scale, layer, false,
                                      weight));
          if (r < first || r >= last) continue;
          const double top = *std::max_element(weight.begin(), weight.end());
          for (size_t j = 0; j <= r; ++j) {
            state.importance[head / q_per_kv() * rows + j] +=
                weight[j] / static_cast<double>(q_per_kv());
            small += weight[j] < 0.01 * top ? 1 : 0;
            entries += 1;
          }
        }
      }
      state.sparsity = entries > 0 ? small / entries : 0;
      for (size_t head = 0; head < kv_heads(); ++head) {
        for (size_t j = 0; j < rows; ++j) {
          Slot slot = given(k, v, j, head);
          for (float& x : slot.k) x = stored(x, parts_->rows);
          for (float& x : slot.v) x = stored(x, parts_->rows);
          slot.token = static_cast<int>(j);
          slot.visual = modality[j] != kTextRow;
          slot.image = modality[j];
          state.lanes[head].slots.push_back(slot);
        }
      }
      return out;
    }
    std::vector<std::vector<double>> sums(kv_heads());  // of the pass's weights, new rows last
    if (prompt) {
      // Exact over what was stored before the pass and the rows of the pass so far.
      for (size_t head = 0; head < kv_heads(); ++head) {
        sums[head].resize(state.lanes[head].slots.size() + rows);
      }
      for (size_t r = 0; r < rows; ++r) {
        for (size_t head = 0; head < q_heads(); ++head) {
          std::vector<Slot> seen = state.lanes[head / q_per_kv()].slots;
          const size_t past = seen.size();
          for (size_t j = 0; j <= r; ++j) seen.push_back(given(k, v, j, head / q_per_kv()));
          std::vector<double> weight;
          append(out[r], attend_slots(q + (r * q_heads() + head) * dim(), seen, scale, layer, false,
                                      weight));
          for (size_t j = 0; j < past + r + 1; ++j) {
            sums[head / q_per_kv()][j] += weight[j] / static_cast<double>(q_per_kv());
          }
        }
      }
      for (size_t head = 0; head < kv_heads(); ++head) {
        std::vector<Slot>& slots = state.lanes[head].slots;
        for (size_t j = 0; j < slots.size(); ++j) slots[j].weight += sums[head][j];
      }
    }
    for (size_t r = 0; r < rows; ++r) {
      const bool visual = prompt && modality[r] != kTextRow;
      for (size_t head = 0; head < kv_heads(); ++head) {
        Slot slot = given(k, v, r, head);
        for (float& x : slot.k) x = stored(x, parts_->rows);
        for (float& x : slot.v) x = stored(x, parts_->rows);
        slot.token = static_cast<int>(rows_ + r);
        slot.visual = visual;
        if (prompt) slot.weight = sums[head][sums[head].size() - rows + r];
        state.lanes[head].slots.push_back(slot);
      }
      if (!prompt) {
        for (size_t head = 0; head < q_heads(); ++head) {
          Lane& lane = state.lanes[head / q_per_kv()];
          std::vector<double> weight;
          append(out[r], attend_slots(q + (r * q_heads() + head) * dim(), lane.slots, scale, layer,
                                      true, weight));
          for (size_t j = 0; j < weight.size(); ++j) {
            lane.slots[j].weight += weight[j] / static_cast<double>(q_per_kv());
          }
        }
      }
      if (prompt) {
        flush_full(layer);
        evict(layer, static_cast<int>(rows_ + r + 1) - prompt_rows_);
      }
    }
    return out;
  }

  void end(bool prompt) {
    if (!prompted_) {
      finish();
      prompted_ = true;
      prompt_rows_ = static_cast<int>(added_);
    } else if (!prompt) {
      const int step = static_cast<int>(rows_) + 1 - prompt_rows_;
      for (int layer = 0; layer < shape_.layers; ++layer) flush_full(layer);
      for (int layer = 0; layer < shape_.layers; ++layer) evict(layer, step);
    }
    rows_ += added_;
  }

  /// The stored bytes of everything, counted slot by slot and block by block (specs 11).
  size_t bytes() const {
    size_t sum = 0;
    for (int l = 0; l < shape_.layers; ++l) {
      const Layer& layer = layers_[static_cast<size_t>(l)];
      for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
        const Quantizer* q = quantizer(store, l);
        if (q != nullptr && layer.learned[store]) sum += q->facts_bytes(shape_.kv_heads);
      }
      const bool per_head = parts_->retention != nullptr && parts_->retention->per_head();
      for (size_t head = 0; head < kv_heads(); ++head) {
        const Lane& lane = layer.lanes[head];
        size_t bits = 0;
        for (const Slot& slot : lane.slots) {
          const size_t full = dim() * dtype_bytes(parts_->rows);
          if (slot.k_block < 0) sum += full;
          if (slot.v_block < 0) sum += full;
          if (slot.v_block >= 0 && (!parts_->split || !slot.visual)) ++bits;
        }
        for (const Block& block : lane.blocks) {
          if (block.live == 0) continue;
          const PackedFormat& format = block.plan->format;
          sum += format.meta_bytes(block.rows);
          if (!block.shared) sum += static_cast<size_t>(block.rows) * format.row_bytes();
        }
        if (parts_->retention != nullptr && parts_->retention->needs().decode_weights) {
          sum += 4 * lane.slots.size();
        }
        if (quantizer(kRest, l) != nullptr && quantizer(kRest, l)->protected_values() != nullptr &&
            (head == 0 || per_head)) {
          sum += (bits + 7) / 8;
        }
      }
    }
    return sum;
  }

 private:
  struct Slot {
    std::vector<float> k, v;  // as attention sees them
    int token = 0;
    bool visual = false;
    int image = -1;
    int k_block = -1;  // of the lane's blocks; -1: full precision
    int v_block = -1;
    double weight = 0;
    std::vector<std::byte> k_codes, v_codes;
  };
  struct Block {
    const PartPlan* plan;
    int rows;
    int live;
    bool shared;
    bool open;  // tokens may still be added (scales per token)
    Part part;
    size_t store;
    bool apart;
  };
  struct Lane {
    std::vector<Slot> slots;  // in the order of the tokens
    std::vector<Block> blocks;
    std::array<LaneFacts, kStores> facts;
  };
  struct Layer {
    std::vector<Lane> lanes;
    std::vector<double> importance;
    double sparsity = 0;
    int kept = 0;
    double forget = 0;
    std::array<bool, 2> learned{};
    int turned = 0;
    int sinks = 0;
    int dropped = -1;
    std::vector<std::vector<std::vector<float>>> sink_keys;
  };

  size_t kv_heads() const { return static_cast<size_t>(shape_.kv_heads); }
  size_t q_heads() const { return static_cast<size_t>(shape_.q_heads); }
  size_t q_per_kv() const { return static_cast<size_t>(shape_.q_per_kv()); }
  size_t dim() const { return static_cast<size_t>(shape_.head_dim); }
  const Quantizer* quantizer(size_t store, int layer) const {
    return parts_->packers[store][static_cast<size_t>(layer)];
  }
  size_t store_of(const Slot& slot) const { return parts_->split && slot.visual ? kVisual : kRest; }
  Slot given(const float* k, const float* v, size_t row, size_t head) const {
    Slot slot;
    const size_t at = (row * kv_heads() + head) * dim();
    slot.k.assign(k + at, k + at + dim());
    slot.v.assign(v + at, v + at + dim());
    return slot;
  }
  static void append(std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  }

  std::pair<size_t, size_t> summed_rows(size_t rows, const std::vector<int16_t>& modality) const {
    if (parts_->retention == nullptr) return {0, 0};
    const ImportanceNeeds needs = parts_->retention->needs();
    if (needs.rows == ImportanceNeeds::Rows::kNone) return {0, 0};
    size_t first = 0;
    if (needs.rows == ImportanceNeeds::Rows::kLast) {
      const auto window = static_cast<size_t>(needs.last_rows);
      first = rows > window ? rows - window : 0;
    } else if (needs.rows == ImportanceNeeds::Rows::kPostVision) {
      for (size_t j = 0; j < rows; ++j) {
        if (modality[j] != kTextRow) first = j + 1;
      }
      if (first == 0 || first == rows) first = rows > 32 ? rows - 32 : 0;
    }
    return {first, rows};
  }

  std::vector<double> attend_slots(const float* q, const std::vector<Slot>& slots, double scale,
                                   int layer, bool remapped, std::vector<double>& weight) const {
    weight.assign(slots.size(), 0);
    for (size_t j = 0; j < slots.size(); ++j) {
      for (size_t d = 0; d < dim(); ++d) {
        weight[j] += scale * static_cast<double>(q[d]) * static_cast<double>(slots[j].k[d]);
      }
    }
    const RemapRule* rule = remapped && quantizer(kVisual, layer) != nullptr
                                ? quantizer(kVisual, layer)->remap(layer)
                                : nullptr;
    if (rule != nullptr) {
      const int images = quantizer(kVisual, layer)->per_image() ? 64 : 1;
      for (int image = 0; image < images; ++image) {
        double lo = std::numeric_limits<double>::infinity();
        double hi = -lo;
        const auto member = [&](size_t j) {
          return slots[j].k_block >= 0 && slots[j].visual &&
                 (images == 1 || slots[j].image == image);
        };
        for (size_t j = 0; j < slots.size(); ++j) {
          if (!member(j)) continue;
          lo = std::min(lo, weight[j]);
          hi = std::max(hi, weight[j]);
        }
        double slope = hi > lo ? (hi - lo + static_cast<double>(rule->tau_low) -
                                  static_cast<double>(rule->tau_high)) /
                                     (hi - lo)
                               : 0;
        if (rule->guarded) slope = std::max(slope, 0.0);
        for (size_t j = 0; j < slots.size(); ++j) {
          if (member(j)) {
            weight[j] = slope * (weight[j] - lo) + lo - static_cast<double>(rule->tau_low);
          }
        }
      }
    }
    const double top = *std::max_element(weight.begin(), weight.end());
    double sum = 0;
    for (double& w : weight) sum += w = std::exp(w - top);
    std::vector<double> out(dim());
    for (size_t j = 0; j < slots.size(); ++j) {
      weight[j] /= sum;
      for (size_t d = 0; d < dim(); ++d) out[d] += weight[j] * static_cast<double>(slots[j].v[d]);
    }
    return out;
  }

  void finish() {
    const auto n = static_cast<int>(added_);
    std::vector<LayerSelection> selections;
    if (parts_->retention != nullptr) {
      PromptView view;
      view.shape = &shape_;
      view.rows = n;
      view.modality = modality_;
      view.summed_rows = summed_;
      const bool joint = parts_->retention->joint() || !parts_->pairs.empty();
      std::vector<double> importance;
      std::vector<double> sparsity;
      for (int layer = 0; layer < shape_.layers; ++layer) {
        const Layer& state = layers_[static_cast<size_t>(layer)];
        if (!joint) {
          view.layer = layer;
          view.importance = state.importance;
          view.sparsity = {&state.sparsity, 1};
          selections.push_back(parts_->retention->select(view, parts_->pairs)[0]);
        }
        importance.insert(importance.end(), state.importance.begin(), state.importance.end());
        sparsity.push_back(state.sparsity);
      }
      if (joint) {
        view.importance = importance;
        view.sparsity = sparsity;
        selections = parts_->retention->select(view, parts_->pairs);
      }
    }
    for (int layer = 0; layer < shape_.layers; ++layer) {
      Layer& state = layers_[static_cast<size_t>(layer)];
      state.kept = n;
      if (parts_->retention != nullptr) keep(state, selections[static_cast<size_t>(layer)], n);
      for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
        if (quantizer(store, layer) != nullptr) pack_prompt(layer, state, store);
      }
    }
  }

  void keep(Layer& state, const LayerSelection& selection, int n) {
    state.kept = selection.kept();
    state.forget = selection.forget;
    for (size_t head = 0; head < kv_heads(); ++head) {
      Lane& lane = state.lanes[head];
      const std::vector<int32_t>& kept = selection.slots[selection.slots.size() > 1 ? head : 0];
      if (parts_->retention->merge() != MergeRule::kNone && selection.kept() < n) {
        std::vector<float> k;
        std::vector<float> v;
        for (const Slot& slot : lane.slots) {
          k.insert(k.end(), slot.k.begin(), slot.k.end());
          v.insert(v.end(), slot.v.begin(), slot.v.end());
        }
        std::vector<float> merged_k(kept.size() * dim());
        std::vector<float> merged_v(merged_k.size());
        merge_rows(parts_->retention->merge(),
                   {k.data(), v.data(), n, static_cast<int>(dim()), kept, merged_k.data(),
                    merged_v.data()},
                   *stream_);
        k = merged_k;
        v = merged_v;
        for (size_t i = 0; i < kept.size(); ++i) {
          Slot& slot = lane.slots[static_cast<size_t>(kept[i])];
          for (size_t d = 0; d < dim(); ++d) {
            slot.k[d] = k[i * dim() + d];
            slot.v[d] = v[i * dim() + d];
            slot.k[d] = stored(slot.k[d], parts_->rows);
            slot.v[d] = stored(slot.v[d], parts_->rows);
          }
        }
      }
      std::vector<Slot> slots;
      for (const int32_t j : kept) {
        slots.push_back(lane.slots[static_cast<size_t>(j)]);
        slots.back().weight =
            state.importance[head * static_cast<size_t>(n) + static_cast<size_t>(j)];
      }
      lane.slots = std::move(slots);
    }
    if (parts_->retention->rerotates() && state.kept < n) {
      int sinks = 0;
      while (sinks < state.kept && selection.slots[0][static_cast<size_t>(sinks)] == sinks) ++sinks;
      turn(state, sinks, n - state.kept);
    }
  }

  void turn(Layer& state, int sinks, int by) {
    if (state.sinks == 0) {
      state.sinks = sinks;
      for (const Lane& lane : state.lanes) {
        state.sink_keys.emplace_back();
        for (int i = 0; i < sinks; ++i) {
          state.sink_keys.back().push_back(lane.slots[static_cast<size_t>(i)].k);
        }
      }
    }
    state.turned += by;
    const size_t half = shape_.rope_frequencies.size();
    for (size_t head = 0; head < kv_heads(); ++head) {
      for (size_t i = 0; i < static_cast<size_t>(state.sinks); ++i) {
        const std::vector<float>& from = state.sink_keys[head][i];
        std::vector<float>& to = state.lanes[head].slots[i].k;
        for (size_t f = 0; f < half; ++f) {
          const double angle = state.turned * static_cast<double>(shape_.rope_frequencies[f]);
          const double a = static_cast<double>(from[f]);
          const double b = static_cast<double>(from[f + half]);
          to[f] =
              stored(static_cast<float>(a * std::cos(angle) - b * std::sin(angle)), parts_->rows);
          to[f + half] =
              stored(static_cast<float>(b * std::cos(angle) + a * std::sin(angle)), parts_->rows);
        }
      }
    }
  }

  /// Slots of a lane's store, oldest first.
  std::vector<Slot*> of_store(Lane& lane, size_t store) const {
    std::vector<Slot*> all;
    for (Slot& slot : lane.slots) {
      if (store_of(slot) == store) all.push_back(&slot);
    }
    return all;
  }

  void pack_prompt(int layer, Layer& state, size_t store) {
    const Quantizer& q = *quantizer(store, layer);
    if (q.visual_only()) {
      for (size_t head = 0; head < kv_heads(); ++head) {
        Lane& lane = state.lanes[head];
        const std::vector<Slot*> all = of_store(lane, store);
        for (size_t first = 0; first < all.size();) {
          size_t end = all.size();
          if (q.per_image()) {
            end = first;
            while (end < all.size() && all[end]->image == all[first]->image) ++end;
          }
          const std::vector<Slot*> span(all.begin() + static_cast<std::ptrdiff_t>(first),
                                        all.begin() + static_cast<std::ptrdiff_t>(end));
          for (const Part part : {Part::kKeys, Part::kValues}) {
            pack_slots(lane, owner_lane(layer, part, head), span, q, q.plan(part, layer), part,
                       store, layer, static_cast<int>(span.size()), false);
          }
          first = end;
        }
      }
      return;
    }
    for (const Part part : {Part::kKeys, Part::kValues}) {
      std::vector<int> counts;
      for (Lane& lane : state.lanes) {
        counts.push_back(
            q.plan(part, layer)
                .flush.packed_after_prompt(static_cast<int>(of_store(lane, store).size())));
      }
      flush_rows(layer, state, store, part, counts);
    }
  }

  void flush_rows(int layer, Layer& state, size_t store, Part part,
                  const std::vector<int>& counts) {
    const Quantizer& q = *quantizer(store, layer);
    const PartPlan& plan = q.plan(part, layer);
    if (*std::max_element(counts.begin(), counts.end()) == 0) return;
    const bool first_flush = !prompted_;
    // The rows of each lane that are packed now; with repacking also those that were before.
    std::vector<std::vector<Slot*>> rows(kv_heads());
    for (size_t head = 0; head < kv_heads(); ++head) {
      Lane& lane = state.lanes[head];
      int left = counts[head];
      for (Slot* slot : of_store(lane, store)) {
        int& block = part == Part::kKeys ? slot->k_block : slot->v_block;
        if (block >= 0) {
          const bool apart = lane.blocks[static_cast<size_t>(block)].apart;
          if (!q.repacks(part) || apart) continue;
          lane.blocks[static_cast<size_t>(block)].live = 0;
          rows[head].push_back(slot);
        } else if (left > 0) {
          --left;
          rows[head].push_back(slot);
        }
      }
    }
    if (part == Part::kKeys && q.key_basis() != nullptr &&
        (!state.learned[store] || q.repacks(part))) {
      std::vector<std::vector<float>> keys(kv_heads());
      std::vector<const float*> pointers;
      std::vector<LaneFacts> facts(kv_heads());
      for (size_t head = 0; head < kv_heads(); ++head) {
        for (const Slot* slot : rows[head]) {
          keys[head].insert(keys[head].end(), slot->k.begin(), slot->k.end());
        }
        pointers.push_back(keys[head].data());
      }
      learn_keys(q, pointers, static_cast<int>(rows[0].size()), facts);
      for (size_t head = 0; head < kv_heads(); ++head) state.lanes[head].facts[store] = facts[head];
      state.learned[store] = true;
    }
    for (size_t head = 0; head < kv_heads(); ++head) {
      Lane& lane = state.lanes[head];
      std::vector<Slot*> plain = rows[head];
      if (part == Part::kValues && store == kRest && q.protected_values() != nullptr &&
          first_flush) {
        std::vector<float> scores;
        std::vector<int16_t> modality;
        const std::vector<Slot*> all = of_store(lane, store);
        for (const Slot* slot : all) {
          scores.push_back(protection_[static_cast<size_t>(slot->token)]);
          modality.push_back(modality_[static_cast<size_t>(slot->token)]);
        }
        std::vector<Slot*> special;
        for (const int32_t i : q.protect(scores, modality)) {
          Slot* slot = all[static_cast<size_t>(i)];
          const auto at = std::find(plain.begin(), plain.end(), slot);
          if (at == plain.end()) continue;
          plain.erase(at);
          special.push_back(slot);
        }
        pack_blocks(lane, state, special, q, *q.protected_values(), part, store, layer, head, true);
      }
      pack_blocks(lane, state, plain, q, plan, part, store, layer, head, false);
    }
  }

  void pack_blocks(Lane& lane, Layer& state, const std::vector<Slot*>& slots, const Quantizer& q,
                   const PartPlan& plan, Part part, size_t store, int layer, size_t head,
                   bool apart) {
    static_cast<void>(state);
    const size_t block =
        plan.format.axis == ScaleAxis::kToken ? 1 : static_cast<size_t>(plan.format.block_rows);
    Lane& owner = owner_lane(layer, part, head);
    for (size_t first = 0; first < slots.size(); first += block) {
      const size_t end = std::min(first + block, slots.size());
      const std::vector<Slot*> span(slots.begin() + static_cast<std::ptrdiff_t>(first),
                                    slots.begin() + static_cast<std::ptrdiff_t>(end));
      pack_slots(lane, owner, span, q, plan, part, store, layer, static_cast<int>(span.size()),
                 apart);
    }
  }

  Lane& owner_lane(int layer, Part part, size_t head) {
    int from = layer;
    if (parts_->share.any()) {
      from = (part == Part::kKeys ? parts_->share.key_owner
                                  : parts_->share.value_owner)[static_cast<size_t>(layer)];
    }
    return layers_[static_cast<size_t>(from)].lanes[head];
  }

  /// Packs slots as one block and replaces their keys or values by what comes out of it.
  void pack_slots(Lane& lane, Lane& owner, const std::vector<Slot*>& slots, const Quantizer& q,
                  const PartPlan& plan, Part part, size_t store, int layer, int rows, bool apart) {
    static_cast<void>(layer);
    if (rows == 0) return;
    const bool keys = part == Part::kKeys;
    const bool basis = keys && q.key_basis() != nullptr;
    std::vector<float> x;
    for (const Slot* slot : slots) {
      const std::vector<float>& row = keys ? slot->k : slot->v;
      x.insert(x.end(), row.begin(), row.end());
    }
    std::vector<float> turned(x.size());
    if (basis) {
      change_rows(q, BasisChange::kKey, lane.facts[store], x.data(), rows, turned.data());
      x = turned;
    }
    const PackedFormat& format = plan.format;
    const auto count = static_cast<size_t>(rows);
    std::vector<std::byte> codes(count * format.row_bytes());
    std::vector<std::byte> scales(format.scales(rows) * dtype_bytes(format.meta));
    std::vector<std::byte> zeros(format.zeros(rows) * dtype_bytes(format.meta));
    const PackJob job{x.data(), rows, codes.data(), scales.data(),
                      zeros.empty() ? nullptr : zeros.data()};
    pack(format, plan.rules, {&job, 1}, *stream_);
    const bool shared = &owner != &lane;
    // Codes are found by token: the owner has packed the same tokens before.
    for (size_t i = 0; i < count; ++i) {
      auto& mine = keys ? slots[i]->k_codes : slots[i]->v_codes;
      if (shared) {
        const auto other =
            std::find_if(owner.slots.begin(), owner.slots.end(),
                         [&](const Slot& slot) { return slot.token == slots[i]->token; });
        const auto& theirs = keys ? other->k_codes : other->v_codes;
        std::copy(theirs.begin(), theirs.end(),
                  codes.begin() + static_cast<std::ptrdiff_t>(i * format.row_bytes()));
      }
      mine.assign(codes.begin() + static_cast<std::ptrdiff_t>(i * format.row_bytes()),
                  codes.begin() + static_cast<std::ptrdiff_t>((i + 1) * format.row_bytes()));
    }
    const PackedBlock block{codes.data(), scales.data(), zeros.empty() ? nullptr : zeros.data(),
                            rows,         rows,          nullptr};
    unpack_blocks(format, {&block, 1}, x.data(), *stream_);
    if (basis) {
      change_rows(q, BasisChange::kBack, lane.facts[store], x.data(), rows, turned.data());
      x = turned;
    }
    // Scales of each token: 32 tokens are one block for the accounting of dead rows.
    int index = -1;
    if (format.axis == ScaleAxis::kToken && !q.visual_only()) {
      for (size_t b = 0; b < lane.blocks.size(); ++b) {
        const Block& other = lane.blocks[b];
        if (other.part == part && other.store == store && other.apart == apart && other.rows < 32 &&
            other.live > 0 && other.open) {
          index = static_cast<int>(b);
        }
      }
    }
    if (index < 0) {
      for (Block& other : lane.blocks) {
        if (other.part == part && other.store == store && other.apart == apart) other.open = false;
      }
      index = static_cast<int>(lane.blocks.size());
      lane.blocks.push_back({&plan, 0, 0, shared, true, part, store, apart});
    }
    lane.blocks[static_cast<size_t>(index)].rows += rows;
    lane.blocks[static_cast<size_t>(index)].live += rows;
    for (size_t i = 0; i < count; ++i) {
      std::vector<float>& row = keys ? slots[i]->k : slots[i]->v;
      row.assign(x.begin() + static_cast<std::ptrdiff_t>(i * dim()),
                 x.begin() + static_cast<std::ptrdiff_t>((i + 1) * dim()));
      (keys ? slots[i]->k_block : slots[i]->v_block) = index;
    }
  }

  void flush_full(int layer) {
    Layer& state = layers_[static_cast<size_t>(layer)];
    for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
      const Quantizer* q = quantizer(store, layer);
      if (q == nullptr || q->visual_only()) continue;
      for (const Part part : {Part::kKeys, Part::kValues}) {
        const FlushRule& rule = q->plan(part, layer).flush;
        std::vector<int> counts;
        for (Lane& lane : state.lanes) {
          int full = 0;
          for (const Slot* slot : of_store(lane, store)) {
            if ((part == Part::kKeys ? slot->k_block : slot->v_block) < 0) ++full;
          }
          counts.push_back(full >= rule.trigger ? rule.rows : 0);
        }
        flush_rows(layer, state, store, part, counts);
      }
    }
  }

  void evict(int layer, int step) {
    if (parts_->retention == nullptr) return;
    Layer& state = layers_[static_cast<size_t>(layer)];
    const int pair = parts_->pairs.empty() ? layer : parts_->pairs[static_cast<size_t>(layer)];
    DecodeView view;
    view.layer = layer;
    view.prompt_rows = prompt_rows_;
    view.step = step;
    view.kept = state.kept;
    view.forget = state.forget;
    int slot = -1;
    std::vector<float> weights;
    for (size_t head = 0; head < kv_heads(); ++head) {
      Lane& lane = state.lanes[head];
      view.rows = static_cast<int>(lane.slots.size());
      if (head == 0 || parts_->retention->per_head()) {
        weights.clear();
        if (parts_->retention->needs().decode_weights) {
          weights.resize(lane.slots.size());
          for (size_t i = 0; i < weights.size(); ++i) {
            weights[i] = static_cast<float>(slot_weight(pair, head, i));
          }
        }
        view.weights = weights;
        slot = pair == layer ? parts_->retention->evict(view)
                             : layers_[static_cast<size_t>(pair)].dropped;
        state.dropped = slot;
        if (slot >= 0 && head == 0 && parts_->retention->rerotates()) {
          turn(state, state.sinks == 0 ? slot : state.sinks, 1);
        }
      }
      if (slot < 0) continue;
      const Slot& gone = lane.slots[static_cast<size_t>(slot)];
      for (const int block : {gone.k_block, gone.v_block}) {
        if (block >= 0) --lane.blocks[static_cast<size_t>(block)].live;
      }
      lane.slots.erase(lane.slots.begin() + slot);
    }
  }

  /// Of a lane, or the mean of all lanes that hold the same slots: of a layer (specs 9.3,
  /// head_shared), of all layers of a pair (10.4, tied).
  double slot_weight(int pair, size_t head, size_t i) const {
    if (parts_->retention->per_head()) {
      return layers_[static_cast<size_t>(pair)].lanes[head].slots[i].weight;
    }
    double sum = 0;
    int lanes = 0;
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      const int here = parts_->pairs.empty() ? static_cast<int>(layer) : parts_->pairs[layer];
      if (here != pair) continue;
      for (const Lane& lane : layers_[layer].lanes) {
        sum += lane.slots[i].weight;
        ++lanes;
      }
    }
    return sum / lanes;
  }

 public:
  /// Protection scores of the first prompt's rows.
  void set_protection(std::vector<float> scores) { protection_ = std::move(scores); }

 private:
  const CacheParts* parts_;
  CacheShape shape_;
  Stream* stream_;
  std::vector<Layer> layers_;
  std::vector<int16_t> modality_;
  std::array<int32_t, 2> summed_{};
  std::vector<float> protection_;
  bool prompted_ = false;
  int prompt_rows_ = 0;
  size_t rows_ = 0;
  size_t added_ = 0;
};

}  // namespace kvlm::reference
