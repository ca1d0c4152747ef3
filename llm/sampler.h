#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace kvlm {

/// How the next token is chosen from logits, in the order of the reference: repetition penalty,
/// temperature, top-k, top-p, draw.
struct SamplerOptions {
  double temperature = 0;         ///< 0 is greedy: the first maximum
  int top_k = 0;                  ///< keep the k largest; 0 keeps all
  double top_p = 1;               ///< keep the smallest set that reaches this probability
  double repetition_penalty = 1;  ///< CTRL's penalty on every distinct id seen so far
  uint64_t seed = 0;
};

/// Chooses tokens for one sequence. Allocates nothing after construction.
/// Source of the penalty: Keskar et al. 2019, "CTRL", sec. 4.1; of top-p: Holtzman et al. 2020.
class Sampler {
 public:
  Sampler(const SamplerOptions& options, int vocab_size);

  /// Marks ids as seen, for the repetition penalty: the prompt (image placeholders included), then
  /// each generated token.
  void see(std::span<const int32_t> ids);
  /// The next token. `logits` (vocab_size,) is overwritten.
  int32_t sample(std::span<float> logits);

 private:
  int32_t draw(std::span<float> logits);

  SamplerOptions options_;
  std::mt19937_64 random_;
  std::vector<bool> seen_;
  std::vector<int32_t> order_;  // (vocab_size,) workspace
};

}  // namespace kvlm
