#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvcache/policy_cache.h"
#include "kvcache/spec/spec.h"

namespace kvlm {

/// Counts of scaled scores of visual slots, before the softmax: with exact keys, with the policy's
/// keys, and with those after the policy's remap (CalibQuant, figure 1).
struct ScoreHistogram {
  static constexpr double kLow = -20;
  static constexpr double kWidth = 0.5;
  static constexpr size_t kBins = 80;  ///< scores beyond the ends fall into the outer bins
  std::vector<int64_t> exact = std::vector<int64_t>(kBins);
  std::vector<int64_t> quantized = std::vector<int64_t>(kBins);
  std::vector<int64_t> calibrated = std::vector<int64_t>(kBins);

  static size_t bin(double score) noexcept {
    const double at = (score - kLow) / kWidth;
    return at <= 0 ? 0 : at >= kBins - 1 ? kBins - 1 : static_cast<size_t>(at);
  }
  void add(const ScoreHistogram& other) {
    for (size_t i = 0; i < kBins; ++i) {
      exact[i] += other.exact[i];
      quantized[i] += other.quantized[i];
      calibrated[i] += other.calibrated[i];
    }
  }
};

/// How far the attention of a policy is from that of plain rows, of one layer: sums over decode
/// steps of squared differences and of squared reference outputs.
struct AttentionError {
  double difference = 0;
  double visual_difference = 0;  ///< of the part of the output that visual slots contribute
  double text_difference = 0;
  double reference = 0;
  /// Of the softmax's weights (CalibQuant, figure 2): squared differences, and how many there are;
  /// none where slots were dropped.
  double weight_difference = 0;
  double weights = 0;
  double slots = 0;   ///< summed over steps
  double tokens = 0;  ///< fed so far, summed over steps
  int steps = 0;

  void add(const AttentionError& other) {
    difference += other.difference;
    visual_difference += other.visual_difference;
    text_difference += other.text_difference;
    reference += other.reference;
    weight_difference += other.weight_difference;
    weights += other.weights;
    slots += other.slots;
    tokens += other.tokens;
    steps += other.steps;
  }
};

/// Stands in for a plain cache and answers as it does, and shows the same queries, keys and values
/// to caches of other policies: their error in each layer, without what errors of the layers before
/// have done to its input. Each sequence has figures of its own, whatever its company.
class AttentionProbe final : public KvCache {
 public:
  /// The output of a query head, split by what contributes to it.
  struct Parts {
    std::vector<double> visual, text;      ///< (head_dim,)
    std::vector<double> scores, remapped;  ///< (slots,) before the softmax
    std::vector<double> weights;           ///< (slots,) behind it
  };

  AttentionProbe(std::unique_ptr<KvCache> reference,
                 std::vector<std::unique_ptr<PolicyCache>> policies);

  const CacheShape& shape() const noexcept override { return reference_->shape(); }
  const std::string& spec() const noexcept override { return reference_->spec(); }
  CacheNeeds needs() const noexcept override;
  bool fits(const SequenceSize& size) const override;
  SequenceId open(const SequenceSize& size, const std::string& who) override;
  /// Throws Error{kUnsupported}: errors are a sequence's own from its first row on.
  SequenceId fork(SequenceId parent, int max_rows, const std::string& who, Stream& stream) override;
  void close(SequenceId sequence) noexcept override;
  void begin(std::span<const StepRows> step, Stream& stream) override;
  void give_embeddings(ConstTensorView embeddings, Stream& stream) override;
  void attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream) override;
  /// Throws Error{kUnsupported}: it follows one pass at a time.
  void pause() override;
  void resume() override { pause(); }
  void end(Stream& stream) override;
  CachedLayer cached_prompt(SequenceId sequence, int layer, Stream& stream) override {
    return reference_->cached_prompt(sequence, layer, stream);
  }
  int tokens(SequenceId sequence) const noexcept override { return reference_->tokens(sequence); }
  size_t bytes() const noexcept override { return reference_->bytes(); }
  CacheReport report(SequenceId sequence) const noexcept override {
    return reference_->report(sequence);
  }

  /// Sum of squared differences of softmax weights, (slots,) each: those of `exact` come as the
  /// rows did, those of `held` with pictures first if they are stored apart. Nothing where a slot
  /// is missing or elsewhere.
  static std::optional<double> weight_difference(const std::vector<double>& exact,
                                                 const std::vector<int16_t>& came,
                                                 const std::vector<double>& held,
                                                 const std::vector<int16_t>& tags);

  /// (policies, layers), of a sequence; also after close(), until its id is given anew.
  const std::vector<std::vector<AttentionError>>& errors(SequenceId sequence) const noexcept {
    return at(sequence).errors;
  }
  /// (policies,), likewise.
  const std::vector<ScoreHistogram>& scores(SequenceId sequence) const noexcept {
    return at(sequence).scores;
  }

 private:
  struct Sequence {
    std::vector<SequenceId> ids;              // (policies,)
    std::vector<std::vector<HeadRows>> rows;  // (layers, kv_heads) as plain f16 rows
    std::vector<std::vector<AttentionError>> errors;
    std::vector<ScoreHistogram> scores;
  };
  /// One generated row: its queries, the exact output and the policy's, (q_heads, head_dim) each.
  struct Row {
    std::span<const float> q, exact, got;
    std::span<const Parts> parts;  // (q_heads,) of the exact output
  };

  Sequence& at(SequenceId id) noexcept { return sequences_[static_cast<size_t>(id)]; }
  const Sequence& at(SequenceId id) const noexcept { return sequences_[static_cast<size_t>(id)]; }
  void keep_rows(const StepRows& step, int layer, std::span<const float> k,
                 std::span<const float> v);
  void note(Sequence& sequence, size_t policy, int layer, const Row& row, float scale,
            Stream& stream);

  std::unique_ptr<KvCache> reference_;
  std::vector<std::unique_ptr<PolicyCache>> policies_;
  std::vector<std::vector<StepRows>> steps_;
  std::span<const StepRows> step_;
  std::vector<Sequence> sequences_;  // by the reference's ids
  std::vector<Tensor> outputs_;      // (policies,) of the newest attend()
};

}  // namespace kvlm
