#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "llm/llama.h"
#include "runtime/loading/config.h"

namespace kvlm {

/// Decoders whose layers are LLaMA's; what a configuration leaves out is different for each.
enum class DecoderType : uint8_t {
  kLlama,
  kMistral,
  kQwen2,
  kQwen3,
  kQwen2Vl,  ///< of Qwen2-VL and Qwen2.5-VL
  kQwen3Vl,
  kInternLm2,
};

/// The decoder that a text_config's model_type names, the first of `built_in` where it names none.
/// Throws Error{kUnsupported} listing `built_in`, those that the family has been published with,
/// for any other.
DecoderType decoder_type(const ConfigReader& text, std::span<const DecoderType> built_in);

/// The end of an answer that the class of a decoder has where no file says one; nothing if the
/// class has none.
std::optional<int32_t> default_eos_id(DecoderType type);

/// The fields of a decoder; absent ones take the defaults of transformers 5.23's configuration
/// class, because hub files store differences from them. A sliding window limits max_positions.
/// Throws Error{kCorruptFile} naming the field, Error{kUnsupported} for an unknown rope type.
LlamaConfig parse_decoder_config(const ConfigReader& text, DecoderType type);

}  // namespace kvlm
