#pragma once

#include <string_view>
#include <vector>

#include "runtime/loading/config.h"

namespace kvlm {

/// What of a LLaVA tower becomes features.
struct FeatureSelection {
  std::vector<int> layers;      ///< as VitConfig::feature_layers
  bool keep_first_row = false;  ///< strategy "full"; "default" leaves the first row out
};

/// vision_feature_layer, a number or a list, and vision_feature_select_strategy, which are at the
/// model's own level; `layer` and `strategy` where it says nothing.
FeatureSelection parse_feature_selection(const ConfigReader& model, int layer,
                                         std::string_view strategy);

}  // namespace kvlm
