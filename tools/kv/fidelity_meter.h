#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "kvcache/plan/cache_plan.h"
#include "runtime/forced_run.h"
#include "tools/common/session.h"
#include "tools/kv/attention_probe.h"

namespace kvlm {

/// Pictures, videos and a question, and the text that a model is made to say about them.
struct ForcedRecord {
  std::string where;          ///< file and line, for messages
  nlohmann::ordered_json id;  ///< as the line has it; null if it has none
  std::vector<std::string> images;
  std::vector<std::string> videos;
  std::string prompt;  ///< empty: the model's captioning prompt
  std::string text;    ///< empty: what the model says greedily over its own f16 cache
};

inline constexpr int kMostForcedRecords = 1 << 20;  ///< of a file

/// Reads {"id", "image" | "images", "video" | "videos", "prompt"?, "text"?} lines. Paths are
/// relative to the file. Reads the first `most` of them; 0 is all. Throws Error{kCorruptFile}
/// naming the line.
std::vector<ForcedRecord> read_forced_records(const std::string& path, int most = 0);

/// Prints what is not as it should be in the checkpoint or in the prompts of the records.
void print_prompt_warnings(Session& session, std::span<const ForcedRecord> records);

/// Tokenizes a record's conversation and encodes its images and the sampled frames of its videos;
/// `warn`: prints the warnings of these files.
/// Throws Error that starts with the record's place, also if the model has no positions for it.
EncodedPrompt encode_record(Session& session, const ForcedRecord& record,
                            const SamplingRequest& sampling, bool warn = true);

/// The same of one record. Sums are over its compared tokens, in nats.
struct RecordFidelity {
  nlohmann::ordered_json id;
  std::vector<double> kl;
  size_t agreements = 0;
  double log_probability = 0;
  double reference_log_probability = 0;
};

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
  int layer_records = 0;               ///< those whose attention was looked at: `layers`, `scores`
  std::vector<AttentionError> layers;  ///< (layers,); empty if it was asked for of none
  ScoreHistogram scores;
  std::vector<RecordFidelity> each;  ///< (records,)

  double mean_kl() const;
  /// Of the mean, as if tokens were independent of each other.
  double kl_standard_error() const;
  /// Summed over layers.
  AttentionError attention() const;
  double kl_quantile(double share) const;
  double top1() const;
  double perplexity() const;
  double reference_perplexity() const;
};

/// The value that `share` of the tokens do not exceed; 0 of none.
double quantile(std::vector<double> values, double share);

/// A divergence for a table, with digits however small it is: "0.01234", "1.2e-07", "0".
std::string shown_kl(double nats);

/// Runs records through the reference once with plain rows and through a model once with every
/// policy, `batch_size` of them at a time, whose number changes no figure on the CPU. Held at a
/// time, for that many records: the encoded prompt; the logits of plain rows, (tokens, vocab) f32
/// on the host; room for the record in a plain cache, in one of every policy where its layers are
/// looked at, and in one more.
class FidelityMeter {
 public:
  static constexpr int kMostTogether = 4096;  ///< largest batch_size of the programs' options

  /// A policy, for the session's decoder.
  using Plan = std::shared_ptr<const CachePlan>;

  struct Settings {
    int max_tokens = 128;  ///< of a record's text
    SamplingRequest sampling = {};
    int batch_size = 1;
    int layer_records = 0;  ///< first of all records: the attention error of every layer too
    /// The model whose plain rows are the reference; null: the session's own. Of the same device
    /// and tokenizer; attention is not compared with it, so layer_records must be 0.
    Session* reference = nullptr;
  };

  /// Throws Error{kInvalidArgument} if the reference has another number of tokens.
  FidelityMeter(Session& session, const Settings& settings);

  /// Measures every policy over the records; `progress` is told how many are done, and ends the
  /// measurement early by returning false. When the session's watch cancels, the results are those
  /// of the batches that were done; throws Error{kCancelled} if there is none. Throws
  /// Error{kOutOfMemory} that names the batch if it does not fit.
  std::vector<Fidelity> run(const std::vector<ForcedRecord>& records,
                            const std::vector<Plan>& plans,
                            const std::function<bool(size_t)>& progress);

 private:
  struct Forced;

  void measure(std::span<const ForcedRecord> records, size_t looked_at,
               const std::vector<Plan>& plans, std::vector<Fidelity>& results);
  Forced prepare(const ForcedRecord& record);
  std::unique_ptr<KvCache> plain_cache(std::span<const Forced> batch);
  /// The logits that are expected, over the plain rows of `cache`. Returns what it called the
  /// records, which it has closed.
  std::vector<SequenceId> expect(std::span<Forced> batch, KvCache& cache);
  /// The same with every policy looking on: the layers too.
  void expect_layers(std::span<Forced> batch, const std::vector<Plan>& plans,
                     std::vector<Fidelity>& results);
  void compare(const std::vector<Forced>& batch, const Plan& plan, Fidelity& result);

  Session& session_;
  Session& reference_;
  Settings settings_;
  Plan plain_;  // f16 rows, for the reference's decoder
};

}  // namespace kvlm
