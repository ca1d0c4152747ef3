#include "tools/run/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "kernels/base/printable.h"
#include "kvcache/spec/spec.h"
#include "runtime/policy_profile.h"
#include "runtime/spec_file.h"
#include "tools/run/file_identity.h"
#include "tools/run/report.h"

namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kLongestText = 200;
constexpr size_t kBeginning = 60;

/// A text that every record carries: whole, or its beginning with a hash of all of it.
std::string brief(const std::string& text) {
  if (text.size() <= kLongestText) return text;
  return fmt::format("{}... ({} bytes, {})", printable(text.substr(0, kBeginning)), text.size(),
                     hash_of(text));
}

/// A file that every record carries by its name, and by the hash of what it says.
Json profile_flag(const std::string& path) {
  return {{"file", brief(path)}, {"hash", hash_of(profile_text(read_profile(path)))}};
}

/// The files of policies in Python by their names, and by the hash of what they say.
Json policies_flag(const std::vector<std::string>& files) {
  std::string names;
  std::string hashes;
  for (const std::string& file : files) {
    names += (names.empty() ? "" : ", ") + file;
    hashes += content_hash(file) + "\n";
  }
  return {{"file", brief(names)}, {"hash", hash_of(hashes)}};
}

/// Whether a flag decided the same; of a file an earlier version wrote the name only.
bool same_flag(const Json& before, const Json& now) {
  if (!now.is_object()) return before == now;
  const char* key = before.is_object() ? "hash" : "file";
  return (before.is_object() ? before.value(key, Json()) : before) == now.value(key, Json());
}

std::string flag_text(const std::string& name, const Json& value) {
  std::string flag = "--" + name;
  std::ranges::replace(flag, '_', '-');
  if (value.is_null()) return "no " + flag;
  const auto text = [](const Json& json) {
    return printable(json.is_string() ? json.get<std::string>() : json_line(json));
  };
  if (!value.is_object()) return fmt::format("{} {}", flag, text(value));
  return fmt::format("{} {} (of content {})", flag, text(value.value("file", Json())),
                     text(value.value("hash", Json())));
}

bool same_model(const std::string& a, const std::string& b) {
  std::error_code none;
  return a == b || std::filesystem::equivalent(a, b, none);
}

}  // namespace

BatchSettings batch_settings(const RunOptions& options) {
  const SessionOptions& session = options.session;
  const SessionOptions defaults;
  Json flags = Json::object();
  const auto put = [&](const char* name, const auto& value, bool given) {
    if (given) flags[name] = value;
  };
  const auto put_text = [&](const char* name, const std::string& value,
                            const std::string& otherwise) {
    if (value != otherwise) flags[name] = brief(value);
  };
  put_text("dtype", session.dtype, defaults.dtype);
  put_text("lora", session.lora, defaults.lora);
  put_text("weights", session.weights, defaults.weights);
  put_text("activations", session.activations, defaults.activations);
  put_text("image_backend", session.image_backend, defaults.image_backend);
  put_text("image_aspect", session.image_aspect, defaults.image_aspect);
  put("tiles", session.max_tiles.value_or(0), session.max_tiles.has_value());
  put("min_pixels", session.min_pixels.value_or(0), session.min_pixels.has_value());
  put("max_pixels", session.max_pixels.value_or(0), session.max_pixels.has_value());
  put("fps", options.sampling.fps.value_or(0), options.sampling.fps.has_value());
  put("frames", options.sampling.frames.value_or(0), options.sampling.frames.has_value());
  if (!session.kv_profile.empty()) flags["kv_profile"] = profile_flag(session.kv_profile);
  put_text("prompt", options.prompt, "");
  put_text("system", options.system, "");
  put("max_tokens", options.max_tokens.value_or(0), options.max_tokens.has_value());
  put("temp", options.temperature.value_or(0), options.temperature.value_or(0) != 0);
  put("top_k", options.top_k.value_or(0), options.top_k.has_value());
  put("top_p", options.top_p.value_or(0), options.top_p.has_value());
  put("repeat_penalty", options.repeat_penalty.value_or(0), options.repeat_penalty.has_value());
  put("seed", options.seed, options.seed != 0);
  put("stop", options.stop, !options.stop.empty());
  const std::string spec = canonical(read_spec(session.kv));
  if (spec.find("python:") != std::string::npos)
    flags["rules"] = policies_flag(options.policy_files);
  // As it is read back: bytes that are not UTF-8 are written as U+FFFD.
  return {Json::parse(json_line(session.model)).get<std::string>(), spec,
          Json::parse(json_line(flags))};
}

std::optional<std::string> difference(const BatchSettings& earlier, const BatchSettings& now) {
  const auto differ = [](const std::string& before, const std::string& after) {
    return fmt::format("with {}, but this run has {}", before, after);
  };
  if (!earlier.model.empty() && !same_model(earlier.model, now.model)) {
    return differ(flag_text("model", earlier.model), flag_text("model", now.model));
  }
  if (!earlier.spec.empty() && earlier.spec != now.spec) {
    return differ(flag_text("kv", earlier.spec), flag_text("kv", now.spec));
  }
  if (earlier.flags.is_null()) return std::nullopt;
  for (const auto& [name, value] : now.flags.items()) {
    const Json before = earlier.flags.value(name, Json());
    if (!same_flag(before, value)) return differ(flag_text(name, before), flag_text(name, value));
  }
  for (const auto& [name, value] : earlier.flags.items()) {
    if (!now.flags.contains(name)) return differ(flag_text(name, value), flag_text(name, Json()));
  }
  return std::nullopt;
}

}  // namespace kvlm
