#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/plan/planner.h"
#include "kvcache/spec/registry.h"
#include "tests/reference/half.h"
#include "tests/reference/merge.h"
#include "tests/reference/quantize.h"
#include "tests/reference/retention.h"
#include "tests/reference/rotation.h"
#include "tests/reference/schemes.h"
#include "tests/reference/vidkv.h"

// Independent: attention, importance, windows, blocks, dead rows, shared codes, bytes; and, in the
// headers that it includes, codes and scales, merges, VidKV's channels and spectra, which rows stay
// and which slot goes. Not independent: how a spec's text is parsed, which of its parts serves
// which slots (CachePlan), and the values of its options (OptionValues); they have tests of their
// own in tests/kvcache/. Pairs of layers, windows and thresholds are made here from those values.
namespace kvlm::reference {

/// One sequence of a cache of policies, the slow and plain way: every slot is a list entry with its
/// key and value as attention sees them, dequantized; attention is in double. Computes nothing with
/// the code under test.
class PolicySequence {
 public:
  PolicySequence(const std::string& text, const CacheShape& shape) : shape_(shape) {
    layers_.resize(static_cast<size_t>(shape.layers));
    for (Layer& layer : layers_) layer.heads.resize(kv_heads());
    const auto plan = plan_cache(parse_spec(text), shape);
    full_ = plan->rows;
    split_ = plan->split;
    if (plan->retention_part) {
      const SpecPart& words = *plan->retention_part;
      const OptionValues options(find_retention(words.name)->info, words);
      if (options.real("keep") < 1) rule_.emplace(options, plan->packs());
    }
    for (int layer = 0; layer < shape.layers; ++layer) {
      const auto* visual = split_ ? plan->packer(Scope::kVisual, layer) : nullptr;
      const auto* rest = plan->packer(split_ ? Scope::kText : Scope::kAll, layer);
      for (const auto& [store, part] : {std::pair(kVisual, visual), std::pair(kRest, rest)}) {
        packers_[store].emplace_back();
        if (part == nullptr) continue;
        const SpecPart& words = part->part;
        const OptionValues options(find_quantizer(words.name)->info, words);
        packers_[store].back() = packer_of(options, shape, layer, rule_.has_value());
        if (words.name == "xquant") {
          const XQuantLayers thresholds(options, shape.layers);
          const bool averages = options.text("merge") == "average";
          sharing_ = sharing_in_groups(thresholds.km, thresholds.vm, options.integer("layer_group"),
                                       averages ? 1 : options.integer("dominant"), shape.layers);
          if (averages) sharing_.average = {options.real("gamma"), options.text("round")[0]};
        }
      }
    }
    if (plan->sharing_part) {
      const SpecPart& words = *plan->sharing_part;
      const OptionValues options(*find_policy(words.name), words);
      const auto [keys, values] = options.start_layers("from");
      sharing_ = sharing_from(keys, values, shape.layers);
    }
    if (rule_ && !rule_->same_in_all_layers()) tie_pairs();
  }

  size_t rows() const noexcept { return rows_; }
  /// Slots of a KV head.
  size_t slots(int layer, size_t head) const {
    return layers_[static_cast<size_t>(layer)].heads[head].slots.size();
  }
  /// Tokens of a KV head's slots.
  std::vector<int> tokens(int layer, size_t head) const {
    std::vector<int> all;
    for (const Slot& slot : layers_[static_cast<size_t>(layer)].heads[head].slots) {
      all.push_back(slot.token);
    }
    return all;
  }

  /// A pass over one layer; layers in order, then end(). Returns (rows, q_heads * head_dim).
  std::vector<std::vector<double>> attend(int layer, const float* q, const float* k, const float* v,
                                          size_t rows, bool prompt,
                                          const std::vector<int16_t>& modality, double scale) {
    if (!turns(layer, &Packer::turns)) {
      return attend_stored(layer, q, k, v, rows, prompt, modality, scale);
    }
    const std::vector<float> turned_q = turned_heads(q, rows * q_heads() * dim(), dim());
    const std::vector<float> turned_k = turned_heads(k, rows * kv_heads() * dim(), dim());
    if (!turns(layer, &Packer::turns_values)) {
      return attend_stored(layer, turned_q.data(), turned_k.data(), v, rows, prompt, modality,
                           scale);
    }
    const std::vector<float> turned_v = turned_heads(v, rows * kv_heads() * dim(), dim());
    auto out = attend_stored(layer, turned_q.data(), turned_k.data(), turned_v.data(), rows, prompt,
                             modality, scale);
    for (std::vector<double>& row : out) turn_back(row, dim());
    return out;
  }

  /// attend() in the basis of what is stored.
  std::vector<std::vector<double>> attend_stored(int layer, const float* q, const float* k,
                                                 const float* v, size_t rows, bool prompt,
                                                 const std::vector<int16_t>& modality,
                                                 double scale) {
    Layer& state = layers_[static_cast<size_t>(layer)];
    std::vector<std::vector<double>> out(rows);
    added_ = rows;
    if (prompt && !prompted_) {
      state.scores.importance.assign(kv_heads(), std::vector<double>(rows));
      const auto [first, last] = rule_ ? rule_->summed(modality) : std::pair(size_t{0}, size_t{0});
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
          if (rule_->name() == "tgv") state.scores.questions.emplace_back(r, weight);
          const double top = *std::max_element(weight.begin(), weight.end());
          const double counts = rule_->counts(r - first, last - first);
          for (size_t j = 0; j <= r; ++j) {
            state.scores.importance[head / q_per_kv()][j] +=
                counts * weight[j] / static_cast<double>(q_per_kv());
            small += weight[j] < 0.01 * top ? 1 : 0;
            entries += 1;
          }
        }
      }
      state.scores.sparsity = entries > 0 ? small / entries : 0;
      state.scores.modality = modality;
      for (size_t head = 0; head < kv_heads(); ++head) {
        for (size_t j = 0; j < rows; ++j) {
          Slot slot = given(k, v, j, head);
          for (float& x : slot.k) x = stored(x, full_);
          for (float& x : slot.v) x = stored(x, full_);
          slot.token = static_cast<int>(j);
          slot.visual = modality[j] != kTextRow;
          slot.image = modality[j];
          state.heads[head].slots.push_back(slot);
        }
      }
      if (rule_ && rule_->scores_rows()) {
        state.scores.row_scores = rule_->row_scores(stored_layer(state, q, rows, scale));
      }
      return out;
    }
    std::vector<std::vector<double>> sums(kv_heads());  // of the pass's weights, new rows last
    if (prompt) {
      // Exact over what was stored before the pass and the rows of the pass so far.
      for (size_t head = 0; head < kv_heads(); ++head) {
        sums[head].resize(state.heads[head].slots.size() + rows);
      }
      for (size_t r = 0; r < rows; ++r) {
        for (size_t head = 0; head < q_heads(); ++head) {
          std::vector<Slot> seen = state.heads[head / q_per_kv()].slots;
          const size_t past = seen.size();
          for (size_t j = 0; j <= r; ++j) seen.push_back(given(k, v, j, head / q_per_kv()));
          std::vector<double> weight;
          append(out[r], attend_slots(q + (r * q_heads() + head) * dim(), seen, scale, layer, false,
                                      weight));
          for (size_t j = 0; j < past + r + 1; ++j) {
            if (rule_ && rule_->weighs_by_step() && r + 1 < rows) continue;
            sums[head / q_per_kv()][j] += weight[j] / static_cast<double>(q_per_kv());
          }
        }
      }
      if (rule_ && rule_->weighs_by_step()) forget_weights(state);
      for (size_t head = 0; head < kv_heads(); ++head) {
        std::vector<Slot>& slots = state.heads[head].slots;
        for (size_t j = 0; j < slots.size(); ++j) slots[j].weight += sums[head][j];
      }
    }
    for (size_t r = 0; r < rows; ++r) {
      const bool visual = prompt && modality[r] != kTextRow;
      for (size_t head = 0; head < kv_heads(); ++head) {
        Slot slot = given(k, v, r, head);
        for (float& x : slot.k) x = stored(x, full_);
        for (float& x : slot.v) x = stored(x, full_);
        slot.token = static_cast<int>(rows_ + r);
        slot.visual = visual;
        if (prompt) slot.weight = sums[head][sums[head].size() - rows + r];
        state.heads[head].slots.push_back(slot);
      }
      if (!prompt) {
        if (rule_ && rule_->weighs_by_step()) forget_weights(state);
        for (size_t head = 0; head < q_heads(); ++head) {
          KvHead& kv_head = state.heads[head / q_per_kv()];
          std::vector<double> weight;
          append(out[r], attend_slots(q + (r * q_heads() + head) * dim(), kv_head.slots, scale,
                                      layer, true, weight));
          for (size_t j = 0; j < weight.size(); ++j) {
            kv_head.slots[j].weight += weight[j] / static_cast<double>(q_per_kv());
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

  /// The stored bytes of everything, counted slot by slot and block by block (docs/formulas.md,
  /// "Stored bits").
  size_t bytes() const {
    size_t sum = 0;
    for (int l = 0; l < shape_.layers; ++l) {
      const Layer& layer = layers_[static_cast<size_t>(l)];
      for (const size_t store : {kVisual, kRest}) {
        const std::optional<Packer>& packer = packers_[store][static_cast<size_t>(l)];
        if (!packer || !layer.learned[store]) continue;
        sum += (dim() + 7) / 8 * (packer->order_per_head ? kv_heads() : 1);
      }
      const std::optional<Packer>& rest = packers_[kRest][static_cast<size_t>(l)];
      for (size_t head = 0; head < kv_heads(); ++head) {
        const KvHead& kv_head = layer.heads[head];
        size_t bits = 0;
        for (const Slot& slot : kv_head.slots) {
          const size_t full = dim() * (full_ == DType::kF32 ? 4 : 2);
          if (slot.k_block < 0) sum += full;
          if (slot.v_block < 0) sum += full;
          if (slot.v_block >= 0 && store_of(slot) == kRest) ++bits;
        }
        for (const Block& block : kv_head.blocks) {
          if (block.live == 0) continue;
          sum += block.scheme->meta_bytes(block.rows);
          if (!block.shared) sum += block.rows * block.scheme->row_bytes();
        }
        if (rule_ && rule_->weighs_in_decode()) sum += 4 * kv_head.slots.size();
        sum += 4 * dim() * static_cast<size_t>(layer.sinks);  // keys before they were rotated
        if (rest && rest->protect > 0 && (head == 0 || (rule_ && rule_->per_head()))) {
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
    int k_block = -1;  // of the KV head's blocks; -1: full precision
    int v_block = -1;
    double weight = 0;
    double score = 0;  // of the prompt's rows: what decode goes by
    bool of_prompt = false;
    bool is_protected = false;
    std::vector<int> k_codes, v_codes;
    std::vector<float> raw_k, raw_v;  // before they were packed
  };
  struct Block {
    const Scheme* scheme;
    size_t rows;
    size_t live;
    bool shared;
    bool open;  // tokens may still be added (scales per token)
    bool keys;
    size_t store;
    bool apart;
  };
  struct KvHead {
    std::vector<Slot> slots;  // in the order of the tokens
    std::vector<Block> blocks;
    std::array<std::vector<size_t>, 2> order;  // of each store's key channels (VidKV)
  };
  struct Layer {
    std::vector<KvHead> heads;
    LayerScores scores;
    int kept = 0;
    double forget = 0;
    int tail = 1;
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
  const Packer& packer(size_t store, int layer) const {
    return *packers_[store][static_cast<size_t>(layer)];
  }
  size_t store_of(const Slot& slot) const { return split_ && slot.visual ? kVisual : kRest; }

  /// Layers that share codes keep the same slots (docs/formulas.md, "Shared codes").
  void tie_pairs() {
    bool shares = false;
    for (size_t l = 0; l < sharing_.keys.size(); ++l) {
      pairs_.push_back(std::min(sharing_.keys[l], sharing_.values[l]));
      shares = shares || pairs_.back() != static_cast<int>(l);
    }
    if (!shares) pairs_.clear();
  }
  Slot given(const float* k, const float* v, size_t row, size_t head) const {
    Slot slot;
    const size_t at = (row * kv_heads() + head) * dim();
    slot.k.assign(k + at, k + at + dim());
    slot.v.assign(v + at, v + at + dim());
    return slot;
  }
  static void forget_weights(Layer& state) {
    for (KvHead& kv_head : state.heads) {
      for (Slot& slot : kv_head.slots) slot.weight = 0;
    }
  }
  /// A layer right after its prompt, with the prompt's queries (rows, q_heads, head_dim).
  StoredLayer stored_layer(const Layer& state, const float* q, size_t rows, double scale) const {
    StoredLayer layer;
    for (const KvHead& kv_head : state.heads) {
      layer.keys.emplace_back();
      layer.values.emplace_back();
      for (const Slot& slot : kv_head.slots) {
        layer.keys.back().push_back(slot.k);
        layer.values.back().push_back(slot.v);
      }
    }
    for (size_t head = 0; head < q_heads(); ++head) {
      layer.queries.emplace_back();
      for (size_t r = 0; r < rows; ++r) {
        const float* row = q + (r * q_heads() + head) * dim();
        layer.queries.back().emplace_back(row, row + dim());
      }
    }
    layer.scale = scale;
    layer.frequencies = shape_.rope_frequencies;
    return layer;
  }
  static void append(std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  }

  std::vector<double> attend_slots(const float* q, const std::vector<Slot>& slots, double scale,
                                   int layer, bool remapped, std::vector<double>& weight) const {
    weight.assign(slots.size(), 0);
    for (size_t j = 0; j < slots.size(); ++j) {
      for (size_t d = 0; d < dim(); ++d) {
        weight[j] += scale * static_cast<double>(q[d]) * static_cast<double>(slots[j].k[d]);
      }
    }
    const std::optional<Packer>& visual = packers_[kVisual][static_cast<size_t>(layer)];
    if (remapped && visual && visual->remap) {
      const Remap& rule = *visual->remap;
      const int images = visual->per_image ? 64 : 1;
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
        double slope = hi > lo ? (hi - lo + rule.low - rule.high) / (hi - lo) : 0;
        if (rule.guarded) slope = std::max(slope, 0.0);
        for (size_t j = 0; j < slots.size(); ++j) {
          if (member(j)) weight[j] = slope * (weight[j] - lo) + lo - rule.low;
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
    std::vector<Selection> selections;
    if (rule_) {
      std::vector<LayerScores> scores;
      for (const Layer& layer : layers_) scores.push_back(layer.scores);
      selections = rule_->select(scores, n, pairs_);
    }
    for (int layer = 0; layer < shape_.layers; ++layer) {
      Layer& state = layers_[static_cast<size_t>(layer)];
      state.kept = n;
      if (rule_) keep(state, selections[static_cast<size_t>(layer)], n);
      for (const size_t store : {kVisual, kRest}) {
        if (packers_[store][static_cast<size_t>(layer)]) pack_prompt(layer, state, store);
      }
    }
  }

  void keep(Layer& state, const Selection& selection, int n) {
    state.kept = static_cast<int>(selection.slots[0].size());
    state.forget = selection.forget;
    state.tail = selection.tail;
    for (size_t head = 0; head < kv_heads(); ++head) {
      KvHead& kv_head = state.heads[head];
      const std::vector<int>& kept = selection.slots[selection.slots.size() > 1 ? head : 0];
      if (rule_->merge() != Merge::kNone && state.kept < n) {
        Rows k;
        Rows v;
        for (const Slot& slot : kv_head.slots) {
          k.push_back(slot.k);
          v.push_back(slot.v);
        }
        const std::vector<size_t> targets =
            merge_targets(rule_->merge(), k, kept, selection.lone_first, selection.lone_last);
        merge_into(targets, k);
        merge_into(targets, v);
        for (size_t i = 0; i < kv_head.slots.size(); ++i) {
          Slot& slot = kv_head.slots[i];
          for (size_t d = 0; d < dim(); ++d) {
            slot.k[d] = stored(k[i][d], full_);
            slot.v[d] = stored(v[i][d], full_);
          }
        }
      }
      std::vector<Slot> slots;
      for (const int row : kept) {
        slots.push_back(kv_head.slots[static_cast<size_t>(row)]);
        Slot& slot = slots.back();
        slot.weight = state.scores.importance[head][static_cast<size_t>(row)];
        slot.of_prompt = true;
        slot.score =
            selection.scores[selection.slots.size() > 1 ? head : 0][static_cast<size_t>(row)];
      }
      kv_head.slots = std::move(slots);
    }
    if (rule_->rerotates() && state.kept < n) {
      int sinks = 0;
      while (sinks < state.kept && selection.slots[0][static_cast<size_t>(sinks)] == sinks) ++sinks;
      turn(state, sinks, n - state.kept);
    }
  }

  void turn(Layer& state, int sinks, int by) {
    if (state.sinks == 0) {
      state.sinks = sinks;
      for (const KvHead& kv_head : state.heads) {
        state.sink_keys.emplace_back();
        for (int i = 0; i < sinks; ++i) {
          state.sink_keys.back().push_back(kv_head.slots[static_cast<size_t>(i)].k);
        }
      }
    }
    state.turned += by;
    const size_t half = shape_.rope_frequencies.size();
    for (size_t head = 0; head < kv_heads(); ++head) {
      for (size_t i = 0; i < static_cast<size_t>(state.sinks); ++i) {
        const std::vector<float>& from = state.sink_keys[head][i];
        std::vector<float>& to = state.heads[head].slots[i].k;
        for (size_t f = 0; f < half; ++f) {
          const double angle = state.turned * static_cast<double>(shape_.rope_frequencies[f]);
          const double a = static_cast<double>(from[f]);
          const double b = static_cast<double>(from[f + half]);
          to[f] = stored(static_cast<float>(a * std::cos(angle) - b * std::sin(angle)), full_);
          to[f + half] =
              stored(static_cast<float>(b * std::cos(angle) + a * std::sin(angle)), full_);
        }
      }
    }
  }

  /// Slots of a KV head's store, oldest first.
  std::vector<Slot*> of_store(KvHead& kv_head, size_t store) const {
    std::vector<Slot*> all;
    for (Slot& slot : kv_head.slots) {
      if (store_of(slot) == store) all.push_back(&slot);
    }
    return all;
  }

  void pack_prompt(int layer, Layer& state, size_t store) {
    const Packer& how = packer(store, layer);
    if (how.visual_only) {
      const std::array<std::vector<float>, 2> of_layer{
          numbers_of_layer(how.keys, state, store, true),
          numbers_of_layer(how.values, state, store, false)};
      for (size_t head = 0; head < kv_heads(); ++head) {
        const std::vector<Slot*> all = of_store(state.heads[head], store);
        for (size_t first = 0; first < all.size();) {
          size_t end = all.size();
          if (how.per_image) {
            end = first;
            while (end < all.size() && all[end]->image == all[first]->image) ++end;
          }
          const std::vector<Slot*> span(all.begin() + static_cast<std::ptrdiff_t>(first),
                                        all.begin() + static_cast<std::ptrdiff_t>(end));
          for (const bool keys : {true, false}) {
            if (!(keys ? how.packs_keys : how.packs_values)) continue;
            pack_slots(layer, head, span, keys ? how.keys : how.values, keys, store, false,
                       of_layer[keys ? 0 : 1]);
          }
          first = end;
        }
      }
      return;
    }
    if (store == kRest && how.protect > 0) protect(how, state);
    for (const bool keys : {true, false}) {
      const Scheme& scheme = keys ? how.keys : how.values;
      std::vector<int> counts;
      for (KvHead& kv_head : state.heads) {
        const auto rows = static_cast<int>(of_store(kv_head, store).size());
        counts.push_back(std::max(0, rows - scheme.hold) / scheme.unit * scheme.unit);
      }
      flush_rows(layer, state, store, keys, counts);
    }
  }

  bool turns(int layer, bool Packer::*what) const {
    const auto at = static_cast<size_t>(layer);
    return std::any_of(packers_.begin(), packers_.end(),
                       [&](const auto& of_store) { return of_store[at] && (*of_store[at]).*what; });
  }

  /// What all heads hold, where they share a range; else nothing.
  std::vector<float> numbers_of_layer(const Scheme& scheme, Layer& state, size_t store, bool keys) {
    std::vector<float> numbers;
    for (KvHead& kv_head : state.heads) {
      if (!scheme.range_of_layer) break;
      for (const Slot* slot : of_store(kv_head, store)) {
        const std::vector<float>& x = keys ? slot->k : slot->v;
        numbers.insert(numbers.end(), x.begin(), x.end());
      }
    }
    return numbers;
  }

  /// Chooses the prompt's rows whose values are protected, packed yet or not.
  void protect(const Packer& how, Layer& state) {
    const std::vector<double> of_tokens =
        how.protects_by_chance ? chance_scores(*how.protects_by_chance, protection_.size())
                               : protection_;
    for (KvHead& kv_head : state.heads) {
      std::vector<double> scores;
      std::vector<bool> visual;
      const std::vector<Slot*> all = of_store(kv_head, kRest);
      for (const Slot* slot : all) {
        scores.push_back(of_tokens[static_cast<size_t>(slot->token)]);
        visual.push_back(slot->visual);
      }
      for (const size_t i :
           protected_rows(scores, visual, how.protect, how.protects_as_published)) {
        all[i]->is_protected = true;
      }
    }
  }

  void flush_rows(int layer, Layer& state, size_t store, bool keys,
                  const std::vector<int>& counts) {
    const Packer& how = packer(store, layer);
    const bool repacks = keys ? how.repacks_keys : how.repacks_values;
    if (*std::max_element(counts.begin(), counts.end()) == 0) return;
    // The rows of each KV head that are packed now; with repacking also those that were before.
    std::vector<std::vector<Slot*>> rows(kv_heads());
    for (size_t head = 0; head < kv_heads(); ++head) {
      KvHead& kv_head = state.heads[head];
      int left = counts[head];
      for (Slot* slot : of_store(kv_head, store)) {
        const int block = keys ? slot->k_block : slot->v_block;
        if (block >= 0) {
          if (!repacks || kv_head.blocks[static_cast<size_t>(block)].apart) continue;
          kv_head.blocks[static_cast<size_t>(block)].live = 0;
          rows[head].push_back(slot);
        } else if (left > 0) {
          --left;
          rows[head].push_back(slot);
        }
      }
    }
    if (keys && how.reorders_keys && (!state.learned[store] || repacks)) {
      order_channels(how, state, store, rows);
    }
    for (size_t head = 0; head < kv_heads(); ++head) {
      std::vector<Slot*> plain = rows[head];
      if (!keys) {
        std::vector<Slot*> special;
        const auto split = std::stable_partition(
            plain.begin(), plain.end(), [](const Slot* slot) { return !slot->is_protected; });
        special.assign(split, plain.end());
        plain.erase(split, plain.end());
        pack_blocks(layer, head, special, how.protected_values, keys, store, true);
      }
      pack_blocks(layer, head, plain, keys ? how.keys : how.values, keys, store, false);
    }
  }

  /// VidKV's order of channels from the keys that are about to be packed.
  void order_channels(const Packer& how, Layer& state, size_t store,
                      const std::vector<std::vector<Slot*>>& rows) {
    std::vector<Rows> keys(kv_heads());
    for (size_t head = 0; head < kv_heads(); ++head) {
      for (const Slot* slot : rows[head]) keys[head].push_back(slot->k);
    }
    for (size_t head = 0; head < kv_heads(); ++head) {
      state.heads[head].order[store] = channel_order(
          how.order_per_head ? std::vector<Rows>{keys[head]} : keys, how.finer, how.criterion);
    }
    state.learned[store] = true;
  }

  void pack_blocks(int layer, size_t head, const std::vector<Slot*>& slots, const Scheme& scheme,
                   bool keys, size_t store, bool apart) {
    const size_t block = scheme.axis == Axis::kToken ? 1 : scheme.group;
    for (size_t first = 0; first < slots.size(); first += block) {
      const size_t end = std::min(first + block, slots.size());
      const std::vector<Slot*> span(slots.begin() + static_cast<std::ptrdiff_t>(first),
                                    slots.begin() + static_cast<std::ptrdiff_t>(end));
      pack_slots(layer, head, span, scheme, keys, store, apart);
    }
  }

  /// Packs slots as one block and replaces their keys or values by what comes out of it.
  void pack_slots(int layer, size_t head, const std::vector<Slot*>& slots, const Scheme& scheme,
                  bool keys, size_t store, bool apart, const std::vector<float>& of_layer = {}) {
    if (slots.empty()) return;
    const auto at = static_cast<size_t>(layer);
    const Packer& how = packer(store, layer);
    KvHead& kv_head = layers_[at].heads[head];
    Rows x;
    for (const Slot* slot : slots) x.push_back(keys ? slot->k : slot->v);
    std::optional<Spectrum> spectrum;
    if (keys && how.fft) spectrum.emplace(dim() - how.finer);
    const Spectrum* turn = spectrum ? &*spectrum : nullptr;
    const bool reorders = keys && how.reorders_keys;
    if (reorders) to_packed_channels(kv_head.order[store], turn, how.finer, x);
    const std::vector<int>& owners = keys ? sharing_.keys : sharing_.values;
    const int maker = maker_of(layer, keys);
    const bool shared = !owners.empty() && owners[at] != layer;
    for (Slot* slot : slots) (keys ? slot->raw_k : slot->raw_v) = keys ? slot->k : slot->v;
    // A layer that shares finds codes by token, if their maker has packed these tokens before. Else
    // that gives it the codes when it does.
    CodeRows codes;
    for (size_t i = 0; i < slots.size() && maker < layer; ++i) {
      const Slot& made = slot_of(maker, head, slots[i]->token);
      codes.push_back(keys ? made.k_codes : made.v_codes);
    }
    const Rows raw = x;
    pack_block(scheme, x, codes, of_layer);
    if (shared && sharing_.average) {
      for (size_t i = 0; i < slots.size(); ++i) {
        const Slot& first = slot_of(owners[at], head, slots[i]->token);
        const std::vector<int>& theirs = keys ? first.k_codes : first.v_codes;
        for (size_t channel = 0; channel < theirs.size(); ++channel) {
          codes[i][channel] = (*sharing_.average)(theirs[channel], codes[i][channel]);
        }
      }
      x = raw;
      pack_block(scheme, x, codes, of_layer);
    }
    for (int earlier = 0; earlier < layer; ++earlier) {
      if (maker_of(earlier, keys) == layer) repack(earlier, head, slots, store, keys, codes);
    }
    if (reorders) from_packed_channels(kv_head.order[store], turn, how.finer, x);
    // Scales of each token: 32 tokens are one block for the accounting of dead rows.
    int index = -1;
    if (scheme.axis == Axis::kToken && !how.visual_only) {
      for (size_t b = 0; b < kv_head.blocks.size(); ++b) {
        const Block& other = kv_head.blocks[b];
        if (other.keys == keys && other.store == store && other.apart == apart && other.rows < 32 &&
            other.live > 0 && other.open) {
          index = static_cast<int>(b);
        }
      }
    }
    if (index < 0) {
      for (Block& other : kv_head.blocks) {
        if (other.keys == keys && other.store == store && other.apart == apart) other.open = false;
      }
      index = static_cast<int>(kv_head.blocks.size());
      kv_head.blocks.push_back({&scheme, 0, 0, shared, true, keys, store, apart});
    }
    kv_head.blocks[static_cast<size_t>(index)].rows += slots.size();
    kv_head.blocks[static_cast<size_t>(index)].live += slots.size();
    for (size_t i = 0; i < slots.size(); ++i) {
      (keys ? slots[i]->k_codes : slots[i]->v_codes) = codes[i];
      (keys ? slots[i]->k : slots[i]->v) = x[i];
      (keys ? slots[i]->k_block : slots[i]->v_block) = index;
    }
  }

  /// The layer whose rows a layer's codes are of.
  int maker_of(int layer, bool keys) const {
    const auto at = static_cast<size_t>(layer);
    const std::vector<int>& owners = keys ? sharing_.keys : sharing_.values;
    const std::vector<int>& makers = keys ? sharing_.key_makers : sharing_.value_makers;
    return owners.empty() ? layer : makers.empty() ? owners[at] : makers[at];
  }
  Slot& slot_of(int layer, size_t head, int token) {
    std::vector<Slot>& slots = layers_[static_cast<size_t>(layer)].heads[head].slots;
    return *std::find_if(slots.begin(), slots.end(),
                         [&](const Slot& slot) { return slot.token == token; });
  }
  /// Packs the rows of an earlier layer that are the same tokens as `slots` with these codes.
  void repack(int layer, size_t head, const std::vector<Slot*>& slots, size_t store, bool keys,
              CodeRows codes) {
    Rows x;
    for (const Slot* slot : slots) {
      const Slot& own = slot_of(layer, head, slot->token);
      x.push_back(keys ? own.raw_k : own.raw_v);
    }
    const Packer& how = packer(store, layer);
    pack_block(keys ? how.keys : how.values, x, codes);
    for (size_t i = 0; i < slots.size(); ++i) {
      Slot& own = slot_of(layer, head, slots[i]->token);
      (keys ? own.k : own.v) = x[i];
    }
  }

  void flush_full(int layer) {
    Layer& state = layers_[static_cast<size_t>(layer)];
    for (const size_t store : {kVisual, kRest}) {
      const std::optional<Packer>& how = packers_[store][static_cast<size_t>(layer)];
      if (!how || how->visual_only) continue;
      for (const bool keys : {true, false}) {
        const Scheme& scheme = keys ? how->keys : how->values;
        std::vector<int> counts;
        for (KvHead& kv_head : state.heads) {
          int full = 0;
          for (const Slot* slot : of_store(kv_head, store)) {
            if ((keys ? slot->k_block : slot->v_block) < 0) ++full;
          }
          counts.push_back(full >= scheme.trigger ? scheme.rows : 0);
        }
        flush_rows(layer, state, store, keys, counts);
      }
    }
  }

  void evict(int layer, int step) {
    if (!rule_) return;
    Layer& state = layers_[static_cast<size_t>(layer)];
    const int pair = pairs_.empty() ? layer : pairs_[static_cast<size_t>(layer)];
    int slot = -1;
    for (size_t head = 0; head < kv_heads(); ++head) {
      KvHead& kv_head = state.heads[head];
      if (head == 0 || rule_->per_head()) {
        std::vector<double> weights;
        for (size_t i = 0; i < kv_head.slots.size() && rule_->weighs_in_decode(); ++i) {
          weights.push_back(slot_weight(pair, head, i));
        }
        std::vector<double> scores;
        for (const Slot& held : kv_head.slots) {
          if (held.of_prompt) scores.push_back(held.score);
        }
        slot = pair == layer
                   ? rule_->evict(static_cast<int>(kv_head.slots.size()), prompt_rows_, step,
                                  state.kept, state.forget, state.tail, weights, scores)
                   : layers_[static_cast<size_t>(pair)].dropped;
        state.dropped = slot;
        if (slot >= 0 && head == 0 && rule_->rerotates()) {
          turn(state, state.sinks == 0 ? slot : state.sinks, 1);
        }
      }
      if (slot < 0) continue;
      const Slot& gone = kv_head.slots[static_cast<size_t>(slot)];
      for (const int block : {gone.k_block, gone.v_block}) {
        if (block >= 0) --kv_head.blocks[static_cast<size_t>(block)].live;
      }
      kv_head.slots.erase(kv_head.slots.begin() + slot);
    }
  }

  /// Of a KV head, or the mean of all KV heads that hold the same slots: those of a layer
  /// (head_shared of docs/formulas.md, "H2O"), or of both layers of a pair ("Shared codes").
  double slot_weight(int pair, size_t head, size_t i) const {
    if (rule_->per_head()) {
      return layers_[static_cast<size_t>(pair)].heads[head].slots[i].weight;
    }
    double sum = 0;
    int heads = 0;
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      const int here = pairs_.empty() ? static_cast<int>(layer) : pairs_[layer];
      if (here != pair) continue;
      for (const KvHead& kv_head : layers_[layer].heads) {
        sum += kv_head.slots[i].weight;
        ++heads;
      }
    }
    return sum / heads;
  }

 public:
  /// What the first prompt's rows are before the first layer (VidKV's protection).
  void see_embeddings(const Rows& embeddings, const std::vector<int16_t>& modality) {
    std::vector<bool> visual;
    for (const int16_t tag : modality) visual.push_back(tag != kTextRow);
    protection_ = protection_scores(embeddings, visual);
  }

 private:
  static constexpr size_t kVisual = 0;
  static constexpr size_t kRest = 1;

  CacheShape shape_;
  DType full_ = DType::kF16;  // of rows that are not packed
  bool split_ = false;        // visual slots and others are packed apart
  std::optional<Rule> rule_;
  std::array<std::vector<std::optional<Packer>>, 2> packers_;  // of each store, by layer
  Sharing sharing_;
  std::vector<int> pairs_;
  std::vector<Layer> layers_;
  std::vector<double> protection_;
  bool prompted_ = false;
  int prompt_rows_ = 0;
  size_t rows_ = 0;
  size_t added_ = 0;
};

}  // namespace kvlm::reference
