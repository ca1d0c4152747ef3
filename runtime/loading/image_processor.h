#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "runtime/loading/config.h"
#include "runtime/loading/source.h"
#include "vision/preprocess.h"

namespace kvlm {

/// What every image processor has alike: resample, rescale_factor, image_mean and image_std, and
/// whether it rescales and normalises; absent ones as in `absent`. Of `options` the backend.
PreprocessSpec parse_pixel_values(const ConfigReader& processor, const PreprocessSpec& absent,
                                  const LoadOptions& options);

/// The object of a checkpoint's files that describes an image or video processor, and its path.
struct ProcessorFile {
  nlohmann::json content;
  std::string path;

  ConfigReader reader() const { return {content, path}; }
};

/// image_processor of processor_config.json, else preprocessor_config.json. Throws
/// Error{kCorruptFile} if it has neither.
ProcessorFile read_image_processor(const ModelSource& source);

/// video_processor of processor_config.json, else video_preprocessor_config.json, else what
/// read_image_processor() gives: older checkpoints have one file for both.
ProcessorFile read_video_processor(const ModelSource& source);

/// A CLIP-type preprocessor_config.json, or the image_processor of a processor_config.json.
PreprocessSpec parse_preprocess(const ConfigReader& processor, const LoadOptions& options);

/// What processor_config.json or preprocessor_config.json of a checkpoint says. Throws
/// Error{kCorruptFile} if it has neither.
PreprocessSpec read_preprocess(const ModelSource& source, const LoadOptions& options);

/// Throws Error{kCorruptFile} unless pictures become `image_size` x `image_size`: a tower that
/// takes one size would fail only when it is fed.
void check_picture_size(const PreprocessSpec& preprocess, int image_size);

}  // namespace kvlm
