#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/weights.h"
#include "llm/decoder.h"
#include "llm/sampler.h"
#include "llm/tokenizer.h"
#include "runtime/chat_template.h"
#include "vision/image.h"
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

/// A picture ready for the vision tower.
struct ImageInput {
  Tensor pixels;   ///< (3, height, width) f32
  int tokens = 0;  ///< visual tokens it becomes
};

/// What generation_config.json says.
struct GenerationDefaults {
  std::vector<int32_t> eos_ids;
  SamplerOptions sampling;
  int max_tokens = 128;
};

/// One vision-language model, put together: everything between a picture and logits. Built by a
/// family (runtime/family.h). One thread at a time.
class Model {
 public:
  virtual ~Model() = default;

  virtual std::string_view name() const noexcept = 0;
  virtual std::string_view family() const noexcept = 0;
  virtual DType dtype() const noexcept = 0;
  virtual size_t weight_bytes() const noexcept = 0;

  virtual const Tokenizer& tokenizer() const noexcept = 0;
  virtual Decoder& decoder() noexcept = 0;
  virtual const GenerationDefaults& defaults() const noexcept = 0;
  /// The prompt that asks for a caption.
  virtual std::string_view caption_prompt() const noexcept = 0;
  /// The placeholder for a picture, as text and as id.
  virtual std::string_view image_token() const noexcept = 0;
  virtual int32_t image_id() const noexcept = 0;

  /// The fewest visual tokens that one picture can become; a family whose pictures all become as
  /// many says how many.
  virtual int min_image_tokens() const noexcept { return 1; }
  /// The most visual tokens that one picture can become.
  virtual int max_image_tokens() const noexcept = 0;
  /// Resizes, crops and normalises as the family's image processor does.
  virtual ImageInput prepare(const Image& image) const = 0;
  /// Visual tokens (image.tokens, hidden) f32 in the decoder's space.
  virtual Tensor encode(const ImageInput& image, Stream& stream, const Tap& tap) = 0;
  /// The prompt text of a conversation, ready for the assistant's next words.
  virtual std::string render(const std::vector<ChatMessage>& messages) const = 0;
};

}  // namespace kvlm
