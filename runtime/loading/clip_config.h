#pragma once

#include "runtime/loading/config.h"
#include "vision/clip_vit.h"

namespace kvlm {

/// A vision_config of a CLIP tower, with the class defaults of models.md 2.3; feature layers and
/// strategy come from the model's own level. Throws Error{kUnsupported} for another tower.
ClipConfig parse_clip_config(const ConfigReader& vision, const ConfigReader& model);

}  // namespace kvlm
