#include "runtime/loading/fields.h"

#include <fmt/format.h>

#include <string>

namespace kvlm {

Activation parse_activation(const ConfigReader& reader, std::string_view key,
                            std::string_view fallback) {
  const std::string name = reader.string(key, fallback);
  if (name == "quick_gelu") return Activation::kQuickGelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_pytorch_tanh" || name == "gelu_new") return Activation::kGeluTanh;
  if (name == "silu" || name == "swish") return Activation::kSilu;
  reader.fail(key, "quick_gelu, gelu, gelu_pytorch_tanh or silu");
}

void check_tower(const ConfigReader& vision, int hidden, int heads, int image_size,
                 int patch_size) {
  if (vision.integer("num_channels", 3, 1, kMaxWidth) != 3) {
    vision.fail("num_channels", "3: red, green and blue");
  }
  if (hidden % heads != 0) {
    vision.fail("hidden_size", fmt::format("a multiple of num_attention_heads {}", heads));
  }
  if (patch_size > image_size) {
    vision.fail("patch_size", fmt::format("at most image_size {}", image_size));
  }
}

}  // namespace kvlm
