#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/sample.h"
#include "llm/logit_rules.h"

namespace kvlm {

/// How the next token is chosen from logits, in the order of the reference: repetition penalty,
/// temperature, top-k, top-p, draw.
struct SamplerOptions {
  double temperature = 0;         ///< 0 is greedy: the first maximum
  int top_k = 0;                  ///< keep the k largest; 0 keeps all
  double top_p = 1;               ///< keep the smallest set that reaches this probability
  double repetition_penalty = 1;  ///< CTRL's penalty on every distinct id seen so far
  uint64_t seed = 0;
  LogitRuleOptions rules;  ///< what may not come next, before everything else
};

/// Chooses tokens for one sequence: what it asks of the logits, what it has seen, and its random
/// numbers. The logits of many sequences lie on a device, where sample_rows() chooses for all:
///
///   samplers[i].restrict(logits.slice(i, 1), stream);
///   rows[i] = samplers[i].next(stream);
///   sample_rows(ids, logits, rows, stream);
///   samplers[i].accept(ids[i]);
///
/// Allocates nothing after construction but, for a penalty on a GPU, in the first next(), for
/// rules, and in the first sample() that draws. Source of the penalty: Keskar et al. 2019, "CTRL",
/// sec. 4.1; of top-p: Holtzman et al. 2020.
class Sampler {
 public:
  Sampler(const SamplerOptions& options, int vocab_size);

  /// Marks ids as seen, for the repetition penalty: the prompt (image placeholders included). At
  /// most max_tokens are generated after it, which only rules need to know.
  void see(std::span<const int32_t> ids, int max_tokens = 0);

  /// Makes what the rules forbid impossible. `row` (1, vocab_size) f32 on the stream's device.
  void restrict(TensorView row, Stream& stream);

  /// The next choice, for logits on the device of `stream`; valid until see() or the sampler's end.
  RowSampling next(Stream& stream);
  /// Takes the id that sample_rows() has chosen by next(), and marks it as seen. Throws
  /// Error{kCorruptFile} on kNoToken.
  void accept(int32_t id);

  /// The next token from logits on the host; does not mark it. `logits` (vocab_size,) is
  /// overwritten. Throws like accept().
  int32_t sample(std::span<float> logits);

 private:
  RowSampling choice();
  void mark(int32_t id) noexcept;
  void place(Stream& stream);

  SamplerOptions options_;
  int vocab_size_;
  std::mt19937_64 random_;
  std::vector<uint32_t> seen_;      // (ceil(vocab_size / 32),) bits
  Buffer placed_;                   // the same on a GPU, where sample_rows() marks what it chooses
  bool placed_is_current_ = false;  // it has what see() has marked
  std::optional<LogitRules> rules_;
  std::vector<int32_t> order_;  // (vocab_size,) workspace of sample(), if it draws
};

}  // namespace kvlm
