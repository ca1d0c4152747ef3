// A retention rule that is not part of kvlm: it keeps the tokens whose keys have the smallest L1
// norm, for each KV head by itself.
#include "mynorm.h"

#include <kvlm/policy.h>

#include <cmath>

namespace {

// ScoredRule keeps the tokens of the highest scores, and the first and last of the prompt. It also
// brings the options keep, sinks, last, head_shared and evict.
class MyNorm final : public kvlm::retention::ScoredRule {
 public:
  using ScoredRule::ScoredRule;

  // scores: (kv_heads, tokens), one for each key of a layer.
  void score(const kvlm::LayerRows& layer, std::span<double> scores,
             kvlm::Stream& stream) const override {
    const int channels = layer.shape->head_dim;
    double* score = scores.data();
    for (const kvlm::StoredRows& head : layer.keys) {
      const std::vector<float> keys = kvlm::rows_on_host(head, channels, stream);
      for (auto key = keys.begin(); key != keys.end(); key += channels) {
        double norm = 0;
        for (int i = 0; i < channels; ++i) norm += std::abs(key[i]);
        *score++ = -norm;
      }
    }
  }
};

}  // namespace

void register_mynorm() {
  kvlm::register_retention({{.name = "mynorm",
                             .source = "examples/custom_policy",
                             .stores = "the tokens with the smallest keys (L1 norm), per KV head",
                             .options = kvlm::retention::kScoredOptions},
                            kvlm::retention::make<MyNorm>});
}
