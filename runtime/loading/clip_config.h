#pragma once

#include "runtime/loading/config.h"
#include "vision/clip_vit.h"

namespace kvlm {

/// A vision_config of a CLIP tower, with the class defaults of models.md 2.3, or those of LLaVA's
/// own tower if the model's configuration has none (`absent`). What of it becomes features is not
/// its business: see parse_feature_selection().
ClipConfig parse_clip_config(const ConfigReader& vision, bool absent);

}  // namespace kvlm
