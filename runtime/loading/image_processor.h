#pragma once

#include "runtime/loading/config.h"
#include "runtime/loading/source.h"
#include "vision/preprocess.h"

namespace kvlm {

/// A CLIP-type preprocessor_config.json, or the image_processor of a processor_config.json.
PreprocessSpec parse_preprocess(const ConfigReader& processor, const LoadOptions& options);

/// What processor_config.json or preprocessor_config.json of a checkpoint says. Throws
/// Error{kCorruptFile} if it has neither.
PreprocessSpec read_preprocess(const ModelSource& source, const LoadOptions& options);

/// Throws Error{kCorruptFile} unless pictures become `image_size` x `image_size`: a tower that
/// takes one size would fail only when it is fed.
void check_picture_size(const PreprocessSpec& preprocess, int image_size);

}  // namespace kvlm
