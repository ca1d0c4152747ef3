#include "kvcache/plan/formula.h"

#include <algorithm>

#include "kvcache/plan/nominal.h"

// Stored bytes of every layer in closed form (docs/formulas.md, "Stored bits"): tokens packed at
// the end of the prompt, tokens packed since, unpacked tokens, extension data.
namespace kvlm {

namespace {

/// Bytes of scales and zero points of `rows` tokens packed at once.
size_t scale_bytes(const PackedFormat& format, int rows) {
  if (rows == 0) return 0;
  if (format.axis == ScaleAxis::kToken) return static_cast<size_t>(rows) * format.meta_bytes(1);
  const int blocks =
      format.block_rows == 0 ? 1 : (rows + format.block_rows - 1) / format.block_rows;
  return static_cast<size_t>(blocks) * format.meta_bytes(1);
}

size_t code_bytes(const PackedFormat& format, int rows) {
  return static_cast<size_t>(rows) * format.row_bytes();
}

/// The keys or the values of one kv_head.
struct StoredRows {
  int after_prompt = 0;  ///< packed at the end of the prompt
  int in_decode = 0;     ///< packed since
  int full = 0;
  size_t codes = 0;
  size_t scales = 0;
};

/// Tokens packed once, at the end of the prompt, with `sets` sets of scales.
StoredRows packed_once(const PackedFormat& format, int rows, int sets) {
  StoredRows stored;
  stored.after_prompt = rows;
  stored.codes = code_bytes(format, rows);
  const bool by_token = format.axis == ScaleAxis::kToken;
  stored.scales = scale_bytes(format, rows) *
                  static_cast<size_t>(by_token ? 1 : std::clamp(sets, 1, std::max(rows, 1)));
  return stored;
}

/// Tokens packed by age: `rows` of the prompt, then `steps` more.
StoredRows packed_by_age(const Packing& packing, int rows, int steps) {
  const FlushRule& flush = packing.flush;
  StoredRows stored;
  stored.after_prompt = flush.packed_after_prompt(rows);
  stored.full = rows - stored.after_prompt + steps;
  if (steps > 0 && stored.full >= flush.trigger) {
    stored.in_decode = ((stored.full - flush.trigger) / flush.rows + 1) * flush.rows;
    stored.full -= stored.in_decode;
  }
  stored.codes = code_bytes(packing.format, stored.after_prompt + stored.in_decode);
  stored.scales = scale_bytes(packing.format, stored.after_prompt) +
                  scale_bytes(packing.format, stored.in_decode);
  return stored;
}

/// The tokens that VidKV protects, assumed to be the first visual ones.
std::vector<int32_t> protected_rows(const Quantizer& quantizer, const LayerCounts& counts) {
  const int text = counts.rows - counts.visual;
  const int behind = counts.text_behind < 0 ? text : std::min(text, counts.text_behind);
  std::vector<int16_t> modality(static_cast<size_t>(counts.rows), kTextRow);
  std::fill_n(modality.end() - (behind + counts.visual), counts.visual, int16_t{0});
  return quantizer.protect(std::vector<float>(modality.size()), modality);
}

/// Values packed by age, where protected ones have another format and buffer.
StoredRows protected_by_age(const Quantizer& quantizer, int layer, const LayerCounts& counts,
                            int rows, int steps) {
  const Packing& packing = quantizer.packing(KvSide::kValues, layer);
  const PackedFormat& apart = quantizer.protected_values()->format;
  const std::vector<int32_t> chosen = protected_rows(quantizer, counts);
  StoredRows stored = packed_by_age(packing, rows, steps);
  stored.codes = stored.scales = 0;
  // unprotected tokens in one block; repacking merges them
  int others = 0;
  const auto pack = [&](int first, int count) {
    const auto special =
        static_cast<int>(std::count_if(chosen.begin(), chosen.end(), [&](int32_t row) {
          return row >= first && row < first + count;
        }));
    if (!quantizer.repacks(KvSide::kValues)) {
      stored.scales += scale_bytes(packing.format, others);
      others = 0;
    }
    others += count - special;
    stored.codes += code_bytes(packing.format, count - special) + code_bytes(apart, special);
    stored.scales += scale_bytes(apart, special);
  };
  pack(0, stored.after_prompt);
  for (int flushed = 0; flushed < stored.in_decode; flushed += packing.flush.rows) {
    pack(stored.after_prompt + flushed, packing.flush.rows);
  }
  stored.scales += scale_bytes(packing.format, others);
  return stored;
}

/// The layer uses another layer's codes.
bool shares(const ShareMap& share, KvSide side, int layer) {
  const std::vector<int>& owners = side == KvSide::kKeys ? share.key_owner : share.value_owner;
  return !owners.empty() && owners[static_cast<size_t>(layer)] != layer;
}

const Quantizer* quantizer_of(const CachePlan& plan, Scope scope, int layer) {
  return plan.quantizers[scope == Scope::kVisual ? kVisual : kRest][static_cast<size_t>(layer)];
}

/// Bytes of one scope in one layer.
PartBytes bytes_of(const CachePlan& cache, int layer, Scope scope, const LayerCounts& counts) {
  const Quantizer* quantizer = quantizer_of(cache, scope, layer);
  const CacheShape& shape = cache.shape;
  const size_t row_bytes = static_cast<size_t>(shape.head_dim) * dtype_bytes(cache.rows);
  int rows = counts.rows;
  int steps = counts.steps;
  if (scope == Scope::kText) rows -= counts.visual;
  if (scope == Scope::kVisual) {
    rows = counts.visual;
    steps = 0;  // generated tokens are text
  }
  const auto heads = static_cast<size_t>(shape.kv_heads);
  PartBytes bytes;
  if (quantizer == nullptr) {
    bytes.full_rows = 2 * heads * static_cast<size_t>(rows + steps) * row_bytes;
    return bytes;
  }
  for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
    const bool keys = side == KvSide::kKeys;
    if (!quantizer->packs(side)) {
      bytes.full_rows += heads * static_cast<size_t>(rows) * row_bytes;
      continue;
    }
    const Packing& packing = quantizer->packing(side, layer);
    const bool protects = !keys && quantizer->protected_values() != nullptr;
    const StoredRows stored =
        quantizer->visual_only()
            ? packed_once(packing.format, rows, quantizer->per_image() ? counts.images : 1)
        : protects ? protected_by_age(*quantizer, layer, counts, rows, steps)
                   : packed_by_age(packing, rows, steps);
    (keys ? bytes.key_codes : bytes.value_codes) =
        shares(cache.share, side, layer) ? 0 : heads * stored.codes;
    (keys ? bytes.key_scales : bytes.value_scales) = heads * stored.scales;
    bytes.full_rows += heads * static_cast<size_t>(stored.full) * row_bytes;
    const int packed = stored.after_prompt + stored.in_decode;
    if (keys && packed > 0) bytes.masks += quantizer->facts_bytes(shape.kv_heads);
    if (protects) {
      const bool per_head = cache.retention != nullptr && cache.retention->per_head();
      bytes.masks += (per_head ? heads : 1) * static_cast<size_t>(packed + 7) / 8;
    }
  }
  return bytes;
}

template <class Visit>
void for_each_scope(const CachePlan& plan, const Visit& visit) {
  if (plan.split) {
    visit(Scope::kVisual);
    visit(Scope::kText);
  } else {
    visit(Scope::kAll);
  }
}

}  // namespace

PartBytes& PartBytes::operator+=(const PartBytes& other) noexcept {
  key_codes += other.key_codes;
  key_scales += other.key_scales;
  value_codes += other.value_codes;
  value_scales += other.value_scales;
  full_rows += other.full_rows;
  masks += other.masks;
  weights += other.weights;
  return *this;
}

std::vector<PartBytes> formula(const CachePlan& plan, std::span<const LayerCounts> counts) {
  const bool keeps_weights = plan.retention != nullptr && plan.retention->needs().decode_weights !=
                                                              ImportanceNeeds::DecodeWeights::kNone;
  std::vector<PartBytes> layers(counts.size());
  for (size_t layer = 0; layer < counts.size(); ++layer) {
    for_each_scope(plan, [&](Scope scope) {
      layers[layer] += bytes_of(plan, static_cast<int>(layer), scope, counts[layer]);
    });
    if (counts[layer].dropped && plan.retention != nullptr) {
      const auto sinks = static_cast<size_t>(plan.retention->most_sinks());
      layers[layer].full_rows += sizeof(float) * static_cast<size_t>(plan.shape.kv_heads) * sinks *
                                 static_cast<size_t>(plan.shape.head_dim);
    }
    if (keeps_weights) {
      layers[layer].weights = sizeof(float) * static_cast<size_t>(plan.shape.kv_heads) *
                              static_cast<size_t>(counts[layer].rows + counts[layer].steps);
    }
  }
  return layers;
}

double nominal_bits(const CachePlan& plan, std::span<const LayerCounts> counts) {
  LayerCounts sum;
  for (const LayerCounts& layer : counts) {
    sum.rows += layer.rows + layer.steps;
    sum.visual += layer.visual;
  }
  std::vector<ScopeClaim> scopes;
  for_each_scope(plan, [&](Scope scope) {
    const int slots = scope == Scope::kVisual ? sum.visual
                      : scope == Scope::kText ? sum.rows - sum.visual
                                              : sum.rows;
    scopes.push_back(
        {plan.quantizers[scope == Scope::kVisual ? kVisual : kRest], static_cast<double>(slots)});
  });
  return nominal_bits(scopes, plan.rows, plan.share);
}

}  // namespace kvlm
