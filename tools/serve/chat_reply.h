#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/generator.h"

namespace kvlm {

/// Properties of a request that its response repeats.
struct ReplyFacts {
  std::string id;           ///< "chatcmpl-..."
  int64_t created = 0;      ///< seconds since 1970
  std::string model;        ///< as it was asked for
  std::string fingerprint;  ///< of the build
  std::string kv;           ///< canonical spec
  int max_tokens = 0;       ///< that were allowed
  std::optional<uint64_t> seed;
  std::vector<std::string> ignored;
};

/// The entries of logprobs, token by token, of those that are part of an answer.
class LogprobList {
 public:
  /// `wanted`: whether the request asks for logprobs; else there are none.
  LogprobList(const Model& model, bool wanted) : model_(&model), wanted_(wanted) {}
  void add(std::span<const int32_t> tokens, std::span<const TokenLogprobs> logprobs);
  /// {"content": [...]} of what was added since the last call, as far as the answer `text` goes;
  /// null if none was asked for. `text` is the whole answer so far.
  nlohmann::ordered_json take(const std::string& text);

 private:
  nlohmann::ordered_json entry(int32_t token, float logprob) const;

  const Model* model_;
  bool wanted_;
  bool is_first_ = true;
  size_t bytes_ = 0;  // of the tokens that were taken
  std::vector<std::pair<int32_t, TokenLogprobs>> waiting_;
};

/// A whole answer. queue_ms: from the request to its place in the cache.
nlohmann::ordered_json reply_json(const ReplyFacts& facts, const GenerationResult& result,
                                  nlohmann::ordered_json logprobs, double queue_ms);

/// Events of a streamed answer, "data: JSON\n\n". `with_usage`: usage is asked for at the end.
std::string first_event(const ReplyFacts& facts, bool with_usage);
std::string text_event(const ReplyFacts& facts, bool with_usage, const std::string& text,
                       nlohmann::ordered_json logprobs);
std::string last_event(const ReplyFacts& facts, bool with_usage, const std::string& finish_reason,
                       nlohmann::ordered_json logprobs);
std::string usage_event(const ReplyFacts& facts, const GenerationResult& result, double queue_ms);
std::string event_of(const nlohmann::ordered_json& json);
inline constexpr const char* kDoneEvent = "data: [DONE]\n\n";

/// A new id: "chatcmpl-" and 24 hexadecimal digits.
std::string reply_id();

/// One line of JSON, ASCII escapes left alone; bytes that are not UTF-8 become U+FFFD.
std::string line_of(const nlohmann::ordered_json& json);

}  // namespace kvlm
