#include "tools/serve/chat_reply.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "llm/unicode.h"

namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

Json usage_json(const GenerationResult& result) {
  return {{"prompt_tokens", result.prompt_tokens},
          {"completion_tokens", result.tokens.size()},
          {"total_tokens", static_cast<size_t>(result.prompt_tokens) + result.tokens.size()},
          {"prompt_tokens_details", {{"cached_tokens", 0}}}};
}

Json kvlm_json(const ReplyFacts& facts, const GenerationResult& result, double queue_ms) {
  Json json{{"kv", facts.kv}, {"max_tokens", facts.max_tokens}};
  json["seed"] = facts.seed ? Json(*facts.seed) : Json();
  json["visual_tokens"] = result.visual_tokens;
  json["cache_bytes"] = result.cache.bytes;
  json["f16_bytes"] = result.cache.f16_bytes;
  json["stored_bits"] = result.cache.stored_bits;
  json["queue_ms"] = queue_ms;
  json["vision_ms"] = result.timings.vision_ms;
  json["prefill_ms"] = result.timings.prefill_ms;
  json["ttft_ms"] = queue_ms + result.timings.ttft_ms;
  json["decode_ms"] = result.timings.decode_ms;
  json["ignored"] = facts.ignored;
  return json;
}

Json head(const ReplyFacts& facts, const char* object) {
  return {{"id", facts.id},
          {"object", object},
          {"created", facts.created},
          {"model", facts.model},
          {"system_fingerprint", facts.fingerprint}};
}

std::string chunk(const ReplyFacts& facts, bool with_usage, Json delta, Json finish_reason,
                  Json logprobs = nullptr) {
  Json json = head(facts, "chat.completion.chunk");
  Json choice{{"index", 0}, {"delta", std::move(delta)}};
  choice["logprobs"] = std::move(logprobs);
  choice["finish_reason"] = std::move(finish_reason);
  json["choices"] = Json::array({std::move(choice)});
  if (with_usage) json["usage"] = nullptr;
  return event_of(json);
}

}  // namespace

void LogprobList::add(std::span<const int32_t> tokens, std::span<const TokenLogprobs> logprobs) {
  for (size_t i = 0; i < tokens.size(); ++i) waiting_.emplace_back(tokens[i], logprobs[i]);
}

Json LogprobList::entry(int32_t token, float logprob) const {
  const std::string bytes = model_->tokenizer().bytes_of(token);
  std::string text;
  const size_t read = append_lossy_utf8(text, bytes);
  if (read < bytes.size()) text += "\xEF\xBF\xBD";  // a part of a character
  Json list = Json::array();
  for (const char byte : bytes) list.push_back(static_cast<unsigned char>(byte));
  return {{"token", text}, {"logprob", logprob}, {"bytes", std::move(list)}};
}

Json LogprobList::take(const std::string& text) {
  if (!wanted_) return nullptr;
  Json content = Json::array();
  const std::vector<int32_t>& eos = model_->defaults().eos_ids;
  size_t taken = 0;
  for (const auto& [token, logprobs] : waiting_) {
    if (bytes_ >= text.size()) break;  // of a token whose text is held back, or cut off
    ++taken;
    if (std::ranges::find(eos, token) != eos.end()) continue;
    Json made = entry(token, logprobs.logprob);
    // A text does not begin with the space that its first token may have.
    if (is_first_ && made["bytes"].size() > 1 && made["bytes"][0] == 32 && text[0] != ' ') {
      made["bytes"].erase(0);
      made["token"] = made["token"].get<std::string>().substr(1);
    }
    is_first_ = false;
    bytes_ += made["bytes"].size();
    made["top_logprobs"] = Json::array();
    for (const auto& [id, logprob] : logprobs.top)
      made["top_logprobs"].push_back(entry(id, logprob));
    content.push_back(std::move(made));
  }
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(taken));
  return {{"content", std::move(content)}};
}

Json reply_json(const ReplyFacts& facts, const GenerationResult& result, Json logprobs,
                double queue_ms) {
  Json json = head(facts, "chat.completion");
  Json choice{{"index", 0},
              {"message", {{"role", "assistant"}, {"content", result.text}}},
              {"finish_reason", result.finish_reason}};
  choice["logprobs"] = std::move(logprobs);
  json["choices"] = Json::array({std::move(choice)});
  json["usage"] = usage_json(result);
  json["kvlm"] = kvlm_json(facts, result, queue_ms);
  return json;
}

std::string first_event(const ReplyFacts& facts, bool with_usage) {
  return chunk(facts, with_usage, {{"role", "assistant"}, {"content", ""}}, nullptr);
}

std::string text_event(const ReplyFacts& facts, bool with_usage, const std::string& text,
                       Json logprobs) {
  return chunk(facts, with_usage, {{"content", text}}, nullptr, std::move(logprobs));
}

std::string last_event(const ReplyFacts& facts, bool with_usage, const std::string& finish_reason,
                       Json logprobs) {
  return chunk(facts, with_usage, Json::object(), finish_reason, std::move(logprobs));
}

std::string usage_event(const ReplyFacts& facts, const GenerationResult& result, double queue_ms) {
  Json json = head(facts, "chat.completion.chunk");
  json["choices"] = Json::array();
  json["usage"] = usage_json(result);
  json["kvlm"] = kvlm_json(facts, result, queue_ms);
  return event_of(json);
}

std::string event_of(const Json& json) { return "data: " + line_of(json) + "\n\n"; }

std::string reply_id() {
  static thread_local std::mt19937_64 random(std::random_device{}());
  return fmt::format("chatcmpl-{:016x}{:08x}", random(), static_cast<uint32_t>(random()));
}

std::string line_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace kvlm
