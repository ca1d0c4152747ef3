#include "tools/common/weight_options.h"

#include <fmt/format.h>

#include <optional>
#include <string_view>

#include "kernels/base/error.h"

namespace kvlm {

namespace {

[[noreturn]] void refuse(std::string_view option, const std::string& value,
                         std::string_view expected) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is \"{}\"; expected {}", option, value, expected));
}

}  // namespace

void add_weight_options(CLI::App& app, SessionOptions& options) {
  app.add_option("--weights", options.weights,
                 "Round the decoder's matrices at load: 16 (not at all), int8 or int4; with "
                 "\",tower=int8\" those of the vision tower too")
      ->capture_default_str();
  app.add_option("--lora", options.lora,
                 "Folder of a LoRA adapter as PEFT saves it, merged into the weights at load")
      ->type_name("FOLDER");
  app.add_option("--activations", options.activations,
                 "Bits of what a CPU multiplies quantized weights with: 8, or 16 (slower)")
      ->capture_default_str();
}

WeightRounding parse_weights(const std::string& text) {
  constexpr std::string_view kExpected = "16, int8 or int4, of the tower too with \",tower=int8\"";
  const auto code_of = [&](std::string_view word, bool four) -> std::optional<WeightCode> {
    if (word == "16") return std::nullopt;
    if (word == "int8") return WeightCode::kU8;
    if (word == "int4" && four) return WeightCode::kU4;
    refuse("--weights", text, kExpected);
  };
  WeightRounding rounding;
  const std::string_view all(text);
  const size_t comma = all.find(',');
  rounding.decoder = code_of(all.substr(0, comma), true);
  if (comma == std::string_view::npos) return rounding;
  constexpr std::string_view kTower = "tower=";
  const std::string_view tower = all.substr(comma + 1);
  if (!tower.starts_with(kTower)) refuse("--weights", text, kExpected);
  rounding.vision = code_of(tower.substr(kTower.size()), false);
  return rounding;
}

int parse_activations(const std::string& text) {
  if (text != "8" && text != "16") {
    refuse("--activations", text, "8, or 16 for products in floating point");
  }
  return text == "8" ? 8 : 16;
}

}  // namespace kvlm
