#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "llm/llama.h"
#include "runtime/loading/config.h"
#include "runtime/loading/decoder_config.h"
#include "vision/intern_vit.h"
#include "vision/tiling.h"

namespace kvlm {

/// What both spellings of an InternVL config.json say.
struct InternVlConfig {
  LlamaConfig text;
  InternVitConfig vision;
  int merge = 2;               ///< patches along a side of the square that becomes one row
  bool columns_first = false;  ///< rows of a tile go column by column (ps_version v1)

  /// Visual rows of one tile.
  int64_t tile_rows() const noexcept {
    const int64_t side = vision.image_size / vision.patch_size / merge;
    return side * side;
  }
};

/// Throws Error{kCorruptFile} if image_seq_length, which the model's configuration and the
/// processor's have, is there and is not what the tower makes of a tile.
void check_tile_rows(const ConfigReader& config, const InternVlConfig& model);

/// config.json with model_type "internvl", as transformers saves it (`-hf`).
struct InternVlHfConfig {
  InternVlConfig model;
  DecoderType decoder;
  int32_t image_id;  ///< of <IMG_CONTEXT>
};

/// config.json with model_type "internvl_chat", as OpenGVLab publishes it.
struct InternVlChatConfig {
  InternVlConfig model;
  DecoderType decoder;
  DynamicTiling tiling;
  std::string conversation;  ///< name of the template, see conversation.h
  std::optional<std::string> system_message;
};

/// Both throw Error{kCorruptFile} naming the field; Error{kUnsupported} for decoders that are not
/// built in and for what changes the answers and is not built.
InternVlHfConfig parse_internvl_config(const ConfigReader& config);
InternVlChatConfig parse_internvl_chat_config(const ConfigReader& config);

}  // namespace kvlm
