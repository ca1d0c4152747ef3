#include "tools/common/model_shape.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "runtime/config.h"
#include "runtime/family.h"
#include "runtime/mapped_file.h"
#include "runtime/model_path.h"
#include "runtime/synthetic.h"
#include "tools/common/program.h"

namespace kvlm {

namespace {

nlohmann::json config_of(const std::string& model) {
  constexpr std::string_view kSynthetic = "synthetic:";
  if (model.starts_with(kSynthetic)) {
    return synthetic_config(std::string_view(model).substr(kSynthetic.size()));
  }
  const std::filesystem::path path =
      find_model(model, bundled_models(), &environment) / "config.json";
  const MappedFile file(path, path.string());
  const std::span<const std::byte> bytes = file.bytes();
  return parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path.string());
}

}  // namespace

CacheShape model_shape(const std::string& model) {
  const nlohmann::json config = config_of(model);
  return family_of(config, model).cache_shape(config);
}

}  // namespace kvlm
