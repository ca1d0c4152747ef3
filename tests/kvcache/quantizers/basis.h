#pragma once

#include <span>
#include <vector>

#include "kernels/key_basis.h"
#include "kvcache/quantizer.h"

namespace kvlm::test {

/// Rows in another basis, on the CPU.
inline void change_rows(const Quantizer& quantizer, BasisChange change, const HeadFacts& facts,
                        const float* from, int rows, float* to) {
  ThreadPool pool(1);
  Stream stream(pool);
  const BasisJob job{from, to, rows, facts.key_channels.data()};
  change_basis(*quantizer.key_basis(), change, {&job, 1}, stream);
}

/// What a quantizer learns from the keys of every kv_head, (rows, dim) each.
inline void learn_keys(const Quantizer& quantizer, std::span<const float* const> keys, int rows,
                       std::span<HeadFacts> facts) {
  ThreadPool pool(1);
  Stream stream(pool);
  if (quantizer.learns_from_rows()) return quantizer.learn_rows(keys, rows, facts);
  const int dim = quantizer.key_basis()->dim;
  std::vector<float> low(keys.size() * static_cast<size_t>(dim));
  std::vector<float> high(low.size());
  channel_ends(keys, rows, dim, low, high, stream);
  quantizer.learn(low, high, facts);
}

}  // namespace kvlm::test
