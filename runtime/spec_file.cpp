#include "runtime/spec_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/words.h"
#include "runtime/loading/config.h"
#include "runtime/loading/mapped_file.h"
#include "runtime/loading/plain_text.h"

namespace kvlm {

namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;
constexpr std::array<std::string_view, 2> kKeys = {"default", "layers"};
constexpr const char* kExample = R"(write {"default": SPEC, "layers": {"0-1,30": SPEC}})";
constexpr std::string_view kBlanks = " \t\n";

[[noreturn]] void fail(const std::string& name, const std::string& defect) {
  throw Error(ErrorCode::kCorruptFile, fmt::format("{}: {}", name, defect));
}

}  // namespace

CacheSpec spec_of_json(std::string_view text, const std::string& name) {
  if (text.size() > kMaxBytes) {
    fail(name,
         fmt::format("a file of {} bytes; a spec file has at most {}", text.size(), kMaxBytes));
  }
  const nlohmann::json json = [&] {
    try {
      return parse_json(text, name);
    } catch (const Error& error) {  // whose advice is about files that are downloaded
      const std::string message = error.what();
      throw Error(error.code(),
                  fmt::format("{}; {}", message.substr(0, message.rfind("; ")), kExample));
    }
  }();
  if (!json.is_object()) fail(name, fmt::format("not an object; {}", kExample));
  for (auto member = json.begin(); member != json.end(); ++member) {
    if (std::find(kKeys.begin(), kKeys.end(), member.key()) == kKeys.end()) {
      const std::string_view nearest = nearest_spelling(member.key(), {kKeys.begin(), kKeys.end()});
      fail(name,
           fmt::format("has the unknown key \"{}\"{} (its keys are {})", printable(member.key()),
                       nearest.empty() ? fmt::format("; {}", kExample)
                                       : fmt::format("; did you mean \"{}\"?", nearest),
                       fmt::join(kKeys, ", ")));
    }
  }
  const ConfigReader file(json, name);
  const std::string every_layer = file.required_string("default");
  const ConfigReader layers = file.object("layers");
  std::vector<std::pair<std::string, std::string>> pieces;
  if (file.has("layers")) {
    for (auto member = json["layers"].begin(); member != json["layers"].end(); ++member) {
      pieces.emplace_back(member.key(), layers.required_string(member.key()));
    }
  }
  try {
    return layered_spec(every_layer, pieces);
  } catch (const Error& error) {
    fail(name, error.what());
  }
}

CacheSpec read_spec(const std::string& text) {
  if (!text.starts_with('@')) return parse_spec(text);
  const std::string path = text.substr(1);
  if (path.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "--kv @ names no file; write --kv @FILE.json");
  }
  const std::string name = "--kv " + printable(text);
  const MappedFile file(path, name);
  const std::span<const std::byte> bytes = file.bytes();
  const std::string content =
      plain_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, name);
  const size_t first = content.find_first_not_of(kBlanks);
  const bool json = first == std::string::npos || content.find_first_of("{[\"") == first;
  if (json || content.size() > kMaxBytes) return spec_of_json(content, name);
  try {  // the spec as --kv itself takes it
    return parse_spec(content.substr(first, content.find_last_not_of(kBlanks) - first + 1));
  } catch (const Error& error) {
    fail(name, error.what());
  }
}

}  // namespace kvlm
