#include "runtime/loading/feature_selection.h"

#include <algorithm>
#include <string>

#include "runtime/loading/fields.h"

namespace kvlm {

FeatureSelection parse_feature_selection(const ConfigReader& model, int layer,
                                         std::string_view strategy) {
  FeatureSelection selection;
  const nlohmann::json& layers = model.raw("vision_feature_layer");
  if (layers.is_array()) {
    for (const nlohmann::json& entry : layers) {
      if (!entry.is_number_integer()) model.fail("vision_feature_layer", "integers");
      selection.layers.push_back(static_cast<int>(
          std::clamp<int64_t>(entry.get<int64_t>(), -kMaxLayers - 1, kMaxLayers + 1)));
    }
    if (selection.layers.empty()) model.fail("vision_feature_layer", "at least one layer");
  } else {
    selection.layers = {
        static_cast<int>(model.integer("vision_feature_layer", layer, -kMaxLayers, kMaxLayers))};
  }
  const std::string found = model.string("vision_feature_select_strategy", strategy);
  if (found != "default" && found != "full") {
    model.fail("vision_feature_select_strategy", "default or full");
  }
  selection.keep_first_row = found == "full";
  return selection;
}

}  // namespace kvlm
