#include "runtime/loading/generation_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"
#include "runtime/loading/fields.h"

namespace kvlm {

namespace {

void append_ids(const ConfigReader& reader, std::string_view key, std::vector<int32_t>& ids) {
  const nlohmann::json& value = reader.raw(key);
  const auto append = [&](const nlohmann::json& entry) {
    if (!entry.is_number_integer() || entry.get<int64_t>() < 0 ||
        entry.get<int64_t>() > kMaxVocab) {
      reader.fail(key, "a token id or a list of token ids");
    }
    ids.push_back(entry.get<int32_t>());
  };
  if (value.is_array()) {
    for (const nlohmann::json& entry : value) append(entry);
  } else if (!value.is_null()) {
    append(value);
  }
}

/// Keys of generation_config.json that change what the reference generates and are not built, with
/// the values at which they change nothing. Whatever is not named in this file changes nothing in a
/// greedy or sampled generation of one sequence.
void refuse_unbuilt_generation(const ConfigReader& generation, bool samples) {
  const auto refuse = [&](std::string_view key) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: {} is not supported, and without it answers would differ; remove "
                            "the key from the file to run without it",
                            generation.path(), key));
  };
  const auto number_other_than = [&](std::string_view key, double neutral) {
    const nlohmann::json& value = generation.raw(key);
    if (value.is_null() || (value.is_number() && value.get<double>() == neutral)) return;
    refuse(key);
  };
  for (const char* key : {"num_beams", "num_beam_groups", "num_return_sequences",
                          "encoder_repetition_penalty", "guidance_scale"}) {
    number_other_than(key, 1);
  }
  for (const char* key : {"encoder_no_repeat_ngram_size", "penalty_alpha", "diversity_penalty"}) {
    number_other_than(key, 0);
  }
  for (const char* key :
       {"exponential_decay_length_penalty", "sequence_bias", "constraints", "force_words_ids",
        "watermarking_config", "dola_layers", "stop_strings", "max_time"}) {
    if (generation.has(key)) refuse(key);
  }
  if (generation.boolean("token_healing", false)) refuse("token_healing");
  if (generation.string("cache_implementation", "") == "quantized") refuse("cache_implementation");
  if (!samples) return;
  for (const char* key : {"typical_p", "top_h"}) number_other_than(key, 1);
  for (const char* key : {"epsilon_cutoff", "eta_cutoff", "min_p"}) number_other_than(key, 0);
}

std::vector<int32_t> ids_of(const ConfigReader& reader, std::string_view key) {
  std::vector<int32_t> ids;
  append_ids(reader, key, ids);
  return ids;
}

/// bad_words_ids: a list of lists of ids.
std::vector<std::vector<int32_t>> read_bad_words(const ConfigReader& generation) {
  constexpr std::string_view kKey = "bad_words_ids";
  const nlohmann::json& list = generation.raw(kKey);
  std::vector<std::vector<int32_t>> words;
  if (list.is_null()) return words;
  const auto is_id = [](const nlohmann::json& id) {
    return id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() <= kMaxVocab;
  };
  const auto is_word = [&](const nlohmann::json& word) {
    return word.is_array() && !word.empty() && std::all_of(word.begin(), word.end(), is_id);
  };
  if (!list.is_array() || !std::all_of(list.begin(), list.end(), is_word)) {
    generation.fail(kKey, "a list of lists of token ids");
  }
  for (const nlohmann::json& word : list) words.push_back(word.get<std::vector<int32_t>>());
  return words;
}

LogitRuleOptions parse_rules(const ConfigReader& generation, const std::vector<int32_t>& eos_ids) {
  LogitRuleOptions rules;
  const auto count = [&](std::string_view key) {
    return static_cast<int>(generation.integer(key, 0, 0, kMaxPositions));
  };
  rules.min_new_tokens = count("min_new_tokens");
  rules.min_length = count("min_length");
  rules.no_repeat_ngram_size = count("no_repeat_ngram_size");
  rules.eos_ids = eos_ids;
  rules.suppress_tokens = ids_of(generation, "suppress_tokens");
  rules.begin_suppress_tokens = ids_of(generation, "begin_suppress_tokens");
  rules.bad_words = read_bad_words(generation);
  const std::vector<int32_t> forced = ids_of(generation, "forced_eos_token_id");
  if (forced.size() > 1) generation.fail("forced_eos_token_id", "one token id");
  if (!forced.empty()) rules.forced_eos_token = forced.front();
  return rules;
}

}  // namespace

GenerationDefaults parse_generation(const ConfigReader& generation, const ConfigReader& model) {
  GenerationDefaults defaults;
  const ConfigReader text = model.object("text_config");
  for (const ConfigReader* reader : {&generation, &model, &text}) {
    const std::vector<int32_t> ids = ids_of(*reader, "eos_token_id");  // of each: none may be odd
    if (defaults.eos_ids.empty()) defaults.eos_ids = ids;
  }
  defaults.max_tokens =
      static_cast<int>(generation.integer("max_new_tokens", defaults.max_tokens, 1, kMaxPositions));
  const bool samples = generation.boolean("do_sample", false);
  refuse_unbuilt_generation(generation, samples);
  SamplerOptions& sampling = defaults.sampling;
  sampling.rules = parse_rules(generation, defaults.eos_ids);
  sampling.repetition_penalty = generation.number("repetition_penalty", 1, 1e-3, 1e3);
  if (samples) {
    sampling.temperature = generation.number("temperature", 1, 0, 1e3);
    sampling.top_k = static_cast<int>(generation.integer("top_k", 50, 0, kMaxVocab));
    sampling.top_p = generation.number("top_p", 1, 0, 1);
  }
  return defaults;
}

}  // namespace kvlm
