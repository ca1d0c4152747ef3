#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <vector>

#include "kernels/base/printable.h"
#include "runtime/families/internvl.h"
#include "runtime/families/llava15.h"
#include "runtime/families/llava_next.h"
#include "runtime/families/llava_onevision.h"
#include "runtime/families/qwen_vl.h"
#include "runtime/family.h"
#include "runtime/loading/config.h"

namespace kvlm {

namespace {

constexpr std::array kFamilies = {
    Family{"internvl", "internvl", &internvl_cache_shape, &load_internvl},
    Family{"internvl", "internvl_chat", &internvl_chat_cache_shape, &load_internvl_chat},
    Family{"llava-1.5", "llava", &llava15_cache_shape, &load_llava15},
    Family{"llava-next", "llava_next", &llava_next_cache_shape, &load_llava_next},
    Family{"llava-onevision", "llava_onevision", &llava_onevision_cache_shape,
           &load_llava_onevision},
    Family{"qwen2-vl", "qwen2_vl", &qwen_vl_cache_shape, &load_qwen_vl},
    Family{"qwen2.5-vl", "qwen2_5_vl", &qwen_vl_cache_shape, &load_qwen_vl},
    Family{"qwen3-vl", "qwen3_vl", &qwen_vl_cache_shape, &load_qwen_vl},
};

}  // namespace

std::span<const Family> families() { return kFamilies; }

const Family& family_of(const nlohmann::json& config, const std::string& name) {
  const std::string model_type = ConfigReader(config, "config.json").required_string("model_type");
  std::vector<std::string_view> known;
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return family;
    known.push_back(family.model_type);
  }
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("{}: config.json has model_type \"{}\", which is not supported; supported are {}",
                  printable(name), printable(model_type), fmt::join(known, ", ")));
}

}  // namespace kvlm
