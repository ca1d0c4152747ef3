#include "runtime/policy_profile.h"

#include <fmt/format.h>

#include <fstream>
#include <iterator>

#include "kernels/base/error.h"
#include "runtime/config.h"

namespace kvlm {

namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("--kv-profile {}: {}; make it with vlm-kv profile", path, what));
}

double number(const nlohmann::json& json, double low, double high, const std::string& path,
              const std::string& name) {
  if (!json.is_number() || !(json.get<double>() >= low && json.get<double>() <= high)) {
    fail(path,
         fmt::format("{} is {}, expected a number from {} to {}", name, json.dump(), low, high));
  }
  return json.get<double>();
}

std::pair<double, double> pair_of(const nlohmann::json& json, double high, const std::string& path,
                                  const std::string& name) {
  if (!json.is_array() || json.size() != 2) {
    fail(path, fmt::format("{} is {}, expected two numbers", name, json.dump()));
  }
  return {number(json[0], 0, high, path, name), number(json[1], 0, high, path, name)};
}

}  // namespace

PolicyProfile read_profile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "it cannot be read");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const nlohmann::json json = parse_json(text, path);
  if (!json.is_object()) fail(path, "it is not a JSON object");
  PolicyProfile profile;
  for (const auto& [name, part] : json.items()) {
    if (name == "model") continue;
    if (!part.is_object()) fail(path, fmt::format("{} is not an object", name));
    if (name == "prefixkv") {
      profile.forget_keep =
          number(part.value("keep", nlohmann::json()), 0, 1, path, "prefixkv.keep");
      const nlohmann::json forget = part.value("forget", nlohmann::json::array());
      if (!forget.is_array() || forget.empty()) fail(path, "prefixkv.forget is not a list");
      for (const nlohmann::json& ratio : forget) {
        profile.forget.push_back(number(ratio, 0, 1, path, "prefixkv.forget"));
      }
    } else if (name == "calibquant") {
      profile.tau = pair_of(part.value("tau", nlohmann::json()), 1000, path, "calibquant.tau");
    } else if (name == "head_quantile") {
      profile.alpha =
          number(part.value("alpha", nlohmann::json()), 0, 0.4999, path, "head_quantile.alpha");
    } else if (name == "xquant") {
      profile.eta = pair_of(part.value("eta", nlohmann::json()), 0.4999, path, "xquant.eta");
    } else {
      fail(path, fmt::format("there is no policy {} to profile", name));
    }
  }
  return profile;
}

std::string profile_text(const PolicyProfile& profile, const std::string& model) {
  nlohmann::ordered_json json{{"model", model}};
  if (!profile.forget.empty()) {
    json["prefixkv"] = {{"keep", profile.forget_keep}, {"forget", profile.forget}};
  }
  if (profile.tau) json["calibquant"] = {{"tau", {profile.tau->first, profile.tau->second}}};
  if (profile.alpha) json["head_quantile"] = {{"alpha", *profile.alpha}};
  if (profile.eta) json["xquant"] = {{"eta", {profile.eta->first, profile.eta->second}}};
  return json.dump(1) + "\n";
}

}  // namespace kvlm
