#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "runtime/chat_template.h"
#include "tools/serve/media.h"
#include "vision/frame_sampling.h"

namespace kvlm {

/// What a request may hold at most.
struct ChatLimits {
  size_t images = 64;
  size_t videos = 8;
  size_t text_bytes = size_t{4} << 20;
  size_t media_bytes = size_t{64} << 20;  ///< of one image or video
};

/// A picture or video as it was sent.
struct SentMedia {
  std::string name;  ///< for messages: "image 2"
  std::vector<std::byte> bytes;
};

/// The body of POST /v1/chat/completions.
struct ChatRequest {
  std::string model;  ///< empty: the served one
  std::vector<ChatMessage> messages;
  std::vector<SentMedia> images;  ///< in the order of their placeholders
  std::vector<SentMedia> videos;
  std::optional<std::string> kv;
  std::optional<int> max_tokens;
  std::optional<double> temperature, top_p, repetition_penalty;
  std::optional<int> top_k;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  std::optional<int> top_logprobs;  ///< asked for, with so many alternatives
  bool stream = false;
  bool include_usage = false;
  SamplingRequest frames;
  std::vector<std::string> ignored;  ///< keys that were not followed, in their order
};

/// The body of POST /v1/kv/explain without messages.
struct PromptRequest {
  std::string model;
  std::optional<std::string> kv;
  int tokens = 0;  ///< of the prompt
  int visual = 0;  ///< of them
  int max_tokens = 0;
};

/// Reads such a body. Throws ApiError that names the key.
PromptRequest parse_prompt_request(const nlohmann::json& body);

/// Reads a body; docs/serve.md has the keys. Throws ApiError that names the key.
ChatRequest parse_chat_request(const nlohmann::json& body, const ChatLimits& limits,
                               const MediaReader& media);

/// JSON of a body: one value, no duplicate keys, valid UTF-8. Throws ApiError.
nlohmann::json parse_body(const std::string& body);

}  // namespace kvlm
