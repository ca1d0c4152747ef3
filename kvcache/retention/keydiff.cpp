#include "kvcache/retention/scored.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

/// Keeps the rows whose keys are least like the others: by their cosine to the mean of the
/// normalised keys of their kv_head. Keys that point elsewhere than most tend to get attention.
/// Neither queries nor weights are looked at. floor(r N) rows per kv_head; see ScoredRule.
///
/// Keys are taken as they are stored, after RoPE, as in the reference. Departures: sinks and last
/// (profile=official: none but the prompt's last row, which every rule keeps). The paper reads a
/// prompt block by block and brings the cache to its budget after each [P]; kvpress chooses once,
/// when the prompt has ended, and so do we.
///
/// Source: Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction" [P], as in
/// NVIDIA/kvpress [K]; docs/formulas.md, "KeyDiff".
class KeyDiff final : public ScoredRule {
 public:
  using ScoredRule::ScoredRule;

  void score(const LayerRows& layer, std::span<double> scores, Stream& stream) const override {
    cosines_to_mean(layer.keys, layer.shape->head_dim, scores, stream);
    for (double& x : scores) x = -x;
  }
};

}  // namespace

const RetentionEntry keydiff{
    {.name = "keydiff",
     .kind = PartKind::kRetention,
     .source = "KeyDiff, as in kvpress",
     .stores = "per KV head, the tokens whose keys are least similar to the mean key",
     .composes = "any quantizer; share=codes and xquant only with head_shared=on",
     .options = kScoredOptions,
     .example = "keydiff,keep=0.5",
     .arxiv = "2504.15364"},
    make<KeyDiff>};

}  // namespace kvlm::retention
