#pragma once

#include "llm/llama.h"
#include "runtime/loading/config.h"

namespace kvlm {

/// A text_config of model_type llama or mistral; absent fields take the class defaults of models.md
/// 2.3, because hub files store differences from them. Throws Error{kUnsupported} for another type
/// and for an unknown rope type. A sliding window limits max_positions.
LlamaConfig parse_llama_config(const ConfigReader& text);

}  // namespace kvlm
