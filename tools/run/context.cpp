#include "tools/run/context.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "runtime/prompt.h"

namespace kvlm {

int64_t fewest_prompt_rows(Model& model, const std::vector<ChatMessage>& messages, size_t images,
                           const std::string& who, const std::string& cure) {
  const int64_t rows = prompt_rows(model, messages, images, model.min_image_tokens());
  const int context = model.decoder().max_positions();
  if (rows < context) return rows;
  const std::string pictures =
      images == 0 ? "" : fmt::format(" with {} picture{}", images, images == 1 ? "" : "s");
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: the prompt takes {} tokens{}{}, but {} has a context of {}; {}", who, rows,
                  model.min_image_tokens() < model.max_image_tokens() ? " or more" : "", pictures,
                  model.name(), context, cure));
}

}  // namespace kvlm
