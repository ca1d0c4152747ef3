#include "runtime/loading/fields.h"

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

}  // namespace kvlm
