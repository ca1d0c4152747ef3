#include "kvcache/retention/scored.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

/// Keeps the tokens with the shortest keys: a key of small norm tends to get much attention. Uses
/// neither queries nor weights. Keeps floor(r N) tokens per kv_head; see ScoredRule.
///
/// Norms are of the stored keys, after RoPE, which does not change them. Departures: sinks and last
/// (profile=official: as in the reference, only the prompt's last token, which every rule keeps).
/// The paper keeps the first layers whole [G]; kvpress and we do not.
///
/// Source: Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache
/// Compression", 3 [P], as in NVIDIA/kvpress [K]; docs/formulas.md, "Knorm".
class Knorm final : public ScoredRule {
 public:
  using ScoredRule::ScoredRule;

  void score(const LayerRows& layer, std::span<double> scores, Stream& stream) const override {
    row_norms(layer.keys, layer.shape->head_dim, scores, stream);
    for (double& x : scores) x = -x;
  }
};

}  // namespace

const RetentionEntry knorm{
    {.name = "knorm",
     .kind = PartKind::kRetention,
     .source = "L2 norm, as in kvpress",
     .stores = "per KV head, the tokens whose keys have the smallest norm",
     .composes = "any quantizer; share=codes and xquant only with head_shared=on",
     .options = kScoredOptions,
     .example = "knorm,keep=0.5",
     .arxiv = "2406.11430"},
    make<Knorm>};

}  // namespace kvlm::retention
