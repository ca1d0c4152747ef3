#pragma once

#include "runtime/loading/config.h"
#include "vision/siglip_vit.h"

namespace kvlm {

/// A vision_config of a SigLIP tower, with the defaults of transformers 5.23's configuration class,
/// or those of LLaVA-OneVision's own tower if the model's configuration has none (`absent`). What
/// of it becomes features is not its business: see parse_feature_selection().
SiglipConfig parse_siglip_config(const ConfigReader& vision, bool absent);

}  // namespace kvlm
