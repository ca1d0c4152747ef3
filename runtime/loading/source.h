#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "kernels/base/weights.h"
#include "vision/preprocess.h"

namespace kvlm {

/// What a model is assembled from: a checkpoint on disk, or random weights of the same shape.
struct ModelSource {
  std::string name;
  nlohmann::json config;  ///< config.json
  /// The bytes of a further file of the checkpoint, or nothing if it has none of that name.
  std::function<std::optional<std::string>(const std::string& file_name)> file;
  WeightMap weights;
};

/// How a model is to be loaded.
struct LoadOptions {
  /// Weights are converted to this type; nothing keeps the checkpoint's own.
  std::optional<DType> dtype;
  /// Whose image processor is followed to the bit; the reference's default is torchvision.
  ResizeBackend image_backend = ResizeBackend::kTorchvision;
  /// Pad to a square (the original LLaVA code) or crop; nothing follows preprocessor_config.json.
  std::optional<bool> pad_to_square;
};

/// A JSON file of the source; absent reads as an empty object.
nlohmann::json read_json(const ModelSource& source, const std::string& file);

}  // namespace kvlm
