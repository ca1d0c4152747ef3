#pragma once

#include <cstdint>
#include <string_view>

#include "llm/llama.h"
#include "runtime/loading/config.h"
#include "runtime/loading/decoder_config.h"
#include "vision/qwen_vit.h"

namespace kvlm {

enum class QwenVlGeneration : uint8_t { kQwen2, kQwen25, kQwen3 };

/// config.json of a Qwen-VL checkpoint, checked.
struct QwenVlConfig {
  QwenVlGeneration generation = QwenVlGeneration::kQwen2;
  std::string_view family;  ///< "qwen2.5-vl"
  DecoderType decoder = DecoderType::kQwen2Vl;
  LlamaConfig text;
  QwenVitConfig vision;
  double tokens_per_second = 0;  ///< positions that a second of a clip takes (Qwen2.5-VL); 0: none
  int32_t image_id = 0;
  int32_t video_id = 0;

  /// The side of what becomes one visual token, pixels.
  int token_side() const noexcept { return vision.patch_size * vision.merge; }
};

/// Reads it flat, as on the hub, or with a text_config, as transformers 5 saves it; absent fields
/// take the defaults of transformers 5.23's configuration class. Throws Error{kCorruptFile} naming
/// the field, Error{kUnsupported} for what is not built in.
QwenVlConfig parse_qwen_vl(const ConfigReader& config);

}  // namespace kvlm
