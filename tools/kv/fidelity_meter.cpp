#include "tools/kv/fidelity_meter.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/registry.h"
#include "runtime/clip_file.h"
#include "runtime/forced_run.h"
#include "runtime/loading/config.h"
#include "tools/common/lines.h"
#include "tools/common/visual_options.h"
#include "vision/image.h"

namespace kvlm {

namespace {

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

constexpr size_t kMostRecords = size_t{1} << 20;

std::string resolved(const std::filesystem::path& folder, const std::string& path) {
  return std::filesystem::path(path).is_absolute() ? path : (folder / path).string();
}

/// The paths under `one` and in the list under `many`.
std::vector<std::string> read_paths(const ConfigReader& reader, const char* one, const char* many,
                                    const std::filesystem::path& folder) {
  std::vector<std::string> paths;
  if (reader.has(one)) paths.push_back(reader.required_string(one));
  const nlohmann::json& list = reader.raw(many);
  if (!list.is_null() && !list.is_array()) reader.fail(many, "a list of file names");
  for (const nlohmann::json& path : list) {
    if (!path.is_string()) reader.fail(many, "a list of file names");
    paths.push_back(path.get<std::string>());
  }
  for (std::string& path : paths) path = resolved(folder, path);
  return paths;
}

ForcedRecord parse_record(std::string_view line, const std::string& where,
                          const std::filesystem::path& folder) {
  const nlohmann::json json = parse_json(line, where);
  const ConfigReader reader(json, where);
  ForcedRecord record;
  record.where = where;
  record.images = read_paths(reader, "image", "images", folder);
  record.videos = read_paths(reader, "video", "videos", folder);
  record.prompt = reader.string("prompt", "");
  record.text = reader.string("text", "");
  return record;
}

}  // namespace

std::vector<ForcedRecord> read_forced_records(const std::string& path, int most) {
  const std::string name = "--data " + printable(path);
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::vector<ForcedRecord> records;
  for_each_line(path, name, [&](int number, std::string_view line) {
    if (line.find_first_not_of(" \t") == std::string_view::npos) return true;
    if (most == 0 && records.size() == kMostRecords) {
      throw Error(ErrorCode::kCorruptFile,
                  fmt::format("{} has more than {} records; give fewer", name, kMostRecords));
    }
    records.push_back(parse_record(line, fmt::format("{} line {}", name, number), folder));
    return records.size() != static_cast<size_t>(most);
  });
  if (records.empty()) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} has no records; give JSON lines with id and image", name));
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

double Fidelity::kl_quantile(double share) const {
  if (kl.empty()) return 0;
  std::vector<double> sorted = kl;
  std::sort(sorted.begin(), sorted.end());
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

double Fidelity::top1() const {
  return kl.empty() ? 1 : static_cast<double>(agreements) / static_cast<double>(kl.size());
}

double Fidelity::perplexity() const {
  return kl.empty() ? 1 : std::exp(-log_probability / static_cast<double>(kl.size()));
}

double Fidelity::reference_perplexity() const {
  return kl.empty() ? 1 : std::exp(-reference_log_probability / static_cast<double>(kl.size()));
}

EncodedPrompt encode_record(Session& session, const ForcedRecord& record,
                            const SamplingRequest& sampling) {
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
    return encode_prompt(model, messages, images, decoded, session.stream());
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: {}", record.where, error.what()));
  }
}

std::vector<Fidelity> FidelityMeter::run(const std::vector<ForcedRecord>& records,
                                         const std::vector<Policy>& policies, bool layers,
                                         const std::function<bool(size_t)>& progress) {
  const auto layer_count = static_cast<size_t>(session_.model().decoder().cache_shape().layers);
  std::vector<Fidelity> results(policies.size());
  for (size_t i = 0; i < policies.size(); ++i) {
    results[i].spec = canonical(policies[i].spec);
    results[i].layers.resize(layers ? layer_count : 0);
  }
  for (size_t number = 0; number < records.size(); ++number) {
    const std::vector<Fidelity> before = results;
    try {
      measure(records[number], policies, layers, results);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kCancelled || number == 0) throw;
      return before;  // a record counts for every policy or for none
    }
    if (!progress(number + 1)) break;
  }
  const bool compared = results.empty() || !results.front().kl.empty() || records.empty();
  if (!compared) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "nothing was compared: every text has one token, and the first is exact under every "
        "policy; give longer texts");
  }
  return results;
}

/// Adds one record to the results of every policy.
void FidelityMeter::measure(const ForcedRecord& record, const std::vector<Policy>& policies,
                            bool layers, std::vector<Fidelity>& results) {
  Model& model = session_.model();
  Stream& stream = session_.stream();
  const CacheShape shape = model.decoder().cache_shape();
  const CacheSpec plain = parse_spec("f16");
  const EncodedPrompt encoded = encode_record(session_, record, sampling_);
  // As a generation would, the text ends where the model's positions do.
  const int prompt_rows = static_cast<int>(encoded.prompt.ids.size());
  const int max_tokens = std::min(max_tokens_, model.decoder().max_positions() - prompt_rows);
  std::vector<int32_t> tokens;
  if (!record.text.empty()) {
    tokens = model.tokenizer().encode(record.text, {.add_special_tokens = false});
    tokens.resize(std::min(tokens.size(), static_cast<size_t>(max_tokens)));
  }
  const bool forced = !tokens.empty();
  const int rows = prompt_rows + max_tokens;

  // Plain rows, with every policy looking on.
  std::vector<std::unique_ptr<PolicyCache>> onlookers;
  std::vector<size_t> onlooker_of;
  for (size_t i = 0; i < policies.size() && layers; ++i) {
    CacheParts parts = parts_of(policies[i].spec, shape, &policies[i].profile);
    const size_t bytes = PolicyCache::session_bytes(parts, shape, rows);
    onlookers.push_back(
        std::make_unique<PolicyCache>(std::move(parts), shape, bytes, session_.device()));
  }
  AttentionProbe probe(
      make_cache(plain, shape, session_bytes(plain, shape, rows), session_.device()),
      std::move(onlookers));
  std::vector<std::vector<float>> expected;
  {
    ForcedRun reference(model, probe, encoded, max_tokens, stream);
    const std::vector<int32_t>& eos = model.defaults().eos_ids;
    const size_t most = forced ? tokens.size() : static_cast<size_t>(max_tokens);
    for (size_t i = 0; i < most; ++i) {
      expected.emplace_back(reference.logits().begin(), reference.logits().end());
      if (!forced) tokens.push_back(best(expected.back()));
      const bool ended = std::find(eos.begin(), eos.end(), tokens[i]) != eos.end();
      if (ended || i + 1 == most) break;
      reference.feed(tokens[i]);
    }
  }
  for (size_t i = 0; i < policies.size(); ++i) {
    if (layers) results[i].scores.add(probe.scores()[i]);
    for (size_t layer = 0; layer < results[i].layers.size(); ++layer) {
      results[i].layers[layer].add(probe.errors()[i][layer]);
    }
  }
  for (size_t i = 0; i < policies.size(); ++i) {
    Fidelity& result = results[i];
    const auto cache = make_cache(
        policies[i].spec, shape, session_bytes(policies[i].spec, shape, rows, &policies[i].profile),
        session_.device(), &policies[i].profile);
    ForcedRun run(model, *cache, encoded, max_tokens, stream);
    for (size_t t = 1; t < expected.size(); ++t) {
      run.feed(tokens[t - 1]);
      const std::vector<double> p = log_softmax(expected[t]);
      const std::vector<double> q = log_softmax(run.logits());
      double kl = 0;
      for (size_t j = 0; j < p.size(); ++j) {
        if (p[j] > -700) kl += std::exp(p[j]) * (p[j] - q[j]);
      }
      result.kl.push_back(std::max(kl, 0.0));
      result.agreements += best(expected[t]) == best(run.logits()) ? 1 : 0;
      const auto token = static_cast<size_t>(tokens[t]);
      result.log_probability += q[token];
      result.reference_log_probability += p[token];
    }
    const CacheReport report = run.report();
    result.stored_bits += report.stored_bits;
    result.nominal_bits += report.nominal_bits;
    result.bytes += report.bytes;
    ++result.records;
  }
}

}  // namespace kvlm
