#include "kernels/expected_attention.h"

#include <algorithm>
#include <array>

#include "kvcache/retention/scored.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {
    kKeep,
    OptionInfo{.key = "future",
               .type = OptionInfo::Type::kInteger,
               .low = 1,
               .high = 65536,
               .standard = "512",
               .help = "positions after the prompt over which queries are predicted"},
    OptionInfo{.key = "covariance",
               .choices = "on|off",
               .standard = "on",
               .help = "on: predictions use the mean and covariance of the prompt's queries; off: "
                       "the mean alone"},
    OptionInfo{.key = "values",
               .choices = "on|off",
               .standard = "on",
               .help = "on: the expected attention is multiplied by the norm of the token's value; "
                       "off: it is not"},
    OptionInfo{.key = "epsilon",
               .type = OptionInfo::Type::kReal,
               .low = 0,
               .high = 1,
               .standard = "0",
               .help = "number added to the expected attention before it is multiplied"},
    kHeadShared,
    OptionInfo{.key = "sinks",
               .type = OptionInfo::Type::kInteger,
               .low = 0,
               .high = 1024,
               .standard = "4",
               .help = "first tokens of the prompt (attention sinks), which are always kept and "
                       "whose queries are not used"},
    kLast,
    kEvictIfAsked,
    kDistance,
};

/// Keeps the tokens that future queries are expected to attend to, if these are normally
/// distributed as the prompt's own: then the expected exponential of a score has a closed form in
/// the mean and the covariance of the queries (kernels/expected_attention.h). It is averaged over
/// the query heads of a kv_head and multiplied by the norm of the token's value. Keeps floor(r N)
/// tokens per kv_head; see ScoredRule.
///
/// Statistics are of queries before RoPE. The cache gets them after RoPE and rotates each back by
/// its position, the row's index [S]; that is exact up to rounding. If positions have several axes
/// (M-RoPE), queries are used as they are: averaged over the prompt's positions instead of future
/// ones [S]. Departures: the prompt's last tokens stay (last; profile=official: the last one). The
/// paper's score has the norm of the value's projection to the residual stream [P]; kvpress uses
/// the norm of the value, and so do we.
///
/// Source: Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention
/// from Future Queries Distribution" [P], as in NVIDIA/kvpress [K]; docs/formulas.md, "Expected
/// Attention".
class ExpectedAttention final : public ScoredRule {
 public:
  ExpectedAttention(const OptionValues& options, const PolicyContext& context)
      : ScoredRule(options, context),
        future_(options.integer("future")),
        covariance_(options.text("covariance") == "on"),
        values_(options.text("values") == "on"),
        epsilon_(options.real("epsilon")) {}

  ImportanceNeeds needs() const noexcept override {
    return {.row_scores = !identity(), .queries = !identity()};
  }

  void score(const LayerRows& layer, std::span<double> scores, Stream& stream) const override {
    const auto n = static_cast<int>(layer.queries.shape()[0]);
    const FutureQueries future{.first_row = std::min(eviction().ends.sinks, n - 1),
                               .positions = future_,
                               .covariance = covariance_,
                               .scale = layer.scale,
                               .frequencies = layer.shape->rope_frequencies};
    kvlm::expected_attention(future, layer.queries, layer.keys, scores, stream);
    if (!values_) return;
    std::vector<double> norms(scores.size());
    row_norms(layer.values, layer.shape->head_dim, norms, stream);
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = (scores[i] + epsilon_) * norms[i];
  }

 private:
  int future_;
  bool covariance_;
  bool values_;
  double epsilon_;
};

}  // namespace

const RetentionEntry expected_attention{
    {.name = "expected_attention",
     .kind = PartKind::kRetention,
     .source = "Expected Attention, as in kvpress",
     .stores = "per KV head, the tokens that future queries are expected to attend to",
     .composes = "any quantizer; share=codes and xquant only with head_shared=on",
     .options = kOptions,
     .example = "expected_attention,keep=0.5",
     .arxiv = "2510.00636"},
    make<ExpectedAttention>};

}  // namespace kvlm::retention
