#include "kvcache/formula.h"

#include <algorithm>

#include "kvcache/nominal.h"

// The stored bytes of every layer in closed form (docs/arithmetic.md, "Stored bits"): rows packed
// when the prompt ended, rows packed since, full rows, and what a policy keeps beside them.
namespace kvlm {

namespace {

/// Bytes of scales and zero points of `rows` rows packed at once.
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
struct Plane {
  int after_prompt = 0;  ///< rows packed when the prompt ended
  int in_decode = 0;     ///< rows packed since
  int full = 0;
  size_t codes = 0;
  size_t scales = 0;
};

/// Packed once, when the prompt ended, in as many blocks as there are sets of rows with scales.
Plane packed_once(const PackedFormat& format, int rows, int sets) {
  Plane plane;
  plane.after_prompt = rows;
  plane.codes = code_bytes(format, rows);
  const bool by_token = format.axis == ScaleAxis::kToken;
  plane.scales = scale_bytes(format, rows) *
                 static_cast<size_t>(by_token ? 1 : std::clamp(sets, 1, std::max(rows, 1)));
  return plane;
}

/// Packed as rows age: `rows` when the prompt ended, then `steps` more; `apart` of the first have
/// another format (VidKV's protected values).
Plane packed_by_age(const PartPlan& plan, const PartPlan* other, int apart, int rows, int steps) {
  const FlushRule& flush = plan.flush;
  Plane plane;
  plane.after_prompt = flush.packed_after_prompt(rows);
  plane.full = rows - plane.after_prompt + steps;
  if (steps > 0 && plane.full >= flush.trigger) {
    plane.in_decode = ((plane.full - flush.trigger) / flush.rows + 1) * flush.rows;
    plane.full -= plane.in_decode;
  }
  apart = std::min(apart, plane.after_prompt);
  const int alike = plane.after_prompt - apart;
  plane.codes = code_bytes(plan.format, alike + plane.in_decode);
  plane.scales = scale_bytes(plan.format, alike) + scale_bytes(plan.format, plane.in_decode);
  if (other != nullptr) {
    plane.codes += code_bytes(other->format, apart);
    plane.scales += scale_bytes(other->format, apart);
  }
  return plane;
}

/// How many of the visual rows VidKV protects.
int protected_rows(const Quantizer& quantizer, const LayerCounts& counts) {
  if (quantizer.protected_values() == nullptr) return 0;
  std::vector<int16_t> modality(static_cast<size_t>(counts.rows), kTextRow);
  std::fill_n(modality.begin(), counts.visual, int16_t{0});
  const std::vector<float> scores(modality.size());
  return static_cast<int>(quantizer.protect(scores, modality).size());
}

/// The layer uses another layer's codes.
bool shares(const ShareMap& share, Part part, int layer) {
  const std::vector<int>& owners = part == Part::kKeys ? share.key_owner : share.value_owner;
  return !owners.empty() && owners[static_cast<size_t>(layer)] != layer;
}

const Quantizer* quantizer_of(const CachePlan& plan, Scope scope, int layer) {
  return plan.quantizers[scope == Scope::kVisual ? kVisual : kRest][static_cast<size_t>(layer)];
}

/// What the rows of one scope in one layer become.
PartBytes bytes_of(const CachePlan& cache, int layer, Scope scope, const LayerCounts& counts) {
  const Quantizer* quantizer = quantizer_of(cache, scope, layer);
  const CacheShape& shape = cache.shape;
  const size_t row_bytes = static_cast<size_t>(shape.head_dim) * dtype_bytes(cache.rows);
  int rows = counts.rows;
  int steps = counts.steps;
  if (scope == Scope::kText) rows -= counts.visual;
  if (scope == Scope::kVisual) {
    rows = counts.visual;
    steps = 0;  // what is generated is text
  }
  const auto heads = static_cast<size_t>(shape.kv_heads);
  PartBytes bytes;
  if (quantizer == nullptr) {
    bytes.full_rows = 2 * heads * static_cast<size_t>(rows + steps) * row_bytes;
    return bytes;
  }
  const int apart = scope == Scope::kAll ? protected_rows(*quantizer, counts) : 0;
  for (const Part part : {Part::kKeys, Part::kValues}) {
    const bool keys = part == Part::kKeys;
    const PartPlan& plan = quantizer->plan(part, layer);
    const PartPlan* other = keys ? nullptr : quantizer->protected_values();
    const Plane plane =
        quantizer->visual_only()
            ? packed_once(plan.format, rows, quantizer->per_image() ? counts.images : 1)
            : packed_by_age(plan, other, keys ? 0 : apart, rows, steps);
    (keys ? bytes.key_codes : bytes.value_codes) =
        shares(cache.share, part, layer) ? 0 : heads * plane.codes;
    (keys ? bytes.key_scales : bytes.value_scales) = heads * plane.scales;
    bytes.full_rows += heads * static_cast<size_t>(plane.full) * row_bytes;
    const int packed = plane.after_prompt + plane.in_decode;
    if (keys && packed > 0) bytes.masks += quantizer->facts_bytes(shape.kv_heads);
    if (other != nullptr) {
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
  const bool keeps_weights = plan.retention != nullptr && plan.retention->needs().decode_weights;
  std::vector<PartBytes> layers(counts.size());
  for (size_t layer = 0; layer < counts.size(); ++layer) {
    for_each_scope(plan, [&](Scope scope) {
      layers[layer] += bytes_of(plan, static_cast<int>(layer), scope, counts[layer]);
    });
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
