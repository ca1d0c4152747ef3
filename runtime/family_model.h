#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/loading/source.h"
#include "runtime/loading/text_files.h"
#include "runtime/model.h"

namespace kvlm {

/// What the models of all families have alike: a name, the files around the text, a decoder. A room
/// adds its tower and its pictures.
class FamilyModel : public Model {
 public:
  std::string_view name() const noexcept override { return name_; }
  std::string_view family() const noexcept override { return family_; }
  DType dtype() const noexcept override { return dtype_; }
  std::string weight_format() const override { return decoder_->weight_format(); }
  size_t weight_bytes() const noexcept override;
  const Tokenizer& tokenizer() const noexcept override { return *text_.tokenizer; }
  Decoder& decoder() noexcept override { return *decoder_; }
  const GenerationDefaults& defaults() const noexcept override { return text_.defaults; }
  std::string_view caption_prompt() const noexcept override { return "Describe the image."; }
  std::string render(const std::vector<ChatMessage>& messages) const override {
    return text_.render(messages);
  }

 protected:
  FamilyModel(std::string name, std::string_view family, TextFiles text)
      : name_(std::move(name)), family_(family), text_(std::move(text)) {}

  /// Once the room has made it; `options` tell the type that its weights were converted to.
  void set_decoder(std::unique_ptr<Decoder> decoder, const LoadOptions& options);
  /// Of the tower and what is between it and the decoder.
  virtual size_t visual_weight_bytes() const noexcept = 0;

 private:
  std::string name_;
  std::string_view family_;
  TextFiles text_;
  std::unique_ptr<Decoder> decoder_;
  DType dtype_ = DType::kF32;
};

/// What tower and projector made of several pictures, told apart and packed.
///
///   features      (sum of feature_rows, hidden) f32, picture after picture
///   feature_rows  of each picture; visuals[i]->rows where it has no packing
///   newline       (hidden,) the row behind each picture's features that a packing may name; empty
///                 for models without
VisualRows pack_visuals(Tensor features, std::span<const int64_t> feature_rows,
                        std::span<const VisualInput* const> visuals, ConstTensorView newline,
                        Stream& stream);

}  // namespace kvlm
