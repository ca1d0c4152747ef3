#include "tools/common/weight_options.h"

#include <fmt/format.h>

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
                 "Round the decoder's matrices at load: 16 (not at all), int8 or int4")
      ->capture_default_str();
  app.add_option("--activations", options.activations,
                 "Bits of what a CPU multiplies quantized weights with: 8, or 16 (slower)")
      ->capture_default_str();
}

void add_lora_option(CLI::App& app, SessionOptions& options) {
  app.add_option("--lora", options.lora,
                 "Folder of a LoRA adapter as PEFT saves it, merged into the weights at load")
      ->type_name("FOLDER");
}

WeightRounding parse_weights(const std::string& text) {
  WeightRounding rounding;
  if (text == "int8") {
    rounding.decoder = WeightCode::kU8;
  } else if (text == "int4") {
    rounding.decoder = WeightCode::kU4;
  } else if (text != "16") {
    refuse("--weights", text, "16, int8 or int4");
  }
  return rounding;
}

int parse_activations(const std::string& text) {
  if (text != "8" && text != "16") {
    refuse("--activations", text, "8, or 16 for products in floating point");
  }
  return text == "8" ? 8 : 16;
}

}  // namespace kvlm
