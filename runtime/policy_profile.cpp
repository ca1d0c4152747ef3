#include "runtime/policy_profile.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <span>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/config.h"
#include "runtime/loading/mapped_file.h"
#include "runtime/loading/plain_text.h"

// Reads and writes the JSON file of --kv-profile. It is checked field by field, and belongs to the
// model that it names; writing goes to a file beside it that is then renamed.
namespace kvlm {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr size_t kMaxBytes = size_t{1} << 20;
constexpr double kLargestTau = 1000;
constexpr double kLargestShare = 0.4999;

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("--kv-profile {}: {}; measure it again with vlm-kv profile",
                          printable(path), what));
}

/// Found text, no longer than a message bears.
std::string found(const Json& json) {
  constexpr size_t kLongest = 60;
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return printable(text);
}

double number(const Json& json, double high, const std::string& path, const std::string& name) {
  if (!json.is_number() || !(json.get<double>() >= 0 && json.get<double>() <= high)) {
    fail(path, fmt::format("{} is {}, expected a number from 0 to {}", name, found(json), high));
  }
  return json.get<double>();
}

std::vector<double> numbers(const Json& json, const std::string& path, const std::string& name) {
  if (!json.is_array() || json.empty()) {
    fail(path, fmt::format("{} is {}, expected a list of numbers", name, found(json)));
  }
  std::vector<double> list;
  for (const Json& item : json) list.push_back(number(item, 1, path, name));
  return list;
}

/// Lists of a number for each layer, by the score that they belong to.
std::map<std::string, std::vector<double>, std::less<>> by_score(const Json& json,
                                                                 const std::string& path,
                                                                 const std::string& name) {
  if (json.is_array()) return {{"sums", numbers(json, path, name)}};
  std::map<std::string, std::vector<double>, std::less<>> lists;
  if (!json.is_object()) {
    fail(path, fmt::format("{} is {}, expected lists called means and sums", name, found(json)));
  }
  for (const auto& [score, list] : json.items()) {
    if (score != "means" && score != "sums") {
      fail(path, fmt::format("{} has {}, expected means and sums", name, printable(score)));
    }
    lists[score] = numbers(list, path, name + "." + score);
  }
  return lists;
}

/// Values by the width that they were fitted at, each read by `read(json, name)`.
template <class Value, class Read>
std::map<int, Value> by_bits(const Json& json, const std::string& path, const std::string& name,
                             const Read& read) {
  if (!json.is_object()) {
    fail(path,
         fmt::format("{} is {}, without bit widths; expected {{\"1\": ...}}", name, found(json)));
  }
  std::map<int, Value> values;
  for (const auto& [bits, value] : json.items()) {
    if (bits.size() != 1 || bits[0] < '1' || bits[0] > '8') {
      fail(path, fmt::format("{} has a value for {} bits, expected 1 to 8", name, printable(bits)));
    }
    values[bits[0] - '0'] = read(value, fmt::format("{} at {} bits", name, bits));
  }
  return values;
}

PolicyProfile parsed(const Json& json, const std::string& path) {
  if (!json.is_object()) fail(path, "it is not a JSON object");
  PolicyProfile profile;
  const auto share = [&](const Json& value, const std::string& name) {
    return number(value, kLargestShare, path, name);
  };
  const auto pair = [&](const Json& value, const std::string& name) {
    if (!value.is_array() || value.size() != 2) {
      fail(path, fmt::format("{} is {}, expected two numbers", name, found(value)));
    }
    return std::pair(number(value[0], kLargestTau, path, name),
                     number(value[1], kLargestTau, path, name));
  };
  for (const auto& [name, part] : json.items()) {
    if (name == "model") {
      if (part.is_string()) profile.model = part.get<std::string>();
      continue;
    }
    if (!part.is_object()) fail(path, fmt::format("{} is not an object", printable(name)));
    const auto of = [&part = part](const char* key) { return part.value(key, Json()); };
    if (name == "prefixkv") {
      profile.forget_keep = number(of("keep"), 1, path, "prefixkv.keep");
      profile.forget = by_score(of("forget"), path, "prefixkv.forget");
      if (part.contains("gini")) profile.gini = by_score(of("gini"), path, "prefixkv.gini");
      if (part.contains("std")) profile.forget_std = by_score(of("std"), path, "prefixkv.std");
      if (part.contains("mad")) profile.forget_mad = by_score(of("mad"), path, "prefixkv.mad");
    } else if (name == "calibquant") {
      profile.tau = by_bits<std::pair<double, double>>(of("tau"), path, "calibquant.tau", pair);
      if (part.contains("tau_unshrunk")) {
        profile.tau_unshrunk = by_bits<std::pair<double, double>>(of("tau_unshrunk"), path,
                                                                  "calibquant.tau_unshrunk", pair);
      }
    } else if (name == "head_quantile") {
      profile.alpha = by_bits<double>(of("alpha"), path, "head_quantile.alpha", share);
    } else if (name == "xquant") {
      profile.eta = by_bits<double>(of("eta"), path, "xquant.eta", share);
    } else {
      fail(path, fmt::format("there is no policy {} to profile", printable(name)));
    }
  }
  return profile;
}

/// Whether two names are of one model, however its folder is spelled.
bool same_model(std::string_view a, std::string_view b) {
  const auto last = [](std::string_view name) {
    while (name.ends_with('/')) name.remove_suffix(1);
    const std::string_view part = name.substr(name.rfind('/') + 1);
    return part == "pocket" ? std::string_view("pocket-llava") : part;
  };
  return last(a) == last(b);
}

[[noreturn]] void refuse_target(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("--out {} {}", printable(path), why));
}

/// Where a profile is written until it is whole: beside its place, so that renaming suffices.
fs::path place_beside(const std::string& path) {
  return path + fmt::format(".{}.part", static_cast<int>(getpid()));
}

}  // namespace

PolicyProfile read_profile(const std::string& path) {
  const std::string name = "--kv-profile " + printable(path);
  const MappedFile file(path, name);
  const std::span<const std::byte> bytes = file.bytes();
  if (bytes.size() > kMaxBytes) {
    fail(path, fmt::format("it has {} bytes, and a profile at most {}", bytes.size(), kMaxBytes));
  }
  const std::string text =
      plain_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, name);
  return parsed(parse_json(text, name), path);
}

void require_profile_of(const PolicyProfile& profile, const std::string& model) {
  if (profile.model.empty() || same_model(profile.model, model)) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "--kv-profile was measured on {}, not on {}; measure one with vlm-kv profile -m {}",
          printable(profile.model), printable(model), printable(model)));
}

std::string profile_text(const PolicyProfile& profile) {
  nlohmann::ordered_json json{{"model", profile.model}};
  const auto by_width = [](const auto& values) {
    nlohmann::ordered_json object;
    for (const auto& [bits, value] : values) object[fmt::format("{}", bits)] = value;
    return object;
  };
  if (!profile.forget.empty()) {
    json["prefixkv"] = {{"keep", profile.forget_keep}, {"forget", profile.forget}};
    if (!profile.gini.empty()) json["prefixkv"]["gini"] = profile.gini;
    if (!profile.forget_std.empty()) json["prefixkv"]["std"] = profile.forget_std;
    if (!profile.forget_mad.empty()) json["prefixkv"]["mad"] = profile.forget_mad;
  }
  if (!profile.tau.empty()) json["calibquant"]["tau"] = by_width(profile.tau);
  if (!profile.tau_unshrunk.empty()) {
    json["calibquant"]["tau_unshrunk"] = by_width(profile.tau_unshrunk);
  }
  if (!profile.alpha.empty()) json["head_quantile"]["alpha"] = by_width(profile.alpha);
  if (!profile.eta.empty()) json["xquant"]["eta"] = by_width(profile.eta);
  // A folder's name need not be UTF-8.
  return json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

PolicyProfile profile_to_extend(const std::string& path, const std::string& model) {
  PolicyProfile profile;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status)) {
    if (!fs::is_regular_file(status)) {
      refuse_target(path, "is not a regular file; give the name of a file");
    }
    if (access(path.c_str(), W_OK) != 0) {
      refuse_target(path, "cannot be written; give a file in a writable folder");
    }
    if (fs::file_size(path, error) > 0) {
      try {
        profile = read_profile(path);
      } catch (const Error&) {
        refuse_target(
            path,
            "exists and is not a profile of this version; give another name, or remove it first");
      }
      if (!same_model(profile.model, model)) {
        refuse_target(path, fmt::format("is the profile of {}, not of {}; give another name",
                                        printable(profile.model), printable(model)));
      }
    }
  }
  profile.model = model;
  const fs::path part = place_beside(path);
  const bool opens = std::ofstream(part, std::ios::trunc).is_open();
  fs::remove(part, error);
  if (!opens) refuse_target(path, "cannot be written; give a file in a writable folder");
  return profile;
}

void write_profile(const PolicyProfile& profile, const std::string& path) {
  const fs::path part = place_beside(path);
  std::error_code error;
  std::ofstream file(part, std::ios::trunc);
  file << profile_text(profile);
  file.close();
  // Through a link to what it names: the link stays.
  if (file) fs::rename(part, fs::weakly_canonical(path), error);
  if (!file || error) {
    fs::remove(part, error);
    refuse_target(path, "cannot be written; give a file in a writable folder");
  }
}

}  // namespace kvlm
