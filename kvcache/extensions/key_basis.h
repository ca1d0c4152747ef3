#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "kernels/key_basis.h"
#include "kvcache/engine/float_space.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Keys that are packed in another basis (docs/formulas.md, "Mixed channels"). Learns the channel
/// order, and transforms keys before packing and queries before attention.
class KeyBasisChange {
 public:
  explicit KeyBasisChange(const CacheTraits& traits);

  /// Allocates for the queries of a step.
  void reserve(const Workload& load);
  /// Allocates for `rows` keys of `sequences` sequences that decode packs together.
  void reserve_keys(size_t rows, size_t sequences);

  /// Learns the channel order of a store from `rows` keys of every KV head, in one layer of some
  /// sequences.
  ///   keys  (sequences, kv_heads)
  void learn(const Quantizer& quantizer, std::span<LayerState* const> states, size_t store,
             std::span<const float* const> keys, int rows, Stream& stream);

  /// Begins a list of keys to transform, `rows` over all KV heads.
  void start_keys(size_t rows);
  /// Adds `rows` keys; returns the address of the result of change_keys().
  const float* add_keys(const float* keys, int rows, const HeadFacts& facts);
  void change_keys(const KeyBasis& basis, Stream& stream);

  /// Transformed queries; the address changes if reserve() grows the workspace.
  const float* queries() noexcept { return queries_.data(); }
  /// Address that add_queries() returns for KV head number `index`.
  float* queries_of(int layer, size_t store, size_t index) noexcept;
  /// Begins a list of a layer's queries.
  void start_queries(int layer) noexcept;
  /// Adds the queries of KV head number `index` of a step, to be transformed for the packed keys of
  /// `store`. Returns their address afterwards, or null if these keys are not transformed.
  const float* add_queries(int layer, size_t store, size_t index, const float* q,
                           const HeadFacts& facts);
  /// Transforms the listed queries of a layer; `q` is the array they are in.
  void change_queries(int layer, const float* q, Stream& stream);
  /// The same for the next step's queries on a GPU, if the list is unchanged.
  void change_queries_again(int layer, const float* q, Stream& stream);

 private:
  /// Copies keys to the host.
  std::span<const float* const> on_host(std::span<const float* const> keys, int rows,
                                        Stream& stream);

  const CacheTraits& traits_;
  FloatSpace keys_;     // transformed
  size_t changed_ = 0;  // floats used
  std::vector<BasisJob> key_jobs_;
  FloatSpace queries_;  // transformed: (KV heads of a step, stores, q_per_kv, head_dim)
  std::vector<std::array<std::vector<BasisJob>, kStores>> query_jobs_;  // (layers,)
  std::vector<std::array<BasisBatch, kStores>> query_batches_;          // (layers,) on a GPU
  std::vector<HeadFacts> facts_;                                        // (kv_heads,)
  std::vector<float> ends_;              // of channels, (2, sequences, kv_heads, head_dim)
  std::vector<float> on_host_;           // copies of keys on a GPU, for learn_rows()
  std::vector<const float*> host_keys_;  // (kv_heads,)
};

}  // namespace kvlm
