#include "runtime/loading/quantization.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"

// Every quantizer of weights has its own words for the same two facts: its name and its bits.
namespace kvlm {

namespace {

using nlohmann::json;

/// The first member that `wanted` accepts, of an object or of those inside it; null if there is
/// none. Strict JSON has bounded how deep they nest.
template <class Wanted>
const json* find_member(const json& object, const Wanted& wanted) {
  if (!object.is_object()) return nullptr;
  for (const auto& [key, value] : object.items()) {
    if (wanted(key, value)) return &value;
  }
  for (const auto& [key, value] : object.items()) {
    if (const json* found = find_member(value, wanted)) return found;
  }
  return nullptr;
}

std::string method_of(const json& quantization, std::string_view fallback) {
  constexpr auto kKeys =
      std::to_array<std::string_view>({"quant_method", "quant_algo", "quantization_method"});
  const json* method = find_member(quantization, [&](const std::string& key, const json& value) {
    return value.is_string() && std::ranges::find(kKeys, key) != kKeys.end();
  });
  if (method != nullptr) return method->get<std::string>();
  const json* loads = find_member(quantization, [](const std::string& key, const json&) {
    return key == "load_in_4bit" || key == "load_in_8bit";
  });
  return loads != nullptr ? "bitsandbytes" : std::string(fallback);
}

std::optional<int64_t> bits_of(const json& quantization) {
  constexpr auto kKeys =
      std::to_array<std::string_view>({"bits", "w_bit", "wbits", "nbits", "num_bits"});
  const json* bits = find_member(quantization, [&](const std::string& key, const json& value) {
    return value.is_number_integer() && std::ranges::find(kKeys, key) != kKeys.end();
  });
  if (bits != nullptr) return bits->get<int64_t>();
  for (const auto& [key, count] : {std::pair{"load_in_4bit", 4}, std::pair{"load_in_8bit", 8}}) {
    const bool loads = find_member(quantization, [&key = key](const auto& name, const json& value) {
                         return name == key && value == true;
                       }) != nullptr;
    if (loads) return count;
  }
  return std::nullopt;
}

/// `where` is the file, and the key where it has one of its own.
[[noreturn]] void refuse(const std::filesystem::path& folder, const std::string& where,
                         const json& quantization, std::string_view fallback) {
  const std::optional<int64_t> bits = bits_of(quantization);
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("{}: {} says that the weights are quantized by {}{}, which is not "
                  "supported; use the 16-bit checkpoint that they were made from",
                  printable(folder.string()), where, printable(method_of(quantization, fallback)),
                  bits ? fmt::format(" to {} bits", *bits) : ""));
}

}  // namespace

void refuse_quantized(const std::filesystem::path& folder, const nlohmann::json& config,
                      const std::function<nlohmann::json(const std::string& file)>& read) {
  constexpr auto kParts =
      std::to_array<std::string_view>({"", "text_config", "llm_config", "vision_config"});
  for (const std::string_view part : kParts) {
    const auto inner = config.find(part);
    if (!part.empty() && (inner == config.end() || !inner->is_object())) continue;
    const json& object = part.empty() ? config : *inner;
    for (const char* key : {"quantization_config", "compression_config"}) {
      const auto found = object.find(key);
      if (found == object.end() || found->is_null()) continue;
      refuse(folder, fmt::format("config.json: {}{}{}", part, part.empty() ? "" : ".", key), *found,
             "an unknown method");
    }
  }
  for (const auto& [file, method] :
       {std::pair{"quantize_config.json", "gptq"}, std::pair{"quant_config.json", "awq"},
        std::pair{"hf_quant_config.json", "modelopt"}}) {
    if (const json quantization = read(file); !quantization.is_null()) {
      refuse(folder, file, quantization, method);
    }
  }
}

}  // namespace kvlm
