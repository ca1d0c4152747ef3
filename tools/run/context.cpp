#include "tools/run/context.h"

#include <algorithm>

namespace kvlm {

int request_rows(Model& model, const std::vector<ChatMessage>& messages,
                 const PromptVisuals& visuals, int max_tokens, const std::string& who,
                 const std::string& cure) {
  const PromptOutline outline = outline_prompt(model, messages, visuals);
  const int context = model.decoder().max_positions();
  require_context(outline, who, model, context, cure);
  return static_cast<int>(std::min<int64_t>(outline.rows + max_tokens, context));
}

}  // namespace kvlm
