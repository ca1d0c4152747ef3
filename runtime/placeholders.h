#pragma once

#include <span>
#include <string>
#include <vector>

#include "runtime/model.h"

namespace kvlm {

/// A sentence for each placeholder of another family that the texts hold, such as "<image>" in a
/// prompt for Qwen-VL: to this model it is plain text. Tokens of the model's own vocabulary are
/// none.
std::vector<std::string> foreign_placeholders(const Model& model,
                                              std::span<const ChatMessage> messages);

}  // namespace kvlm
