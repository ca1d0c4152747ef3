#include "runtime/key_biases.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>
#include <vector>

namespace kvlm {

namespace {

constexpr std::string_view kBias = "self_attn.k_proj.bias";
constexpr double kStepsOfSpread = 2.5;
/// Rows of k_proj that a KV head is judged by: the median of more differs little.
constexpr int kRowsSeen = 16;

float value_at(const ConstTensorView& view, int64_t i) {
  if (view.dtype() == DType::kF16) return to_float(view.as<f16>()[i]);
  if (view.dtype() == DType::kBF16) return to_float(view.as<bf16>()[i]);
  return view.as<float>()[i];
}

/// The layer of "...layers.N.self_attn.k_proj.bias", of the decoder.
std::optional<int> layer_of(std::string_view name) {
  constexpr std::string_view kLayers = "layers.";
  if (!name.ends_with(kBias) || name.find("vision") != std::string_view::npos) return std::nullopt;
  const size_t at = name.rfind(kLayers);
  if (at == std::string_view::npos) return std::nullopt;
  int layer = 0;
  const char* begin = name.data() + at + kLayers.size();
  const auto [end, status] = std::from_chars(begin, name.data() + name.size(), layer);
  if (status != std::errc() || std::string_view(end, 1) != ".") return std::nullopt;
  return layer;
}

/// The packer that gives the keys of a layer's channels a scale together, of the fewest bits; null
/// if there is none.
const CachePlan::Packer* mixing_packer(const CachePlan& plan, int layer) {
  const CachePlan::Packer* mixing = nullptr;
  const auto bits = [&](const CachePlan::Packer& packer) {
    return packer.quantizer->packing(KvSide::kKeys, layer).nominal_bits;
  };
  for (const Scope scope : {Scope::kAll, Scope::kVisual, Scope::kText}) {
    const CachePlan::Packer* packer = plan.packer(scope, layer);
    if (packer == nullptr || packer->quantizer == nullptr) continue;
    if (!packer->quantizer->packs(KvSide::kKeys)) continue;
    const Packing& packing = packer->quantizer->packing(KvSide::kKeys, layer);
    if (packing.nominal_bits >= 16 || packing.format.axis == ScaleAxis::kChannel) continue;
    if (mixing == nullptr || bits(*packer) < bits(*mixing)) mixing = packer;
  }
  return mixing;
}

/// The median of |w * g| over some rows of a KV head.
double typical_spread(const ConstTensorView& weight, const ConstTensorView& norm, int64_t first,
                      int head_dim) {
  const int64_t columns = norm.elements();
  const int step = std::max(1, head_dim / kRowsSeen);
  std::vector<double> spreads;
  for (int row = 0; row < head_dim; row += step) {
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const double product =
          double{value_at(weight, (first + row) * columns + i)} * double{value_at(norm, i)};
      sum += product * product;
    }
    spreads.push_back(std::sqrt(sum));
  }
  std::ranges::sort(spreads);
  return spreads[spreads.size() / 2];
}

/// The largest bias of a layer, in spreads of its KV head.
struct LoudBias {
  int layer = 0;
  double bias = 0;
  double spreads = 0;
};

std::optional<LoudBias> loudest_of(const WeightMap& weights, const std::string& name, int layer,
                                   const CacheShape& shape) {
  const std::string prefix = name.substr(0, name.size() - kBias.size());
  const auto bias = weights.find(name);
  const auto weight = weights.find(prefix + "self_attn.k_proj.weight");
  const auto norm = weights.find(prefix + "input_layernorm.weight");
  const int64_t rows = int64_t{shape.kv_heads} * shape.head_dim;
  // A file that does not fit is refused when the model takes its tensors.
  if (!bias || !weight || !norm || bias->elements() != rows ||
      weight->elements() != rows * norm->elements()) {
    return std::nullopt;
  }
  LoudBias loudest{.layer = layer};
  for (int head = 0; head < shape.kv_heads; ++head) {
    const int64_t first = int64_t{head} * shape.head_dim;
    double largest = 0;
    for (int64_t i = first; i < first + shape.head_dim; ++i) {
      largest = std::max(largest, std::fabs(double{value_at(*bias, i)}));
    }
    const double spread = typical_spread(*weight, *norm, first, shape.head_dim);
    if (spread > 0 && largest / spread > loudest.spreads) {
      loudest.bias = largest;
      loudest.spreads = largest / spread;
    }
  }
  return loudest;
}

}  // namespace

std::string loud_key_bias(const WeightMap& weights, const CachePlan& plan) {
  LoudBias loudest;
  const CachePlan::Packer* loser = nullptr;
  int layers = 0;
  for (const std::string& name : weights.remaining()) {
    const std::optional<int> layer = layer_of(name);
    if (!layer || *layer >= plan.shape.layers) continue;
    const CachePlan::Packer* packer = mixing_packer(plan, *layer);
    if (packer == nullptr) continue;
    const auto found = loudest_of(weights, name, *layer, plan.shape);
    if (!found) continue;
    const double bits = packer->quantizer->packing(KvSide::kKeys, *layer).nominal_bits;
    // A rotation shares a channel's bias out among all.
    const bool shares = plan.rotated(*layer) != Rotated::kNothing;
    const double shared = shares ? std::sqrt(plan.shape.head_dim) : 1;
    if (found->spreads / shared <= kStepsOfSpread * std::max(15.0, std::exp2(bits) - 1)) continue;
    ++layers;
    if (found->spreads <= loudest.spreads) continue;
    loudest = *found;
    loser = packer;
  }
  if (loser == nullptr) return "";
  return fmt::format(
      "{} gives all channels of a key one scale, and in {} of {} layers a bias of k_proj is too "
      "large for that (layer {}: {:.3g}, {:.0f} times the spread of a typical channel), so that "
      "answers may be wrong; use a policy with a scale per channel, such as kivi, or f16",
      loser->part.name, layers, plan.shape.layers, loudest.layer, loudest.bias, loudest.spreads);
}

}  // namespace kvlm
