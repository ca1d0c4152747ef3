#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/prompt.h"

namespace kvlm {

/// Rows that a request takes at most: its prompt and as many tokens as it may make, within the
/// model's context. Throws Error{kInvalidArgument}, starting with `who` and ending with `cure`, if
/// the context does not hold the prompt; and as outline_prompt().
int request_rows(Model& model, const std::vector<ChatMessage>& messages,
                 const PromptVisuals& visuals, int max_tokens, const std::string& who,
                 const std::string& cure);

}  // namespace kvlm
