#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/tensor.h"
#include "llm/decoder.h"
#include "llm/tokenizer.h"
#include "runtime/chat_template.h"
#include "runtime/loading/generation_config.h"
#include "vision/image.h"
#include "vision/patches.h"

namespace kvlm {

/// A picture ready for the vision tower.
struct VisualInput {
  VisualPatches patches;
  int tokens = 0;  ///< visual tokens it becomes
};

/// What pictures become: rows of the decoder's input.
struct VisualRows {
  Tensor all;                             ///< (rows, hidden) f32, of all of them
  std::vector<ConstTensorView> pictures;  ///< those of each, (tokens, hidden)
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
  virtual VisualInput prepare(const Image& image) const = 0;
  /// Tower and projector, of all pictures together; at least one.
  virtual VisualRows encode(std::span<const VisualInput* const> pictures, Stream& stream,
                            const Tap& tap) = 0;
  /// The prompt text of a conversation, ready for the assistant's next words.
  virtual std::string render(const std::vector<ChatMessage>& messages) const = 0;
};

}  // namespace kvlm
