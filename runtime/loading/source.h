#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/weight_map.h"
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

/// What becomes of a picture that is not square.
enum class ImageAspect : uint8_t {
  kCrop,   ///< its middle (LLaVA-1.5)
  kPad,    ///< all of it, padded to a square (LLaVA-1.5, LLaVA-OneVision)
  kAnyres  ///< tiles, whether it is alone in its prompt or not (LLaVA-OneVision)
};

/// How a model is to be loaded.
struct LoadOptions {
  /// Weights are converted to this type; nothing keeps the checkpoint's own.
  std::optional<DType> dtype;
  /// Matrices are rounded to 8 or 4 bits; nothing leaves them as they are.
  WeightRounding rounding;
  /// Where the decoder's matrices that are rounded are noted; may be null.
  std::map<std::string, WeightMap::Rounded>* rounded = nullptr;
  /// Whether the CPU multiplies quantized matrices by f32 activations, not by such of 8 bits.
  bool exact_activations = false;
  /// Whose image processor is followed to the bit; nothing is what the family's reference takes.
  std::optional<ResizeBackend> image_backend;
  /// Nothing follows preprocessor_config.json and the family's reference.
  std::optional<ImageAspect> image_aspect;
  /// The most tiles that a picture is cut into, its thumbnail not counted (InternVL).
  std::optional<int> max_tiles;
  /// The fewest and the most pixels of a resized picture, and of a frame of a Qwen2-VL or
  /// Qwen2.5-VL clip; what a Qwen3-VL clip may have in all stays as its file says (Qwen-VL).
  std::optional<int64_t> min_pixels;
  std::optional<int64_t> max_pixels;
  /// Positions of Qwen2-VL and Qwen2.5-VL videos as transformers from 5.3 has them, for goldens;
  /// without it as the models were trained (MropeRule).
  bool transformers5 = false;
};

/// Options of pictures that a family has no use for.
struct UnusedOptions {
  bool aspect = false;
  bool tiles = false;
  bool pixels = false;
  bool crop = false;  ///< of the aspects
  bool pad = false;
  bool anyres = false;
};

/// Throws Error{kInvalidArgument} naming the option if one of `unused` is given.
void refuse_unused(const LoadOptions& options, std::string_view family, UnusedOptions unused);

/// Tells `weights`, whose names are canonical, how the model takes them.
void prepare_weights(WeightMap& weights, const LoadOptions& options, Stream& stream);

/// A JSON file of the source; absent reads as an empty object. Throws Error{kCorruptFile} for one
/// that holds no object.
nlohmann::json read_json(const ModelSource& source, const std::string& file);

}  // namespace kvlm
