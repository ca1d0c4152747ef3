#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/base/tensor.h"

namespace kvlm {

/// Which tokens generation_config.json forbids or demands, in its own terms.
struct LogitRuleOptions {
  int min_new_tokens = 0;                            ///< no end before this many tokens
  int min_length = 0;                                ///< the same, with the prompt's counted
  std::vector<int32_t> eos_ids = {};                 ///< what an end is
  std::vector<int32_t> suppress_tokens = {};         ///< never chosen
  std::vector<int32_t> begin_suppress_tokens = {};   ///< not chosen first
  std::vector<std::vector<int32_t>> bad_words = {};  ///< sequences that are not completed
  int no_repeat_ngram_size = 0;                  ///< no sequence this long comes twice; 0: any may
  std::optional<int32_t> forced_eos_token = {};  ///< the last token if nothing ended before

  bool empty() const noexcept;
};

/// The rules at work on one sequence. Of tokens that may not come next the logit becomes minus
/// infinity, before any penalty or draw, which is where the reference's processors of the same
/// names end up (those of one that is minus infinity stay so). Source: transformers 5.23,
/// generation/logits_process.py.
class LogitRules {
 public:
  /// max_tokens: after how many the sequence is cut, for forced_eos_token.
  LogitRules(LogitRuleOptions options, int vocab_size);

  /// Starts a sequence of at most max_tokens after this prompt (image placeholders included).
  void start(std::span<const int32_t> prompt, int max_tokens);
  /// Takes a generated token.
  void accept(int32_t id);

  /// Of the next token. `logits` (1, vocab_size) f32 on the stream's device. Asynchronous on CUDA.
  void apply(TensorView logits, Stream& stream);
  /// The same on the host. `logits` (vocab_size,).
  void apply(std::span<float> logits);

 private:
  void decide();
  void decide_end();
  void decide_words();
  void decide_ngrams();

  LogitRuleOptions options_;
  int vocab_size_;
  int max_tokens_ = 0;
  int generated_ = 0;
  std::vector<int32_t> context_;  // prompt and generated tokens

  std::vector<int32_t> banned_;    // of the next token
  std::optional<int32_t> forced_;  // the only one allowed
  std::vector<float> bias_;        // (vocab_size,) 0 or minus infinity
  bool bias_changed_ = true;       // placed_ is older
  Tensor placed_;                  // (1, vocab_size) the same where the logits are
};

}  // namespace kvlm
