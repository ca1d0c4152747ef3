#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvcache/policy.h"
#include "runtime/forced_run.h"
#include "tools/common/session.h"
#include "tools/kv/attention_probe.h"

namespace kvlm {

/// Pictures, videos and a question, and the text that a model is made to say about them.
struct ForcedRecord {
  std::string where;  ///< file and line, for messages
  std::vector<std::string> images;
  std::vector<std::string> videos;
  std::string prompt;  ///< empty: the model's captioning prompt
  std::string text;    ///< empty: what the model says greedily over its own f16 cache
};

/// Reads {"id", "image" | "images", "video" | "videos", "prompt"?, "text"?} lines. Paths are
/// relative to the file. Reads the first `most` of them; 0 is all. Throws Error{kCorruptFile}
/// naming the line.
std::vector<ForcedRecord> read_forced_records(const std::string& path, int most = 0);

/// The conversation of a record, its pictures and what is taken of its videos read and encoded.
/// Throws Error that starts with the record's place, also if the model has no positions for it.
EncodedPrompt encode_record(Session& session, const ForcedRecord& record,
                            const SamplingRequest& sampling);

/// How a policy's next-token distributions differ from those over plain f16 rows, on the same
/// forced text, from its second token on (the first is exact for every policy).
struct Fidelity {
  std::string spec;
  std::vector<double> kl;                ///< KL(f16 || policy) of every forced token, in nats
  size_t agreements = 0;                 ///< tokens at which both would choose the same
  double log_probability = 0;            ///< of the forced text
  double reference_log_probability = 0;  ///< of the same under f16
  double stored_bits = 0;                ///< summed over records
  double nominal_bits = 0;               ///< summed over records
  size_t bytes = 0;                      ///< summed over records
  int records = 0;
  std::vector<AttentionError> layers;  ///< (layers,)
  ScoreHistogram scores;

  double mean_kl() const;
  /// Of the mean, as if tokens were independent of each other.
  double kl_standard_error() const;
  /// Summed over layers.
  AttentionError attention() const;
  /// The value that `share` of the tokens do not exceed.
  double kl_quantile(double share) const;
  double top1() const;
  double perplexity() const;
  double reference_perplexity() const;
};

/// Runs records through a model once with plain rows and once with every policy.
class FidelityMeter {
 public:
  struct Policy {
    CacheSpec spec;
    PolicyProfile profile;
  };

  FidelityMeter(Session& session, int max_tokens, const SamplingRequest& sampling)
      : session_(session), max_tokens_(max_tokens), sampling_(sampling) {}

  /// Measures every policy over the records; `progress` is told how many are done, and ends the
  /// measurement early by returning false. With `layers` the attention error of every layer too.
  /// When the session's watch cancels, the results are those of the records that were done; throws
  /// Error{kCancelled} if there is none.
  std::vector<Fidelity> run(const std::vector<ForcedRecord>& records,
                            const std::vector<Policy>& policies, bool layers,
                            const std::function<bool(size_t)>& progress);

 private:
  void measure(const ForcedRecord& record, const std::vector<Policy>& policies, bool layers,
               std::vector<Fidelity>& results);

  Session& session_;
  int max_tokens_;
  SamplingRequest sampling_;
};

}  // namespace kvlm
