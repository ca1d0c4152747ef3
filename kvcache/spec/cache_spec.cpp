#include "kvcache/spec/cache_spec.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvlm {

const std::string* SpecPart::find(std::string_view key) const noexcept {
  const auto found = std::find_if(options.begin(), options.end(),
                                  [&](const auto& option) { return option.first == key; });
  return found == options.end() ? nullptr : &found->second;
}

std::string part_text(const SpecPart& part) {
  std::string text = part.name;
  const std::string* what = part.name == "share" ? part.find("what") : nullptr;
  if (what != nullptr) text += "=" + *what;
  for (const auto& [key, value] : part.options) {
    if (what == nullptr || key != "what") text += fmt::format(",{}={}", key, value);
  }
  return text;
}

std::string canonical(const CacheSpec& spec) {
  std::string text;
  for (const SpecPart& part : spec.parts) {
    if (!text.empty()) text += " + ";
    text += part_text(part);
  }
  return text;
}

}  // namespace kvlm
