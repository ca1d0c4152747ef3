#pragma once

#include <memory>
#include <string>

#include "kvcache/plan/planner.h"
#include "kvcache/quantizer.h"
#include "kvcache/spec/spec.h"

namespace kvlm::test {

inline CacheShape shape_of(int layers, int kv_heads, int head_dim) {
  CacheShape shape;
  shape.layers = layers;
  shape.q_heads = shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  return shape;
}

/// The quantizer of a spec with one quantizer part.
inline std::unique_ptr<Quantizer> quantizer(const std::string& spec, const CacheShape& shape,
                                            const PolicyProfile* profile = nullptr) {
  return std::move(plan_cache(parse_spec(spec), shape, profile)->packers.at(0).quantizer);
}

/// The papers' width of a spec: codes only, mean over keys, values and layers.
inline double nominal(const std::string& spec, const CacheShape& shape) {
  const std::unique_ptr<Quantizer> made = quantizer(spec, shape);
  double bits = 0;
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (const KvSide part : {KvSide::kKeys, KvSide::kValues}) {
      bits += made->packing(part, layer).nominal_bits;
    }
  }
  return bits / (2.0 * shape.layers);
}

}  // namespace kvlm::test
