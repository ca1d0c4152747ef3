#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "llm/llama.h"
#include "runtime/family_model.h"
#include "runtime/loading/clip_config.h"
#include "runtime/loading/decoder_config.h"
#include "runtime/loading/siglip_config.h"
#include "vision/projector.h"

namespace kvlm {

// What the rooms of LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision share: the fields of config.json, the
// names of tensors, and tower, projector and decoder in a row.

inline constexpr std::string_view kLlavaImageToken = "<image>";

/// What a class of model has where its config.json is silent (the defaults of transformers 5.23's
/// configuration class).
struct LlavaDefaults {
  std::string_view tower;                 ///< model_type
  std::span<const DecoderType> decoders;  ///< built in; the first is the default
  int feature_layer;
  std::string_view feature_strategy;
  int image_id;
};

/// config.json, checked.
struct LlavaConfig {
  DecoderType decoder;
  LlamaConfig text;
  std::variant<ClipConfig, SiglipConfig> tower;
  Activation projector_activation;
  bool projector_bias;
  int32_t image_id;

  int image_size() const noexcept;
  int patch_size() const noexcept;
  /// Along a side of a picture, whole ones.
  int patches() const noexcept { return image_size() / patch_size(); }
};

LlavaConfig parse_llava_config(const ConfigReader& config, const LlavaDefaults& defaults);

/// Refuses a strategy that keeps the class token of a tower that has one: rows that are laid out as
/// a map are patches.
void require_rows_of_patches(const ConfigReader& config, const LlavaConfig& llava);

/// The id of a placeholder: KIND_token_id or, in files of before transformers 5, KIND_token_index.
int32_t parse_visual_id(const ConfigReader& config, std::string_view kind, int fallback,
                        int vocab_size);

/// What a room is assembled from.
struct LlavaSource {
  std::string_view family;
  ModelSource& source;
  const LlavaConfig& config;
  const LoadOptions& options;
  Stream& stream;
  bool newline = false;  ///< whether the weights have an image_newline
};

class LlavaModel : public FamilyModel {
 public:
  std::string_view image_token() const noexcept override { return kLlavaImageToken; }
  bool is_visual(int32_t id) const noexcept override { return id == image_id_; }
  VisualRows encode(std::span<const VisualInput* const> visuals, Stream& stream,
                    const Tap& tap) override;

 protected:
  /// Takes every weight. Throws Error{kCorruptFile} for one that is missing, of another shape, or
  /// left over.
  LlavaModel(const LlavaSource& from, TextFiles text);

  const PatchLayout& patches() const noexcept { return patches_; }
  /// Feature rows of one picture of the tower's size.
  int64_t tile_rows() const noexcept { return tile_rows_; }

 private:
  size_t visual_weight_bytes() const noexcept override {
    return tower_->weight_bytes() + projector_->weight_bytes();
  }

  int32_t image_id_;
  PatchLayout patches_;
  int64_t tile_rows_ = 0;
  std::unique_ptr<VisionEncoder> tower_;
  Tensor features_;  // of the tower, kept for the next pictures
  std::unique_ptr<MlpProjector> projector_;
  ConstTensorView newline_;  // (hidden,)
  std::vector<std::shared_ptr<const void>> owners_;
};

}  // namespace kvlm
