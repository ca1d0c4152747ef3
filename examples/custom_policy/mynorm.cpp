// A retention rule that is not part of kvlm: it keeps the tokens whose values have the largest L1
// norm, for each KV head by itself. A token with a small value adds little to any output.
#include "mynorm.h"

#include <kvlm/policy.h>

#include <cmath>

namespace {

// ScoredRule keeps the tokens of the highest scores, and the first and last of the prompt. It also
// brings the options keep, sinks, last, head_shared, evict and distance.
class MyNorm final : public kvlm::retention::ScoredRule {
 public:
  using ScoredRule::ScoredRule;

  // scores: (kv_heads, tokens), one for each token that a layer holds.
  void score(const kvlm::LayerRows& layer, std::span<double> scores,
             kvlm::Stream& stream) const override {
    const int channels = layer.shape->head_dim;
    double* score = scores.data();
    for (const kvlm::StoredRows& head : layer.values) {
      const std::vector<float> values = kvlm::rows_on_host(head, channels, stream);
      for (auto value = values.begin(); value != values.end(); value += channels) {
        double norm = 0;
        for (int i = 0; i < channels; ++i) norm += std::abs(value[i]);
        *score++ = norm;
      }
    }
  }
};

}  // namespace

void register_mynorm() {
  kvlm::register_retention({{.name = "mynorm",
                             .source = "examples/custom_policy",
                             .stores = "per KV head, the tokens with the largest values (L1 norm)",
                             .options = kvlm::retention::kScoredOptions},
                            kvlm::retention::make<MyNorm>});
}
