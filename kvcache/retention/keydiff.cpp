#include "kvcache/retention/scored.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

/// Keeps the tokens whose keys differ most from the others: by their cosine to the mean of the
/// normalised keys of their kv_head. Keys in unusual directions tend to get attention. Uses neither
/// queries nor weights. Keeps floor(r N) tokens per kv_head; see ScoredRule.
///
/// Keys are those stored, after RoPE, as in the reference. Departures: sinks and last
/// (profile=official: only the prompt's last token, which every rule keeps). The paper reads a
/// prompt block by block and evicts to the budget after each [P]; kvpress selects once, at the end
/// of the prompt, and so do we.
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
