#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/model.h"

namespace kvlm {

/// The fewest rows that a conversation with `images` pictures can have, told before any is opened.
/// Throws Error{kInvalidArgument}, starting with `who` and ending with `cure`, if the model's
/// context does not hold them; and like make_prompt().
int64_t fewest_prompt_rows(Model& model, const std::vector<ChatMessage>& messages, size_t images,
                           const std::string& who, const std::string& cure);

}  // namespace kvlm
