#include "tools/kv/value_survey.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "kernels/base/error.h"
#include "kernels/pack.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"

namespace kvlm {

void ValueCounts::add(float value) {
  low = count == 0 ? value : std::min(low, value);
  high = count == 0 ? value : std::max(high, value);
  ++count;
  const double at = std::floor((static_cast<double>(value) - kLow) / kWidth);
  ++bins[static_cast<size_t>(std::clamp(at, 0.0, static_cast<double>(kBins - 1)))];
}

ValueSurvey::ValueSurvey(int layers, int kv_heads, int head_dim)
    : layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim) {
  if (layers < 1 || kv_heads < 1 || head_dim < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a survey of {} layers, {} KV heads and {} channels; expected some of "
                            "each",
                            layers, kv_heads, head_dim));
  }
  CacheShape shape;
  shape.layers = 1;
  shape.q_heads = shape.kv_heads = 1;
  shape.head_dim = head_dim;
  const auto plan = plan_cache(parse_spec("kivi,bits=2"), shape);
  for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
    packings_[static_cast<size_t>(side)] = plan->packers[0].quantizer->packing(side, 0);
  }
  const size_t sets = static_cast<size_t>(layers) * 2 * kBoth;
  counts_.resize(sets * static_cast<size_t>(kv_heads));
  const size_t channels = static_cast<size_t>(kv_heads) * static_cast<size_t>(head_dim);
  magnitudes_.assign(sets, std::vector<double>(channels));
  distances_.resize(sets);
  codes_.resize(sets);
}

size_t ValueSurvey::index(int layer, KvSide side, Rows rows) const noexcept {
  return (static_cast<size_t>(layer) * 2 + static_cast<size_t>(side)) * kBoth + rows;
}

const ValueCounts& ValueSurvey::counts(int layer, KvSide side, Rows rows, int head) const {
  return counts_[index(layer, side, rows) * static_cast<size_t>(kv_heads_) +
                 static_cast<size_t>(head)];
}

double ValueSurvey::outlier_ratio(int layer, KvSide side, Rows rows) const {
  std::vector<double> sums = magnitudes_[index(layer, side, rows)];
  const auto middle = sums.begin() + static_cast<std::ptrdiff_t>((sums.size() - 1) / 2);
  std::nth_element(sums.begin(), middle, sums.end());
  return *middle == 0 ? 0 : *std::max_element(middle, sums.end()) / *middle;
}

const ValueSurvey::Distances& ValueSurvey::distances(int layer, KvSide side, Rows rows) const {
  return distances_[index(layer, side, rows)];
}

const ValueSurvey::Distances& ValueSurvey::codes(int layer, KvSide side, Rows rows) const {
  return codes_[index(layer, side, rows)];
}

void ValueSurvey::add_layer(int layer, std::span<const HeadRows> heads) {
  const auto dim = static_cast<size_t>(head_dim_);
  for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
    std::vector<Codes> codes;
    for (size_t head = 0; head < heads.size(); ++head) {
      const std::vector<float>& x = side == KvSide::kKeys ? heads[head].keys : heads[head].values;
      for (size_t i = 0; i < x.size(); ++i) {
        const Rows rows = heads[head].tags[i / dim] == kTextRow ? kTextRows : kVisualRows;
        const size_t at = index(layer, side, rows);
        counts_[at * static_cast<size_t>(kv_heads_) + head].add(x[i]);
        magnitudes_[at][head * dim + i % dim] += std::abs(static_cast<double>(x[i]));
      }
      codes.push_back(codes_of(side, x));
    }
    count(layer, side, codes, heads[0]);
    if (layer > 0) compare(layer - 1, side, codes, heads[0]);
    last_[static_cast<size_t>(side)] = std::move(codes);
  }
}

/// The codes of all rows, packed as KIVI packs a window: keys 32 rows at a time.
ValueSurvey::Codes ValueSurvey::codes_of(KvSide side, std::span<const float> x) const {
  const Packing& packing = packings_[static_cast<size_t>(side)];
  const auto dim = static_cast<size_t>(head_dim_);
  const size_t rows = x.size() / dim;
  const size_t block = packing.format.axis == ScaleAxis::kToken
                           ? std::max<size_t>(rows, 1)
                           : static_cast<size_t>(packing.format.block_rows);
  ThreadPool pool(1);
  Stream stream(pool);
  Codes codes;
  for (size_t first = 0; first < rows; first += block) {
    const auto count = static_cast<int>(std::min(block, rows - first));
    std::vector<std::byte> packed(static_cast<size_t>(count) * packing.format.row_bytes());
    std::vector<std::byte> scales(packing.format.meta_bytes(count));
    std::vector<std::byte> zeros(scales.size());
    const PackJob job{x.data() + first * dim, count, packed.data(), scales.data(), zeros.data()};
    pack(packing.format, packing.rules, {&job, 1}, stream);
    for (int row = 0; row < count; ++row) {
      const auto* at = reinterpret_cast<const uint8_t*>(packed.data()) +
                       static_cast<size_t>(row) * packing.format.row_bytes();
      for (int channel = 0; channel < head_dim_; ++channel) {
        codes.push_back(static_cast<uint8_t>(code_at(at, packing.format.section[0].code, channel)));
      }
    }
  }
  return codes;
}

void ValueSurvey::count(int layer, KvSide side, const std::vector<Codes>& codes,
                        const HeadRows& rows) {
  const auto dim = static_cast<size_t>(head_dim_);
  for (const Codes& head : codes) {
    for (size_t i = 0; i < head.size(); ++i) {
      const Rows of = rows.tags[i / dim] == kTextRow ? kTextRows : kVisualRows;
      ++codes_[index(layer, side, of)][head[i]];
    }
  }
}

void ValueSurvey::compare(int layer, KvSide side, const std::vector<Codes>& codes,
                          const HeadRows& rows) {
  const auto dim = static_cast<size_t>(head_dim_);
  const std::vector<Codes>& before = last_[static_cast<size_t>(side)];
  for (size_t head = 0; head < codes.size(); ++head) {
    for (size_t i = 0; i < codes[head].size(); ++i) {
      const Rows of = rows.tags[i / dim] == kTextRow ? kTextRows : kVisualRows;
      const int apart = std::abs(int{codes[head][i]} - int{before[head][i]});
      ++distances_[index(layer, side, of)][static_cast<size_t>(apart)];
    }
  }
}

}  // namespace kvlm
