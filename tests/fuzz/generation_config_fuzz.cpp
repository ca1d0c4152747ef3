// generation_config.json as a hostile file: it is read into numbers that can be sampled with and
// ids that can be looked up, or refused in one readable sentence.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "runtime/loading/generation_config.h"
#include "tests/fuzz/readable_errors.h"

namespace {

using kvlm::fuzz::require;
using kvlm::fuzz::succeeds;

void require_ids(const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) require(id >= 0);
}

void require_sound(const kvlm::GenerationDefaults& defaults) {
  require(defaults.max_tokens > 0);
  require_ids(defaults.eos_ids);
  const kvlm::SamplerOptions& sampling = defaults.sampling;
  require(std::isfinite(sampling.temperature) && sampling.temperature >= 0);
  require(sampling.top_k >= 0 && sampling.top_p >= 0 && sampling.top_p <= 1);
  require(std::isfinite(sampling.repetition_penalty) && sampling.repetition_penalty > 0);
  const kvlm::LogitRuleOptions& rules = sampling.rules;
  require(rules.min_new_tokens >= 0 && rules.min_length >= 0 && rules.no_repeat_ngram_size >= 0);
  require_ids(rules.suppress_tokens);
  require_ids(rules.begin_suppress_tokens);
  for (const std::vector<int32_t>& word : rules.bad_words) {
    require(!word.empty());
    require_ids(word);
  }
  require(!rules.forced_eos_token || *rules.forced_eos_token >= 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  succeeds([&] {
    const nlohmann::json file = kvlm::parse_json(text, "generation_config.json");
    const kvlm::ConfigReader reader(file, "generation_config.json");
    // The same text in the place of config.json, which has eos ids too.
    require_sound(kvlm::parse_generation(reader, reader));
  });
  return 0;
}
