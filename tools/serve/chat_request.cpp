#include "tools/serve/chat_request.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string_view>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/strict_json.h"
#include "tools/serve/api_error.h"

// OpenAI's chat completions as harnesses and clients send them. Null is absence. A key that would
// change the answer and is not built is refused by name; any other unknown key is served and listed
// as ignored.
namespace kvlm {

namespace {

using nlohmann::json;

constexpr size_t kMostMessages = 1024;
constexpr size_t kMostStops = 16;
constexpr size_t kLongestStop = 256;
constexpr size_t kLongestSpec = 4096;
constexpr int kMostLogprobs = 20;

constexpr auto kAccepted = std::to_array<std::string_view>(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key",
     "safety_identifier"});
constexpr auto kRefused = std::to_array<std::string_view>(
    {"tools", "tool_choice", "functions", "function_call", "audio", "min_p", "best_of",
     "use_beam_search", "prediction", "reasoning_effort", "web_search_options"});

[[noreturn]] void refuse(const std::string& key, const std::string& what,
                         const char* code = "invalid_value") {
  throw ApiError(400, code, what, key);
}

/// "3", "\"5\"" or "a list", for messages.
std::string shown(const json& value) {
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() > 60 ? printable(text.substr(0, 60)) + "..." : printable(text);
}

/// An integer of a request. Throws ApiError.
int64_t integer(const std::string& key, const json& value, int64_t least, int64_t most) {
  const bool whole = value.is_number_integer() &&
                     !(value.is_number_unsigned() &&
                       value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()});
  const int64_t found = whole ? value.get<int64_t>() : 0;
  if (!whole || found < least || found > most) {
    refuse(key, fmt::format("{} is {}; expected an integer from {} to {}", key, shown(value), least,
                            most));
  }
  return found;
}

class Reader {
 public:
  Reader(const json& body, const ChatLimits& limits, const MediaReader& media)
      : body_(body), limits_(limits), media_(media) {}

  ChatRequest read() {
    if (!body_.is_object()) {
      refuse({}, fmt::format("the body is {}; send a JSON object with messages", shown(body_)));
    }
    const std::map<std::string_view, std::function<void(const std::string&, const json&)>> keys{
        {"model", [&](auto& key, auto& value) { request_.model = text(key, value, 256); }},
        {"messages", [&](auto&, auto& value) { read_messages(value); }},
        {"kv", [&](auto& key, auto& value) { request_.kv = text(key, value, kLongestSpec); }},
        {"max_tokens",
         [&](auto& key, auto& value) {
           if (!of("max_completion_tokens")) request_.max_tokens = count(key, value);
         }},
        {"max_completion_tokens",
         [&](auto& key, auto& value) { request_.max_tokens = count(key, value); }},
        {"temperature",
         [&](auto& key, auto& value) { request_.temperature = number(key, value, 0, 2); }},
        {"top_p",
         [&](auto& key, auto& value) {
           request_.top_p = number(key, value, std::numeric_limits<double>::min(), 1);
         }},
        {"top_k",
         [&](auto& key, auto& value) {
           const int64_t k = integer(key, value, -1, std::numeric_limits<int>::max());
           request_.top_k = k < 0 ? 0 : static_cast<int>(k);  // -1 is vLLM's word for all
         }},
        {"repetition_penalty",
         [&](auto& key, auto& value) {
           request_.repetition_penalty = number(key, value, std::numeric_limits<float>::min(), 1e6);
         }},
        {"seed",
         [&](auto& key, auto& value) {
           if (value.is_number_unsigned()) {
             request_.seed = value.template get<uint64_t>();
           } else {
             request_.seed =
                 static_cast<uint64_t>(integer(key, value, std::numeric_limits<int64_t>::min(),
                                               std::numeric_limits<int64_t>::max()));
           }
         }},
        {"stop", [&](auto& key, auto& value) { read_stop(key, value); }},
        {"stream", [&](auto& key, auto& value) { request_.stream = flag(key, value); }},
        {"stream_options", [&](auto& key, auto& value) { read_stream_options(key, value); }},
        {"logprobs",
         [&](auto& key, auto& value) {
           if (flag(key, value) && !request_.top_logprobs) request_.top_logprobs = 0;
         }},
        {"top_logprobs",
         [&](auto& key, auto& value) {
           const auto wanted = static_cast<int>(integer(key, value, 0, kMostLogprobs));
           const json* asked = of("logprobs");
           if (asked != nullptr && *asked == true) {
             request_.top_logprobs = wanted;
           } else if (wanted > 0) {
             refuse(key, "top_logprobs is given without logprobs; add \"logprobs\": true");
           }
         }},
        {"n", [&](auto& key, auto& value) { only(key, value, 1); }},
        {"presence_penalty", [&](auto& key, auto& value) { only(key, value, 0); }},
        {"frequency_penalty", [&](auto& key, auto& value) { only(key, value, 0); }},
        {"logit_bias",
         [&](auto& key, auto& value) {
           if (!value.empty()) unsupported(key);
         }},
        {"response_format",
         [&](auto& key, auto& value) {
           if (!value.is_object() || value.value("type", json()) != "text") {
             refuse(key, "response_format is not {\"type\": \"text\"}, the only one that is built",
                    "unsupported");
           }
         }},
        {"modalities",
         [&](auto& key, auto& value) {
           if (value != json::array({"text"})) unsupported(key);
         }},
        {"media_io_kwargs", [&](auto& key, auto& value) { read_frames(key, value); }},
    };
    for (const auto& [key, value] : body_.items()) {
      if (value.is_null()) continue;
      const auto known = keys.find(key);
      if (known != keys.end()) {
        known->second(key, value);
      } else if (std::ranges::find(kRefused, key) != kRefused.end() || key.starts_with("guided_")) {
        const bool nothing = value.empty() || value == false || value == "none";
        if (!nothing) unsupported(key);
      } else if (std::ranges::find(kAccepted, key) == kAccepted.end()) {
        ignore(printable(key));
      }
    }
    if (request_.messages.empty()) {
      refuse("messages", "messages is missing; send a list of at least one message");
    }
    return std::move(request_);
  }

 private:
  const json* of(const char* key) const {
    const auto found = body_.find(key);
    return found == body_.end() || found->is_null() ? nullptr : &*found;
  }
  void ignore(const std::string& key) {
    if (request_.ignored.size() < 64) request_.ignored.push_back(key.substr(0, 128));
  }
  [[noreturn]] static void unsupported(const std::string& key) {
    refuse(key,
           fmt::format("{} is not built here and would change the answer; leave it out",
                       printable(key)),
           "unsupported");
  }
  static void only(const std::string& key, const json& value, int allowed) {
    if (!value.is_number() || value.get<double>() != allowed) {
      refuse(key, fmt::format("{} is {}; {} alone is built", key, shown(value), allowed),
             "unsupported");
    }
  }
  static bool flag(const std::string& key, const json& value) {
    if (!value.is_boolean()) {
      refuse(key, fmt::format("{} is {}; expected true or false", key, shown(value)));
    }
    return value.get<bool>();
  }
  static double number(const std::string& key, const json& value, double least, double most) {
    const double found = value.is_number() ? value.get<double>() : std::nan("");
    if (!(found >= least && found <= most)) {
      refuse(key, fmt::format("{} is {}; expected a number {} {} and at most {}", key, shown(value),
                              least > 0 ? "above" : "of at least", least > 0 ? 0 : least, most));
    }
    return found;
  }
  static int count(const std::string& key, const json& value) {
    // Beyond any context: clamped all the same.
    const bool large = value.is_number_unsigned() &&
                       value.get<uint64_t>() > uint64_t{std::numeric_limits<int>::max()};
    if (large) return std::numeric_limits<int>::max();
    return static_cast<int>(integer(key, value, 1, std::numeric_limits<int>::max()));
  }
  std::string text(const std::string& key, const json& value, size_t most) {
    if (!value.is_string()) {
      refuse(key, fmt::format("{} is {}; expected text", key, shown(value)));
    }
    const auto& found = value.get_ref<const std::string&>();
    if (found.size() > most) {
      refuse(key, fmt::format("{} has {} bytes; at most {} are read", key, found.size(), most));
    }
    return found;
  }

  void read_stop(const std::string& key, const json& value) {
    const json list = value.is_array() ? value : json::array({value});
    if (list.size() > kMostStops) {
      refuse(key, fmt::format("stop has {} texts; at most {} are read", list.size(), kMostStops));
    }
    for (const json& stop : list) {
      request_.stop.push_back(text(key, stop, kLongestStop));
      if (request_.stop.back().empty()) refuse(key, "stop has an empty text; leave it out");
    }
  }
  void read_stream_options(const std::string& key, const json& value) {
    if (!value.is_object()) refuse(key, "stream_options is no object");
    for (const auto& [name, option] : value.items()) {
      if (name == "include_usage") {
        request_.include_usage = !option.is_null() && flag(key + ".include_usage", option);
      } else {
        ignore(fmt::format("stream_options.{}", printable(name)));
      }
    }
  }
  void read_frames(const std::string& key, const json& value) {
    if (!value.is_object()) refuse(key, "media_io_kwargs is no object");
    for (const auto& [kind, options] : value.items()) {
      if (kind != "video" || !options.is_object()) {
        ignore(fmt::format("{}.{}", key, printable(kind)));
        continue;
      }
      for (const auto& [name, option] : options.items()) {
        const std::string whole = fmt::format("{}.video.{}", key, printable(name));
        if (name == "num_frames") {
          request_.frames.frames = integer(whole, option, 1, 32768);
        } else if (name == "fps") {
          request_.frames.fps = number(whole, option, std::numeric_limits<double>::min(), 1e6);
        } else {
          ignore(whole);
        }
      }
    }
  }

  void read_messages(const json& value) {
    if (!value.is_array() || value.empty() || value.size() > kMostMessages) {
      refuse("messages", fmt::format("messages is {}; expected a list of 1 to {} messages",
                                     value.is_array() ? fmt::format("a list of {}", value.size())
                                                      : shown(value),
                                     kMostMessages));
    }
    for (size_t i = 0; i < value.size(); ++i)
      read_message(fmt::format("messages[{}]", i), value[i]);
    if (request_.messages.back().role != "user") {
      refuse("messages", fmt::format("the last message is of the {}; end with a question of the "
                                     "user",
                                     request_.messages.back().role));
    }
  }
  void read_message(const std::string& at, const json& value) {
    if (!value.is_object())
      refuse(at, fmt::format("{} is {}; expected an object", at, shown(value)));
    const json role = value.value("role", json());
    ChatMessage message;
    if (role == "system" || role == "developer") {
      message.role = "system";
    } else if (role == "user" || role == "assistant") {
      message.role = role.get<std::string>();
    } else {
      refuse(at + ".role", fmt::format("{}.role is {}; expected system, developer, user or "
                                       "assistant",
                                       at, shown(role)));
    }
    for (const auto& [key, of_key] : value.items()) {
      if (key == "role" || key == "content" || key == "name" || of_key.is_null()) continue;
      if (of_key.empty()) continue;  // "tool_calls": []
      if (key == "tool_calls" || key == "function_call" || key == "audio") unsupported(key);
      ignore(fmt::format("{}.{}", at, printable(key)));
    }
    const json content = value.value("content", json());
    if (content.is_string()) {
      add_text(message, content.get<std::string>());
    } else if (content.is_array()) {
      for (size_t i = 0; i < content.size(); ++i) {
        read_part(fmt::format("{}.content[{}]", at, i), content[i], message);
      }
    } else {
      refuse(at + ".content",
             fmt::format("{}.content is {}; expected text or a list of parts", at, shown(content)));
    }
    request_.messages.push_back(std::move(message));
  }
  void add_text(ChatMessage& message, std::string piece) {
    text_bytes_ += piece.size();
    if (text_bytes_ > limits_.text_bytes) {
      throw ApiError(413, "body_too_large",
                     fmt::format("the messages have more than {} bytes of text; send less",
                                 limits_.text_bytes),
                     "messages");
    }
    message.content.push_back({ContentItem::Kind::kText, std::move(piece)});
  }
  void read_part(const std::string& at, const json& part, ChatMessage& message) {
    const json type = part.is_object() ? part.value("type", json()) : json();
    if (type == "text") {
      const json piece = part.value("text", json());
      if (!piece.is_string()) {
        refuse(at, fmt::format("{}.text is {}; expected text", at, shown(piece)));
      }
      add_text(message, piece.get<std::string>());
    } else if (type == "image_url") {
      add_media(at, part, "image_url", limits_.images, request_.images, "image");
      message.content.push_back({ContentItem::Kind::kImage, {}});
    } else if (type == "video_url") {
      add_media(at, part, "video_url", limits_.videos, request_.videos, "video");
      message.content.push_back({ContentItem::Kind::kVideo, {}});
    } else {
      refuse(at,
             fmt::format("{}.type is {}; expected text, image_url or video_url", at, shown(type)));
    }
  }
  void add_media(const std::string& at, const json& part, const char* key, size_t most,
                 std::vector<SentMedia>& to, const char* kind) {
    const json of_key = part.value(key, json());
    const json url = of_key.is_object() ? of_key.value("url", json()) : of_key;
    if (!url.is_string()) {
      refuse(at, fmt::format("{}.{}.url is {}; expected a data: URL", at, key, shown(url)));
    }
    if (of_key.is_object()) {
      for (const auto& [name, value] : of_key.items()) {
        const bool nothing = name == "url" || value.is_null();
        const bool automatic = name == "detail" && (value == "auto" || value == "high");
        if (!nothing && !automatic) ignore(fmt::format("{}.{}", key, printable(name)));
      }
    }
    if (to.size() == most) {
      throw ApiError(413, "too_many_images",
                     fmt::format("the request has more than {} {}s; send fewer", most, kind),
                     "messages");
    }
    SentMedia sent{fmt::format("{} {}", kind, to.size() + 1), {}};
    sent.bytes = media_.read(url.get_ref<const std::string&>(), sent.name, limits_.media_bytes);
    to.push_back(std::move(sent));
  }

  const json& body_;
  const ChatLimits& limits_;
  const MediaReader& media_;
  ChatRequest request_;
  size_t text_bytes_ = 0;
};

}  // namespace

json parse_body(const std::string& body) {
  try {
    return parse_json(body, "the body");
  } catch (const Error& error) {
    throw ApiError(400, "invalid_json", error.what());
  }
}

PromptRequest parse_prompt_request(const json& body) {
  PromptRequest request;
  if (!body.is_object() || !body.contains("tokens")) {
    refuse("tokens",
           "there are neither messages nor tokens; send {\"tokens\": N, \"visual\": M}, or what "
           "/v1/chat/completions takes");
  }
  constexpr int kMostTokens = 1 << 24;
  const auto count = [&](const char* key, int least, int most) {
    return body.contains(key) ? static_cast<int>(integer(key, body[key], least, most)) : 0;
  };
  const auto text = [&](const char* key) -> std::optional<std::string> {
    if (!body.contains(key)) return std::nullopt;
    if (!body[key].is_string()) {
      refuse(key, fmt::format("{} is {}; expected text", key, shown(body[key])));
    }
    return body[key].get<std::string>();
  };
  for (const auto& [key, value] : body.items()) {
    constexpr std::array kKeys = {"model", "kv", "tokens", "visual", "max_tokens"};
    if (std::ranges::find(kKeys, key) == kKeys.end()) {
      refuse(key, fmt::format("there is no {}; send {}", printable(key), fmt::join(kKeys, ", ")));
    }
  }
  request.model = text("model").value_or("");
  request.kv = text("kv");
  request.tokens = count("tokens", 1, kMostTokens);
  request.visual = count("visual", 0, request.tokens);
  request.max_tokens = count("max_tokens", 0, kMostTokens);
  return request;
}

ChatRequest parse_chat_request(const json& body, const ChatLimits& limits,
                               const MediaReader& media) {
  return Reader(body, limits, media).read();
}

}  // namespace kvlm
