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

/// Keys that are packed in a basis of their own (docs/formulas.md, "Mixed channels"): learns the
/// order of their channels, changes keys on their way into blocks, and queries that meet them.
class KeyBasisChange {
 public:
  explicit KeyBasisChange(const CacheTraits& traits);

  /// Room for the queries of a step.
  void reserve(const Workload& load);
  /// Room for `rows` keys of `sequences` sequences that are packed together in decode.
  void reserve_keys(size_t rows, size_t sequences);

  /// Learns the order of channels of a store from `rows` keys of every KV head, in a layer of some
  /// sequences.
  ///   keys  (sequences, kv_heads)
  void learn(const Quantizer& quantizer, std::span<LayerState* const> states, size_t store,
             std::span<const float* const> keys, int rows, Stream& stream);

  /// Begins a list of keys to be changed, `rows` over all KV heads.
  void start_keys(size_t rows);
  /// Adds `rows` keys; returns where they will be once change_keys() is done.
  const float* add_keys(const float* keys, int rows, const HeadFacts& facts);
  void change_keys(const KeyBasis& basis, Stream& stream);

  /// Where changed queries are, which moves when reserve() makes more room.
  const float* queries() noexcept { return queries_.data(); }
  /// Where add_queries() will put those of KV head number `index`; null as there.
  float* queries_of(int layer, size_t store, size_t index) noexcept;
  /// Begins the list of a layer's queries.
  void start_queries(int layer) noexcept;
  /// Adds the queries of KV head number `index` of a step; returns where they will be, changed for
  /// the packed keys of `store`. Null: these keys are as the model made them.
  const float* add_queries(int layer, size_t store, size_t index, const float* q,
                           const HeadFacts& facts);
  /// Changes a layer's queries, which lie from `q` on.
  void change_queries(int layer, const float* q, Stream& stream);
  /// The same for the queries of a later step on a GPU that lie as those did.
  void change_queries_again(int layer, const float* q, Stream& stream);

 private:
  /// The same keys where the host can read them.
  std::span<const float* const> on_host(std::span<const float* const> keys, int rows,
                                        Stream& stream);

  const CacheTraits& traits_;
  FloatSpace keys_;     // changed
  size_t changed_ = 0;  // floats of them
  std::vector<BasisJob> key_jobs_;
  FloatSpace queries_;  // changed: (KV heads of a step, stores, q_per_kv, head_dim)
  std::vector<std::array<std::vector<BasisJob>, kStores>> query_jobs_;  // (layers,)
  std::vector<std::array<BasisBatch, kStores>> query_batches_;          // (layers,) on a GPU
  std::vector<HeadFacts> facts_;                                        // (kv_heads,)
  std::vector<float> ends_;              // (2, sequences, kv_heads, head_dim) of channels
  std::vector<float> on_host_;           // keys that a GPU holds, for learn_rows()
  std::vector<const float*> host_keys_;  // (kv_heads,)
};

}  // namespace kvlm
