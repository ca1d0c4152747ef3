#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "runtime/loading/config.h"
#include "runtime/loading/source.h"
#include "vision/preprocess.h"

namespace kvlm {

/// What every image processor has alike: resample, rescale_factor, image_mean and image_std, and
/// whether it rescales and normalises; absent ones as in `absent`. Of `options` the backend.
PreprocessSpec parse_pixel_values(const ConfigReader& processor, const PreprocessSpec& absent,
                                  const LoadOptions& options);

/// The classes of image processors whose files read alike.
enum class ImageProcessor : uint8_t { kLlava, kClip, kSiglip, kLlavaNext, kLlavaOnevision };

/// What a processor's file says, and which file that is.
struct ProcessorFile {
  nlohmann::json content;
  std::string path;

  ConfigReader reader() const { return {content, path}; }
};

/// The image_processor of processor_config.json, or preprocessor_config.json. Throws
/// Error{kCorruptFile} if the checkpoint has neither.
ProcessorFile read_image_processor(const ModelSource& source);
/// The video_processor of processor_config.json, or video_preprocessor_config.json, or what
/// read_image_processor() finds: files of before transformers 4.53 have no other.
ProcessorFile read_video_processor(const ModelSource& source);

/// What a file says of resizing and normalising; what it leaves out is different for each class.
/// The class is the one that it names, or the first of `built_in`. Throws Error{kUnsupported}
/// listing `built_in` for another.
PreprocessSpec parse_preprocess(const ConfigReader& processor,
                                std::span<const ImageProcessor> built_in,
                                const LoadOptions& options);

/// Throws Error{kCorruptFile} unless pictures become `image_size` x `image_size`: a tower that
/// takes one size would fail only when it is fed.
void check_picture_size(const PreprocessSpec& preprocess, int image_size);

}  // namespace kvlm
