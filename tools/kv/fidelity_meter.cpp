#include "tools/kv/fidelity_meter.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <new>
#include <numeric>
#include <optional>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/spec/spec.h"
#include "runtime/clip_file.h"
#include "runtime/forced_run.h"
#include "runtime/placeholders.h"
#include "tools/common/input_text.h"
#include "tools/common/messages.h"
#include "tools/common/visual_options.h"
#include "tools/run/records.h"
#include "vision/image.h"

// Forces a text through a model once with plain rows and once with each policy, and compares what
// the model would have said at each token: mean KL divergence, top-1 agreement, perplexity, and
// through an AttentionProbe the error of attention itself. Also reads the records that say which
// text is forced.
namespace kvlm {

namespace {

constexpr size_t kMaxBytes = size_t{1} << 29;

/// Log probabilities of logits.
std::vector<double> log_softmax(std::span<const float> logits) {
  const auto top = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - top);
  const double shift = top + std::log(sum);
  std::vector<double> out(logits.size());
  std::transform(logits.begin(), logits.end(), out.begin(),
                 [&](float x) { return static_cast<double>(x) - shift; });
  return out;
}

int32_t best(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace

std::vector<ForcedRecord> read_forced_records(const std::string& path, int most) {
  const std::string name = "--data " + printable(path);
  const std::string text =
      read_input(path, kMaxBytes, "--data " + path, "a JSON Lines file of records");
  std::vector<Record> read =
      parse_list(text, path, std::filesystem::path(path).parent_path(), RecordUse::kForce);
  if (read.empty()) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} has no records; give JSON Lines with id and image", name));
  }
  if (most == 0 && read.size() > kMostForcedRecords) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} has more than {} records; give fewer", name, kMostForcedRecords));
  }
  if (most > 0 && read.size() > static_cast<size_t>(most)) read.resize(static_cast<size_t>(most));
  std::vector<ForcedRecord> records;
  for (Record& record : read) {
    if (!record.error.empty()) {
      throw Error(ErrorCode::kCorruptFile, fmt::format("{} {}", name, record.error));
    }
    records.push_back({fmt::format("{} line {}", name, record.line), std::move(record.id),
                       std::move(record.images), std::move(record.videos), std::move(record.prompt),
                       std::move(record.text)});
  }
  return records;
}

double Fidelity::mean_kl() const {
  if (kl.empty()) return 0;
  return std::accumulate(kl.begin(), kl.end(), 0.0) / static_cast<double>(kl.size());
}

double Fidelity::kl_standard_error() const {
  if (kl.size() < 2) return 0;
  const double mean = mean_kl();
  const double squares = std::accumulate(kl.begin(), kl.end(), 0.0, [&](double sum, double x) {
    return sum + (x - mean) * (x - mean);
  });
  const auto n = static_cast<double>(kl.size());
  return std::sqrt(squares / (n - 1) / n);
}

AttentionError Fidelity::attention() const {
  AttentionError sum;
  for (const AttentionError& layer : layers) sum.add(layer);
  return sum;
}

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
  return values[std::clamp<size_t>(rank, 1, values.size()) - 1];
}

std::string shown_kl(double nats) {
  if (nats == 0) return "0";
  return nats < 1e-3 ? fmt::format("{:.1e}", nats) : fmt::format("{:.5f}", nats);
}

double Fidelity::kl_quantile(double share) const { return quantile(kl, share); }

double Fidelity::top1() const {
  return kl.empty() ? 1 : static_cast<double>(agreements) / static_cast<double>(kl.size());
}

double Fidelity::perplexity() const {
  return kl.empty() ? 1 : std::exp(-log_probability / static_cast<double>(kl.size()));
}

double Fidelity::reference_perplexity() const {
  return kl.empty() ? 1 : std::exp(-reference_log_probability / static_cast<double>(kl.size()));
}

void print_prompt_warnings(Session& session, std::span<const ForcedRecord> records) {
  print_warnings(session.warnings());
  std::vector<ChatMessage> prompts;
  for (const ForcedRecord& record : records) prompts.push_back(user_message(record.prompt, 0, {}));
  print_warnings(foreign_placeholders(session.model(), prompts));
}

EncodedPrompt encode_record(Session& session, const ForcedRecord& record,
                            const SamplingRequest& sampling, bool warn) {
  try {
    Model& model = session.model();
    std::string prompt = record.prompt;
    if (prompt.empty()) {
      prompt = default_question(model, record.images.size(), record.videos.size());
    }
    const std::vector<ChatMessage> messages = {
        user_message(prompt, record.images.size(), model.image_token(), record.videos.size(),
                     model.video_token())};
    std::vector<Image> images;
    std::vector<PictureShape> shapes;
    for (const std::string& path : record.images) {
      images.push_back(load_image(path));
      shapes.push_back({images.back().height, images.back().width, images.back().name});
    }
    std::vector<OpenClip> open_clips;
    std::vector<Clip> clips;
    for (const std::string& path : record.videos) {
      open_clips.push_back(choose_frames(model, open_video(path), sampling));
      clips.push_back(open_clips.back().clip);
    }
    // Before the frames are decoded, of which there may be many.
    require_context(outline_prompt(model, messages, visual_texts(model, shapes, clips)), "", model,
                    model.decoder().max_positions(),
                    cure_of_long_prompt(clips, "use fewer images or a shorter prompt"));
    std::vector<DecodedClip> decoded;
    for (const OpenClip& open : open_clips) decoded.push_back(open.decode());
    for (const std::string& warning : warnings_of(images, decoded)) {
      if (warn) print_message("vlm-kv: warning: {}\n", warning);
    }
    return encode_prompt(model, messages, images, decoded, session.stream());
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: {}", record.where, error.what()));
  }
}

FidelityMeter::FidelityMeter(Session& session, const Settings& settings)
    : session_(session),
      reference_(settings.reference == nullptr ? session : *settings.reference),
      settings_(settings),
      plain_(plan_cache(parse_spec("f16"), reference_.model().decoder().cache_shape())) {
  const int tokens = session.model().decoder().vocab_size();
  const int expected = reference_.model().decoder().vocab_size();
  if (tokens != expected) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--reference {} has {} tokens and {} has {}; expected a model of the "
                            "same tokenizer",
                            reference_.model().name(), expected, session.model().name(), tokens));
  }
}

std::vector<Fidelity> FidelityMeter::run(const std::vector<ForcedRecord>& records,
                                         const std::vector<Plan>& plans,
                                         const std::function<bool(size_t)>& progress) {
  const auto layer_count = static_cast<size_t>(session_.model().decoder().cache_shape().layers);
  std::vector<Fidelity> results(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    results[i].spec = plans[i]->spec;
    results[i].layers.resize(settings_.layer_records > 0 ? layer_count : 0);
  }
  const auto batch_size = static_cast<size_t>(settings_.batch_size);
  const size_t looked_at = std::min(static_cast<size_t>(settings_.layer_records), records.size());
  for (size_t first = 0; first < records.size(); first += batch_size) {
    const size_t count = std::min(batch_size, records.size() - first);
    const std::vector<Fidelity> before = results;
    try {
      measure(std::span(records).subspan(first, count),
              std::clamp(looked_at, first, first + count) - first, plans, results);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kCancelled || first == 0) throw;
      return before;  // a record counts for every policy or for none
    }
    if (!progress(first + count)) break;
  }
  const bool compared = results.empty() || !results.front().kl.empty() || records.empty();
  if (!compared) {
    throw Error(ErrorCode::kInvalidArgument,
                "nothing was compared: every text has one token, and the first is exact under "
                "every policy; give longer texts");
  }
  return results;
}

/// A record on its way through the model.
struct FidelityMeter::Forced {
  const ForcedRecord* record;
  EncodedPrompt encoded;
  std::optional<EncodedPrompt> for_reference;  // where this is another model
  int max_tokens = 0;
  bool given = false;                        // its text is the record's, not the model's own
  std::vector<int32_t> tokens;               // of the text, as far as they are known
  std::vector<std::vector<float>> expected;  // (tokens, vocab) logits over plain rows

  int rows() const noexcept { return static_cast<int>(encoded.prompt.ids.size()) + max_tokens; }
};

namespace {

/// One forced token under a policy.
struct Compared {
  double kl = 0;
  bool agrees = false;
  double log_probability = 0;
  double reference_log_probability = 0;
};

Compared compare_logits(std::span<const float> expected, std::span<const float> got,
                        int32_t token) {
  const std::vector<double> p = log_softmax(expected);
  const std::vector<double> q = log_softmax(got);
  double kl = 0;
  for (size_t j = 0; j < p.size(); ++j) {
    if (p[j] > -700) kl += std::exp(p[j]) * (p[j] - q[j]);
  }
  const auto at = static_cast<size_t>(token);
  return {std::max(kl, 0.0), best(expected) == best(got), q[at], p[at]};
}

}  // namespace

/// Adds some records to the results of every policy, the first few of which are looked at layer by
/// layer.
void FidelityMeter::measure(std::span<const ForcedRecord> records, size_t looked_at,
                            const std::vector<Plan>& plans, std::vector<Fidelity>& results) {
  std::vector<Forced> batch;
  for (const ForcedRecord& record : records) batch.push_back(prepare(record));
  try {
    const std::span<Forced> first = std::span(batch).first(looked_at);
    const std::span<Forced> others = std::span(batch).subspan(looked_at);
    if (!first.empty()) expect_layers(first, plans, results);
    if (!others.empty()) expect(others, *plain_cache(others));
    for (size_t i = 0; i < plans.size(); ++i) compare(batch, plans[i], results[i]);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory || batch.size() == 1) throw;
    throw Error(error.code(),
                fmt::format("--batch-size {} does not fit, at {}: {}", settings_.batch_size,
                            records.front().where, error.what()));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("--batch-size {} does not fit in memory, at {}; give a smaller "
                            "--batch-size, or fewer --kv or --max-tokens",
                            settings_.batch_size, records.front().where));
  }
}

FidelityMeter::Forced FidelityMeter::prepare(const ForcedRecord& record) {
  Model& model = session_.model();
  Forced forced{&record, encode_record(session_, record, settings_.sampling), {}, 0, false, {}, {}};
  if (&reference_ != &session_) {
    forced.for_reference = encode_record(reference_, record, settings_.sampling, /*warn=*/false);
    if (forced.for_reference->prompt.ids != forced.encoded.prompt.ids) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: --reference {} turns the prompt into other tokens than {}; "
                              "expected a model of the same tokenizer, template and image sizes",
                              record.where, reference_.model().name(), model.name()));
    }
  }
  // As a generation would, the text ends where the model's positions do.
  const auto prompt_rows = static_cast<int>(forced.encoded.prompt.ids.size());
  const int positions =
      std::min(model.decoder().max_positions(), reference_.model().decoder().max_positions());
  forced.max_tokens = std::min(settings_.max_tokens, positions - prompt_rows);
  if (!record.text.empty()) {
    forced.tokens = model.tokenizer().encode(record.text, {.add_special_tokens = false});
    forced.tokens.resize(std::min(forced.tokens.size(), static_cast<size_t>(forced.max_tokens)));
  }
  forced.given = !forced.tokens.empty();
  return forced;
}

std::unique_ptr<KvCache> FidelityMeter::plain_cache(std::span<const Forced> batch) {
  size_t bytes = 0;
  for (const Forced& forced : batch) bytes += session_bytes(*plain_, forced.rows());
  return make_cache(plain_, bytes, reference_.device());
}

void FidelityMeter::expect_layers(std::span<Forced> batch, const std::vector<Plan>& plans,
                                  std::vector<Fidelity>& results) {
  std::vector<std::unique_ptr<PolicyCache>> onlookers;
  for (const Plan& plan : plans) {
    size_t bytes = 0;
    for (const Forced& forced : batch) bytes += SequenceBounds(*plan).session_bytes(forced.rows());
    onlookers.push_back(std::make_unique<PolicyCache>(plan, bytes, session_.device()));
  }
  AttentionProbe probe(plain_cache(batch), std::move(onlookers));
  for (const SequenceId id : expect(batch, probe)) {  // as one record at a time would add them
    for (size_t i = 0; i < plans.size(); ++i) {
      results[i].scores.add(probe.scores(id)[i]);
      for (size_t layer = 0; layer < results[i].layers.size(); ++layer) {
        results[i].layers[layer].add(probe.errors(id)[i][layer]);
      }
      ++results[i].layer_records;
    }
  }
}

std::vector<SequenceId> FidelityMeter::expect(std::span<Forced> batch, KvCache& cache) {
  Model& model = reference_.model();
  ForcedRun reference(model, cache, reference_.stream());
  const std::vector<int32_t>& eos = model.defaults().eos_ids;
  // Takes what is expected of a record's next token; whether the one after it is asked for.
  const auto take = [&](Forced& forced, std::span<const float> logits) {
    const size_t i = forced.expected.size();
    const size_t most =
        forced.given ? forced.tokens.size() : static_cast<size_t>(forced.max_tokens);
    forced.expected.emplace_back(logits.begin(), logits.end());
    if (!forced.given) forced.tokens.push_back(best(logits));
    const bool ended = std::find(eos.begin(), eos.end(), forced.tokens[i]) != eos.end();
    return !ended && i + 1 < most;
  };
  std::vector<SequenceId> ids;
  std::vector<size_t> running;
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto& encoded = batch[i].for_reference;
    ids.push_back(reference.join(encoded ? *encoded : batch[i].encoded, batch[i].max_tokens));
    if (take(batch[i], reference.logits(0))) running.push_back(i);
  }
  std::vector<ForcedRun::Token> next;
  while (!running.empty()) {
    next.clear();
    for (const size_t i : running) {
      next.push_back({ids[i], batch[i].tokens[batch[i].expected.size() - 1]});
    }
    reference.feed(next);
    std::vector<size_t> left;
    for (size_t row = 0; row < running.size(); ++row) {
      if (take(batch[running[row]], reference.logits(row))) left.push_back(running[row]);
    }
    running = std::move(left);
  }
  return ids;
}

void FidelityMeter::compare(const std::vector<Forced>& batch, const Plan& plan, Fidelity& result) {
  Model& model = session_.model();
  size_t bytes = 0;
  for (const Forced& forced : batch) bytes += session_bytes(*plan, forced.rows());
  const auto cache = make_cache(plan, bytes, session_.device());
  ForcedRun run(model, *cache, session_.stream());
  std::vector<SequenceId> ids;
  for (const Forced& forced : batch) ids.push_back(run.join(forced.encoded, forced.max_tokens));
  std::vector<std::vector<Compared>> compared(batch.size());
  std::vector<ForcedRun::Token> next;
  std::vector<size_t> running;
  for (size_t t = 1;; ++t) {
    next.clear();
    running.clear();
    for (size_t i = 0; i < batch.size(); ++i) {
      if (batch[i].expected.size() <= t) continue;
      running.push_back(i);
      next.push_back({ids[i], batch[i].tokens[t - 1]});
      compared[i].emplace_back();
    }
    if (running.empty()) break;
    run.feed(next);
    session_.stream().pool().parallel_for(running.size(), [&](size_t row, int) {
      const Forced& forced = batch[running[row]];
      compared[running[row]].back() =
          compare_logits(forced.expected[t], run.logits(row), forced.tokens[t]);
    });
  }
  // Record by record and token by token, so that sums do not depend on the batch.
  for (size_t i = 0; i < batch.size(); ++i) {
    RecordFidelity& record = result.each.emplace_back();
    record.id = batch[i].record->id;
    for (const Compared& token : compared[i]) {
      for (auto* of : {&result.kl, &record.kl}) of->push_back(token.kl);
      for (auto* of : {&result.agreements, &record.agreements}) *of += token.agrees ? 1 : 0;
      for (auto* of : {&result.log_probability, &record.log_probability}) {
        *of += token.log_probability;
      }
      for (auto* of : {&result.reference_log_probability, &record.reference_log_probability}) {
        *of += token.reference_log_probability;
      }
    }
    const CacheReport report = run.report(ids[i]);
    result.stored_bits += report.stored_bits;
    result.nominal_bits += report.nominal_bits;
    result.bytes += report.bytes;
    ++result.records;
  }
}

}  // namespace kvlm
