#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kvcache/policy_cache.h"
#include "kvcache/spec.h"

namespace kvlm {

/// How far the attention of a policy is from that of plain rows, of one layer: sums over decode
/// steps of squared differences and of squared reference outputs.
struct AttentionError {
  double difference = 0;
  double visual_difference = 0;  ///< of the part of the output that visual slots contribute
  double text_difference = 0;
  double reference = 0;
  double slots = 0;  ///< summed over steps
  int steps = 0;
};

/// Stands in for a plain cache and answers as it does, and shows the same queries, keys and values
/// to caches of other policies: their error in each layer, without what errors of the layers before
/// have done to its input. Holds one sequence at a time.
class AttentionProbe final : public KvCache {
 public:
  AttentionProbe(std::unique_ptr<KvCache> reference,
                 std::vector<std::unique_ptr<PolicyCache>> policies);

  const CacheShape& shape() const noexcept override { return reference_->shape(); }
  const std::string& spec() const noexcept override { return reference_->spec(); }
  CacheNeeds needs() const noexcept override;
  SequenceId open(const SequenceSize& size, const std::string& who) override;
  void close(SequenceId sequence) noexcept override;
  void begin(std::span<const StepRows> step) override;
  void give_embeddings(ConstTensorView embeddings, Stream& stream) override;
  void attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream) override;
  void end(Stream& stream) override;
  int tokens(SequenceId sequence) const noexcept override { return reference_->tokens(sequence); }
  size_t bytes() const noexcept override { return reference_->bytes(); }
  CacheReport report(SequenceId sequence) const noexcept override {
    return reference_->report(sequence);
  }

  /// (policies, layers)
  const std::vector<std::vector<AttentionError>>& errors() const noexcept { return errors_; }

 private:
  /// Rows of one layer of the sequence, as plain f16 rows give them back.
  struct Rows {
    std::vector<std::vector<float>> keys, values;  // (kv_heads,)(slots * head_dim)
  };
  void note(size_t policy, int layer, const float* q, const float* got, const float* expected,
            float scale, Stream& stream);

  std::unique_ptr<KvCache> reference_;
  std::vector<std::unique_ptr<PolicyCache>> policies_;
  std::vector<SequenceId> ids_;
  std::vector<std::vector<StepRows>> steps_;
  std::span<const StepRows> step_;
  std::vector<Rows> rows_;     // (layers,)
  std::vector<int16_t> tags_;  // of the sequence's tokens
  std::vector<std::vector<AttentionError>> errors_;
  std::vector<float> query_, output_;
};

}  // namespace kvlm
