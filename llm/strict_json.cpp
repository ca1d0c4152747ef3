#include "llm/strict_json.h"

#include <fmt/format.h>

#include <unordered_set>
#include <vector>

#include "kernels/base/error.h"
#include "llm/unicode.h"

namespace kvlm {

nlohmann::json parse_strict_json(std::string_view text, const std::string& name) {
  using nlohmann::json;
  constexpr int kMaxDepth = 64;
  std::vector<std::unordered_set<std::string>> keys;  // of each object or array being read
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        if (depth >= kMaxDepth) {
          throw Error(ErrorCode::kCorruptFile,
                      fmt::format("{}: JSON nested deeper than {}", name, kMaxDepth));
        }
        keys.emplace_back();
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end:
        keys.pop_back();
        break;
      case json::parse_event_t::key: {
        const auto& key = parsed.get_ref<const std::string&>();
        if (!keys.back().insert(key).second) {
          throw Error(ErrorCode::kCorruptFile,
                      fmt::format("{}: key \"{}\" twice", name, printable_text(key)));
        }
        break;
      }
      case json::parse_event_t::value:
        break;
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::exception& error) {
    throw Error(ErrorCode::kCorruptFile, fmt::format("{}: {}", name, printable_text(error.what())));
  }
}

}  // namespace kvlm
