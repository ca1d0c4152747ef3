#include "tools/common/model_shape.h"

#include <nlohmann/json.hpp>

#include "runtime/family.h"
#include "runtime/loading/checkpoint.h"
#include "runtime/loading/model_path.h"
#include "runtime/synthetic.h"
#include "tools/common/program.h"

namespace kvlm {

namespace {

nlohmann::json config_of(const std::string& model) {
  constexpr std::string_view kSynthetic = "synthetic:";
  if (model.starts_with(kSynthetic)) {
    return synthetic_config(std::string_view(model).substr(kSynthetic.size()));
  }
  return read_config(find_model(model, bundled_models(), &environment));
}

}  // namespace

CacheShape model_shape(const std::string& model) {
  const nlohmann::json config = config_of(model);
  return family_of(config, model).cache_shape(config);
}

}  // namespace kvlm
